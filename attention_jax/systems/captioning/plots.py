"""Plots of captions: for each word of a hypothesis, its weights as a map over the picture."""

import math
from collections.abc import Sequence

import numpy as np

from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.predictor import Hypothesis
from attention_jax.systems.captioning.data import Box, Pictures, read_image
from attention_jax.systems.captioning.overlays import CaptionOverlay

IMAGE_SIZE = 224  # side of a plotted image file, in pixels
CellCentres = tuple[np.ndarray, np.ndarray]  # of the rows and of the columns of cells, from 0 to 1


def weight_maps(hypothesis: Hypothesis, cell_centres: CellCentres) -> np.ndarray:
  """Returns the weights [tokens, rows, columns] of a hypothesis, without those of EOS."""
  return hypothesis.weights[: len(hypothesis.tokens)].reshape(-1, *map(len, cell_centres))


def overlay_files(
  files: Sequence[str], hypotheses: Sequence[Hypothesis], cell_centres: CellCentres
) -> list[CaptionOverlay]:
  """Returns the plots of image files, with one hypothesis each.

  Args:
    files: paths of the images, which are also the titles.
    hypotheses: one per file.
    cell_centres: the grid of the weights.

  Raises:
    UserError: for a file that is missing or cannot be read as an image.
  """
  return [
    CaptionOverlay(
      picture=read_image(file, IMAGE_SIZE, max_upscale=math.inf),
      words=hypothesis.tokens,
      maps=weight_maps(hypothesis, cell_centres),
      title=file,
      cell_centres=cell_centres,
    )
    for file, hypothesis in zip(files, hypotheses, strict=True)
  ]


def token_boxes(boxes: Sequence[Box | None], caption: str, vocabulary: Vocabulary) -> list[Box | None]:
  """Returns the gold box of each token of a caption; None for a token without one, such as white space.

  Args:
    boxes: the gold box of each word of the caption, None for words that have none.
    caption: the caption.
    vocabulary: cuts it into tokens.
  """
  return [boxes[word] if word >= 0 else None for word in vocabulary.word_ids(caption)]


def overlay_rows(
  pictures: Pictures,
  rows: Sequence[int],
  hypotheses: Sequence[Hypothesis],
  cell_centres: CellCentres,
  vocabulary: Vocabulary,
) -> list[CaptionOverlay]:
  """Returns the plots of pictures of a split: each with a hypothesis, its captions, and the boxes of its first caption.

  The boxes are assigned to the tokens of a hypothesis only if they are those of the first caption.

  Args:
    pictures: the split.
    rows: numbers of the pictures.
    hypotheses: one per row.
    cell_centres: the grid of the weights.
    vocabulary: cuts captions into tokens.
  """
  overlays = []
  for row, hypothesis in zip(rows, hypotheses, strict=True):
    captions = [i for i, picture in enumerate(pictures.picture_index) if picture == row]
    caption = pictures.captions[captions[0]]
    boxes = [] if pictures.boxes is None else pictures.boxes[captions[0]]
    is_reference = pictures.boxes is not None and vocabulary.tokenize(caption) == hypothesis.tokens
    if pictures.files is None:
      image = pictures.pictures[row]
    else:
      image = read_image(pictures.files[row], IMAGE_SIZE, max_upscale=math.inf)
    overlays.append(
      CaptionOverlay(
        picture=image,
        words=hypothesis.tokens,
        maps=weight_maps(hypothesis, cell_centres),
        title=pictures.names[row],
        boxes=token_boxes(boxes, caption, vocabulary) if is_reference else None,
        cell_centres=cell_centres,
        references=[pictures.captions[i] for i in captions],
        gold=list(dict.fromkeys(filter(None, boxes))),
      )
    )
  return overlays
