"""Grids of features of images by a network that somebody else has trained, for the task `captions(features=...)`."""

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.data.pictures import IMAGE_EXTENSIONS, read_image
from attention_jax.errors import UserError

Network = Callable[[np.ndarray], np.ndarray]  # pictures [B, size, size, 3] uint8 -> [B, rows, columns, C]


def write_features(
  path: str | Path,
  folder: str | Path,
  names: Sequence[str],
  network: Network,
  *,
  size: int,
  batch: int = 32,
  on_batch: Callable[[int], None] = lambda count: None,
) -> tuple[int, ...]:
  """An .npz file with the grid [rows, columns, C] of every image by its name, float16; nothing is at `path` before all
  is in it.

  Args:
    size: to which images are scaled, the middle square of each.
    on_batch: is told how many images each batch had.
  Returns: the shape of a grid.
  Raises: UserError where there are no images or one cannot be read, and where the file cannot be written.
  """
  if not names:
    raise UserError(f'{folder}: no images in it; possible: {", ".join(IMAGE_EXTENSIONS)}')
  partial = Path(f'{path}.part')
  try:
    with zipfile.ZipFile(partial, 'w') as file:
      for start in range(0, len(names), batch):
        some = names[start : start + batch]
        grids = network(np.stack([read_image(os.path.join(folder, name), size) for name in some]))
        if grids.ndim != 4 or len(grids) != len(some):
          raise UserError(f'the network gives {list(grids.shape)}; expected [{len(some)}, rows, columns, features]')
        for name, grid in zip(some, grids, strict=True):
          with file.open(f'{name}.npy', 'w', force_zip64=True) as entry:
            np.lib.format.write_array(entry, np.ascontiguousarray(grid, np.float16))
        on_batch(len(some))
    os.replace(partial, path)
  except OSError as error:
    raise UserError(f'{path}: cannot be written ({error.strerror or error})') from error
  finally:
    partial.unlink(missing_ok=True)
  return grids.shape[1:]


def load_pretrained(name: str) -> tuple[Network, int]:
  """A network of transformers, by its name at Hugging Face or the folder that it was saved to; and the size of the
  pictures that it was trained with, pixels.

  Whatever has an image model there: ResNet, ConvNeXt, Swin, ViT, DINOv2 ..., and with the package timm what that has.
  Of a transformer the tokens of patches are the grid.

  Raises: UserError where PyTorch or transformers are not installed, and for a network that cannot be had.
  """
  try:
    import torch
    from transformers import AutoImageProcessor, AutoModel
  except ImportError as error:
    raise UserError(f'{error.name} is not installed; possible: pip install torch transformers') from error
  try:
    model = AutoModel.from_pretrained(name).eval()
    told = AutoImageProcessor.from_pretrained(name)
  except (OSError, ValueError, ImportError) as error:
    raise UserError(f'{name}: no network of images that transformers has ({" ".join(str(error).split())})') from error
  model = getattr(model, 'vision_model', model)  # of those that know texts too
  mean, deviation = (np.array(x, np.float32) for x in (told.image_mean or 0.0, told.image_std or 1.0))

  def network(pictures: np.ndarray) -> np.ndarray:
    scaled = (pictures.astype(np.float32) / 255 - mean) / deviation
    try:
      with torch.inference_mode():
        found = model(pixel_values=torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy())).last_hidden_state.numpy()
    except (RuntimeError, ValueError) as error:
      reason = ' '.join(str(error).split())[:160]
      raise UserError(f'{name}: does not take pictures of {pictures.shape[1:3]} pixels ({reason})') from error
    return found.transpose(0, 2, 3, 1) if found.ndim == 4 else patch_grid(found)

  return network, input_size(told)


def input_size(told: Any) -> int:
  """Pixels of a side, of what an image processor of transformers says: the crop's, else what pictures are scaled to,
  else 224, as most are."""
  for size in (getattr(told, 'crop_size', None), getattr(told, 'size', None)):
    for key in ('height', 'shortest_edge'):
      if size and key in size:
        return int(size[key])
  return 224


def patch_grid(tokens: np.ndarray) -> np.ndarray:
  """[B, N, C] -> [B, rows, rows, C]: of the tokens of a vision transformer those of patches, which come last."""
  rows = int(tokens.shape[1] ** 0.5)
  return tokens[:, tokens.shape[1] - rows * rows :].reshape(len(tokens), rows, rows, -1)
