"""From pictures to text: the system of captioners."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import image_overlays
from attention_jax.analysis.pointing_game import count_pointing_hits
from attention_jax.data import vocab
from attention_jax.data.batching import Batch, check_any_row_fits
from attention_jax.data.pictures import (
  PICTURES,
  CaptionBatches,
  EncodedCaptions,
  LazySplits,
  Pictures,
  assign_lengths,
  check_caption_lengths,
  describe_captions,
  encode_captions,
  eval_caption_batches,
  load_pictures,
  read_image,
)
from attention_jax.data.text import Corpus
from attention_jax.errors import UserError, choose
from attention_jax.inference.evaluation import TeacherForcedScorer, predict_and_evaluate, weight_metrics
from attention_jax.inference.metrics import MetricValue, compute_metric
from attention_jax.inference.predictor import BeamSearch, Hypothesis, Prediction, compile_search
from attention_jax.kernels import auto
from attention_jax.losses.auxiliary import LOSSES, auxiliary_losses, check_weights
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig
from attention_jax.models.image_encoders import build_captioner
from attention_jax.modules.attention import Attention
from attention_jax.specs import Size, bind
from attention_jax.systems.base import Config, parse_rows
from attention_jax.systems.translation import TranslationEvaluation, text_metric_directions
from attention_jax.tokens import EOS
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh, replicate, shard_batch
from attention_jax.training.step import step_rngs

SHAPE = 'pictures.json'
DRAWN = 224  # pixels of an image whose features were read
POINTING_METRICS = {'pointing': True, 'pointing_words': True}
CAPTION_METRICS = {'loss': False, 'accuracy': True} | POINTING_METRICS


@dataclasses.dataclass(frozen=True)
class CaptioningData:
  """The fields of `config.data`.

  Attributes:
    task: a spec of data.pictures.PICTURES.
    folder: what relative paths in the task start from.
    vocabulary: of the captions, a spec of data.vocab.VOCABULARIES.
    buckets: lengths of captions, the end-of-sentence token included; each is one compilation.
    batch_size: captions of a batch, each with its picture.
  """

  task: str = 'shapes'
  folder: str = 'data'
  vocabulary: str = 'word'
  buckets: tuple[int, ...] = (20,)
  batch_size: Size = 64


class CaptioningSystem:
  """Any encoder of pictures with any decoder and output layer that says words."""

  config_groups: Mapping[str, type] = {
    'data': CaptioningData,
    'model': ModelConfig,
    'model.attention': Attention,
    'evaluation': TranslationEvaluation,
  }
  plot_filename, extra_plot_suffixes = 'attention.png', ('.gif',)

  def __init__(self, config: Config, vocabulary, shape: Sequence[int], data: Callable[[], Mapping[str, Pictures]]):
    """shape: of a picture. `data` gives the splits when they are asked for."""
    self.config, self.vocabulary, self.shape, self._data = config, vocabulary, tuple(shape), data
    self.model = build_captioner(config['model'], len(vocabulary))
    if config['evaluation']['replace_unknown']:
      raise UserError('evaluation.replace_unknown=True: a picture has no words; possible: False')

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'CaptioningSystem':
    pictures = load_pictures(config['data'])
    spec, train = config['data']['vocabulary'], pictures['train']
    vocabulary = vocab.load_stored(spec, folder, 'target') if folder else None
    vocabulary = vocabulary or vocab.train(spec, train.captions)
    return cls(config, vocabulary, train.pictures.shape[1:], lambda: pictures)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'CaptioningSystem':
    vocabulary = vocab.load_stored(config['data']['vocabulary'], folder, 'target')
    try:
      with open(os.path.join(folder, SHAPE), encoding='utf-8') as file:
        shape = json.load(file)
    except (OSError, ValueError) as error:
      raise UserError(f'{folder}/{SHAPE}: cannot be read ({error}); was a run started there?') from error
    return cls(config, vocabulary, shape, lambda: load_pictures(config['data']))

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    check_caption_lengths(config['data']['buckets'])
    bind(config['data']['task'], PICTURES, 'task')
    vocab.parse_kind(config['data']['vocabulary'])
    TranslationEvaluation(**config['evaluation'])
    for spec in config['evaluation']['metrics']:
      compute_metric(spec, ['a'], [['a']])
    model = build_captioner(config['model'], 5)
    if model.copies or config['model']['share_embeddings']:
      raise UserError('a picture has no words: no output layer copies from it, and share_embeddings is False')
    beside = auxiliary_losses(training.auxiliary)
    check_weights(beside, model.decoder.attention if model.traits.attends else None)
    if training.select in POINTING_METRICS and not model.traits.attends:
      raise UserError(f'training.select={training.select!r} is of weights, and this decoder attends to nothing')
    for name, row in beside.items():
      if row.needs_text:
        possible = ', '.join(name for name, row in LOSSES.items() if not row.needs_text)
        raise UserError(f'auxiliary loss {name} is of a source of words; possible for pictures: {possible}')
    batch = _smallest(model, (64, 64, 3))
    params = jax.eval_shape(lambda: initializer(model, (64, 64, 3))(0))
    make_anneal(training.anneal, params, training.steps)
    loss = _loss(model, training)
    jax.eval_shape(loss, params, batch, step_rngs(jax.random.key(0)), dict.fromkeys(loss.running, 0.0))

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return CAPTION_METRICS | text_metric_directions(config)

  @functools.cached_property
  def pictures(self) -> Mapping[str, Pictures]:
    """The splits as pictures and text."""
    return self._data()

  @functools.cached_property
  def encoded(self) -> Mapping[str, EncodedCaptions]:
    """The splits as pictures and ids."""
    return LazySplits(self.pictures, lambda name: encode_captions(self.pictures[name], self.vocabulary))

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, Training(**self.config['training']))

  def corpus(self, split: str) -> Corpus:
    """The rows of a split: names of pictures, captions."""
    return self.pictures[split].corpus

  @property
  def report(self) -> list[str]:
    entries = f'vocabulary {self.config["data"]["vocabulary"]}: {len(self.vocabulary)} entries'
    each = self.pictures.items()
    return [entries, *(describe_captions(name, split, self.encoded[name], self._lengths) for name, split in each)]

  @property
  def splits(self) -> list[str]:
    return list(self.pictures)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.encoded

  @property
  def implementation(self) -> str:
    attention = self.model.decoder.attention
    several = auto.describe_choice(attention.resolved_score, attention.resolved_alignment)
    return attention.implementation + f' ({several})' * (attention.implementation == 'auto')

  def save(self, folder: str) -> None:
    self.vocabulary.save(folder, 'target')
    path = os.path.join(folder, SHAPE)
    with open(f'{path}.part', 'w', encoding='utf-8') as file:
      json.dump(self.shape, file)
    os.replace(f'{path}.part', path)

  def initializer(self) -> Callable[[int], Any]:
    return initializer(self.model, self.shape)

  def batches(self, seed: int) -> CaptionBatches:
    size = self.config['data']['batch_size']
    return CaptionBatches(self.encoded['train'], self._lengths, size, seed, jax.process_index(), jax.process_count())

  def check_data(self, log: Callable[[str], None]) -> None:
    for name, encoded in self.encoded.items():
      check_any_row_fits(name, assign_lengths(encoded, self._lengths))
    select = self.config['training']['select']
    if select in POINTING_METRICS and self.pictures['validation'].boxes is None:
      raise UserError(f'training.select={select!r} needs gold boxes, which the validation split has not')
    found, reads = self.pictures['train'].pictures.dtype, self.model.encoder.input_dtype
    if found != reads:
      raise UserError(
        f'config.model.encoder={self.config["model"]["encoder"]!r} reads {reads.__name__}, the pictures are {found}; '
        'possible: grid for pictures (uint8), precomputed for features (float32)'
      )
    params = jax.eval_shape(lambda: self.initializer()(0))  # a picture that does not suit the encoder
    batch = _smallest(self.model, self.shape)
    jax.eval_shape(self.loss, params, batch, None, dict.fromkeys(self.loss.running, 0.0))

  def evaluate(self, params: Any, split: str, *, beams: int | None = None):
    pictures, encoded = self.pictures[choose(split, self.pictures, 'split')], self.encoded[split]
    forced = self._scorer.score_batches(
      params, eval_caption_batches(encoded, self._lengths, self._scorer.rows), len(pictures.captions)
    )
    found = {'loss': MetricValue(forced.loss, 'nat/token', 'targets:forced')}
    found['accuracy'] = MetricValue(100 * forced.accuracy, '%', 'targets:forced')
    options = self.config['evaluation']
    numbers = {name: i for i, name in enumerate(pictures.names)}
    predict = lambda names, beams: self.predict(params, pictures.pictures[[numbers[n] for n in names]], names, beams)
    texts, predictions = predict_and_evaluate(pictures.corpus, predict, options, beams=beams or options['beams'])
    found |= texts
    if weights := [w for w in forced.weights if w is not None and w.any()]:
      found['entropy'] = weight_metrics(weights)['entropy']
      if pictures.boxes is not None:
        found |= self._pointing(pictures, forced.weights)
    return found, predictions

  def predict(self, params: Any, pictures: np.ndarray, names: Sequence[str], beams: int) -> list[Prediction]:
    """The captions of pictures [P, height, width, C]."""
    find, mesh, rows = self._find(beams), make_mesh(jax.local_devices()), self._scorer.rows
    params, found = replicate(jax.device_get(params), mesh), []
    for start in range(0, len(pictures), rows):
      some = pictures[start : start + rows]
      real = np.arange(rows) < len(some)
      padded = np.pad(some, [(0, rows - len(some))] + [(0, 0)] * (some.ndim - 1))
      told = jax.device_get(find(params, *shard_batch((padded, real[:, None]), mesh)))
      found += [self._read(told, i, names[start + i]) for i in range(len(some))]
    return found

  def format_predictions(self, predictions: Sequence[Prediction]) -> list[str]:
    return [p.hypotheses[0].text if p.hypotheses else '' for p in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """A picture with the map of every word, and the same as an animation beside it (.gif).

    Rows are pictures of the split; `inputs` are files with images. Images are drawn larger than they are read, and
    where features are read, those that they were computed from.
    """
    features = self.model.encoder.input_dtype is not np.uint8
    if inputs and features:
      raise UserError('--text: this run reads features and no images; possible: --split and --rows')
    if inputs:
      shown, names, boxes = np.stack([read_image(file, self.shape[0]) for file in inputs]), list(inputs), None
      files = names
    else:
      pictures = self.pictures[choose(split, self.pictures, 'split')]
      chosen = parse_rows(rows, split, len(pictures.names))
      shown, names, boxes = pictures.pictures[chosen], [pictures.names[i] for i in chosen], pictures.boxes
      files = pictures.files and [pictures.files[i] for i in chosen]
    items = []
    for i, said in enumerate(self.predict(params, shown, names, self.config['evaluation']['beams'])):
      if not said.hypotheses:
        raise UserError(f'no caption for {said.source!r}')
      best = said.hypotheses[0]
      maps = best.weights[: len(best.tokens)].reshape(-1, *map(len, self._middles))
      first = None if boxes is None else pictures.picture_index.index(chosen[i])
      right = boxes is not None and pictures.captions[first] == best.text
      picture = shown[i] if files is None else read_image(files[i], DRAWN, max_upscale=math.inf)
      every = boxes[first] if boxes is not None else []
      items.append(
        image_overlays.CaptionOverlay(
          picture,
          best.tokens,
          maps,
          said.source,
          every if right else None,
          self._middles,
          []
          if inputs
          else [text for text, of in zip(pictures.captions, pictures.picture_index, strict=True) if of == chosen[i]],
          list(dict.fromkeys(filter(None, every))),
        )
      )
    image_overlays.write(items, path)

  def predict_lines(
    self, params: Any, lines: Sequence[str], name: str, first: int = 1
  ) -> list[tuple[str, dict[str, Any]]]:
    """Of each file with an image: the caption; and its tokens, with the weights of each over rows and columns."""
    if self.model.encoder.input_dtype is not np.uint8:
      raise UserError('this run reads features and no images; possible: one whose encoder is grid')
    images = np.stack([read_image(line, self.shape[0], f'{name}:{i}: ') for i, line in enumerate(lines, first)])
    found = []
    for said in self.predict(params, images, lines, self.config['evaluation']['beams']):
      if not said.hypotheses:
        raise UserError(f'no caption for {said.source!r}')
      best = said.hypotheses[0]
      maps = best.weights[: len(best.tokens)].reshape(-1, *map(len, self._middles))
      looked = {'tokens': best.tokens, 'weights': maps}
      found.append((best.text, {'caption': best.text, 'score': best.score, 'log_prob': best.log_prob} | looked))
    return found

  @property
  def _middles(self) -> tuple[np.ndarray, ...]:
    """Of the rows and of the columns of cells, from 0 to 1."""
    return tuple(map(self.model.encoder.cell_centres, self.shape[:2]))

  @property
  def _lengths(self) -> tuple[int, ...]:
    return check_caption_lengths(self.config['data']['buckets'])

  @functools.cached_property
  def _scorer(self) -> TeacherForcedScorer:
    return TeacherForcedScorer(self.model, (), self.config['evaluation']['batch_size'])

  @functools.cached_property
  def _find(self) -> Callable[[int], Callable]:
    """How many beams -> what finds captions, compiled once."""
    options = TranslationEvaluation(**self.config['evaluation'])
    longest = options.max_length or self._lengths[-1]
    mesh = make_mesh(jax.local_devices())
    return functools.cache(lambda beams: compile_search(self.model, BeamSearch(beams), longest, options.ranking, mesh))

  def _read(self, told, i: int, name: str) -> Prediction:
    hypotheses = []
    for k in range(told.lengths.shape[1]):
      if length := int(told.lengths[i, k]):
        ids = told.tokens[i, k, :length].tolist()
        content = ids[:-1] if ids[-1] == EOS else ids
        tokens, weights = [self.vocabulary.id_to_token(id) for id in content], told.weights[i, k, :length].copy()
        text, score, log_prob = self.vocabulary.decode(content), told.scores[i, k], told.log_probs[i, k]
        hypotheses.append(Hypothesis(text, tokens, float(score), float(log_prob), weights))
    return Prediction(name, [], hypotheses)

  def _pointing(self, pictures: Pictures, weights: Iterable[np.ndarray | None]) -> dict[str, MetricValue]:
    """Whether the weights of what is told of a thing point at it: those of all its words together, and of each."""
    found = {}
    rows = [
      (matrix, [boxes[word] if word >= 0 else None for word in self.vocabulary.word_ids(caption)])
      for boxes, caption, matrix in zip(pictures.boxes, pictures.captions, weights, strict=True)
      if matrix is not None
    ]
    cell_centres = tuple(of * size for of, size in zip(self._middles, self.shape[:2], strict=True))
    for name, merge_phrases in (('pointing', True), ('pointing_words', False)):
      played = [count_pointing_hits(matrix, boxes, cell_centres, merge_phrases=merge_phrases) for matrix, boxes in rows]
      hits, total = map(sum, zip(*played, strict=True))
      what = f'{"things" if merge_phrases else "words"}:{total}'
      found[name] = MetricValue(100 * hits / max(total, 1), '%', f'argmax cell in box|targets:forced|{what}')
    return found


def initializer(model: EncoderDecoder, shape: Sequence[int]) -> Callable[[int], Any]:
  """seed -> initial parameters, a function of the seed alone."""
  batch = _smallest(model, shape)

  @jax.jit
  def drawn(rng):
    return model.init(rng, *map(jnp.asarray, (batch.source, batch.source_mask, batch.target)))['params']

  return lambda seed: drawn(jax.random.key(seed))


def _smallest(model: EncoderDecoder, shape: Sequence[int]) -> Batch:
  """A batch of one picture of this shape with a caption of two tokens, by which parameters and shapes are told."""
  source = np.zeros((1, *shape), model.encoder.input_dtype)
  real, target = np.ones((1, 1), bool), np.zeros((1, 2), np.int32)
  return Batch(source, real, target, np.ones((1, 2), bool), np.zeros(1, np.int32))


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)
