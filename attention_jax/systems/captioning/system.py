"""Captioning: the system of models from pictures to text."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from attention_jax import atomic
from attention_jax.data import vocab
from attention_jax.data.batching import Batch, Share, check_rows_fit
from attention_jax.data.preparing import Preparation
from attention_jax.data.text import Corpus
from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.generate import Hypotheses
from attention_jax.decoding.metrics import MetricValue, compute_metric
from attention_jax.decoding.predictor import Hypothesis, Prediction
from attention_jax.errors import UserError, choose
from attention_jax.losses.auxiliary import LOSSES, auxiliary_losses, check_weights
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig
from attention_jax.specs import bind
from attention_jax.systems.base import (
  LinePrediction,
  Log,
  System,
  check_parameter_options,
  describe_decoder_implementation,
  initializer_for_batch,
  parse_rows,
  trace_loss,
)
from attention_jax.systems.captioning import overlays
from attention_jax.systems.captioning.config import CaptioningDataConfig
from attention_jax.systems.captioning.data import (
  PICTURES,
  CaptionBatches,
  CaptionSplit,
  LazySplits,
  Pictures,
  assign_captions,
  check_caption_buckets,
  describe_captions,
  encode_captions,
  eval_caption_batches,
  load_pictures,
  prepare_captions,
  read_image,
)
from attention_jax.systems.captioning.model import build_captioner
from attention_jax.systems.captioning.pointing_game import count_pointing_hits
from attention_jax.systems.config import RunConfig
from attention_jax.systems.text_evaluation import (
  TeacherForcedScorer,
  TextEvaluationConfig,
  predict_and_evaluate,
  text_metric_directions,
  weight_metrics,
)
from attention_jax.tokens import EOS
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.watch import Watch, unwatched

SHAPE_FILE = 'pictures.json'
TRACED_SHAPE = (64, 64, 3)  # of the picture that `check` traces
POINTING_METRICS = {'pointing': True, 'pointing_words': True}  # True: a higher value is better
CAPTION_METRICS = {'loss': False, 'accuracy': True} | POINTING_METRICS


class CaptioningSystem(System):
  """Any encoder of pictures with any decoder and any output layer that does not copy.

  Args:
    config: the whole config of the run.
    vocabulary: vocabulary of the captions.
    shape: shape of a picture, [height, width, C].
    load_data: returns the splits; called on first use.
  """

  config_groups: Mapping[str, type] = {
    'data': CaptioningDataConfig,
    'model': ModelConfig,
    'evaluation': TextEvaluationConfig,
  }
  plot_filename = 'attention.png'
  extra_plot_suffixes = ('.gif',)
  extra_metrics = ('entropy',)

  def __init__(
    self,
    config: RunConfig,
    vocabulary: vocab.Vocabulary,
    shape: Sequence[int],
    load_data: Callable[[], Mapping[str, Pictures]],
  ):
    self.config = config
    self.vocabulary = vocabulary
    self.shape = tuple(shape)
    self.model = build_captioner(config.model, len(vocabulary))
    self._load_data = load_data

  @classmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'CaptioningSystem':
    pictures = load_pictures(config.data)
    train = pictures['train']
    spec = config.data.vocabulary
    prepared_folder = train.prepared and str(train.prepared.folder)
    vocabulary, _ = vocab.load_or_train(spec, 'target', train.captions, folder, prepared_folder)
    return cls(config, vocabulary, train.pictures.shape[1:], lambda: pictures)

  @classmethod
  def open(cls, config: RunConfig, folder: str) -> 'CaptioningSystem':
    _check_no_source_words(config)
    vocabulary = vocab.load_stored(config.data.vocabulary, folder, 'target')
    if vocabulary is None:
      raise UserError(f'{folder} holds no target vocabulary; expected the folder of a training run')
    path = epath.Path(folder) / SHAPE_FILE
    try:
      shape = json.loads(path.read_text())
    except (OSError, ValueError) as error:
      raise UserError(f'{path}: cannot be read ({error}); expected the folder of a training run') from error
    return cls(config, vocabulary, shape, lambda: load_pictures(config.data))

  def with_config(self, config: RunConfig) -> 'CaptioningSystem':
    return CaptioningSystem(config, self.vocabulary, self.shape, self._load_data)

  @classmethod
  def check(cls, config: RunConfig) -> None:
    training = config.training
    check_caption_buckets(config.data.buckets)
    bind(config.data.task, PICTURES, 'task')
    vocab.parse_kind(config.data.vocabulary)
    _check_no_source_words(config)
    for spec in config.evaluation.metrics:
      compute_metric(spec, ['a'], [['a']])  # some options are checked only when the metric is computed
    model = build_captioner(config.model, 5)
    if model.copies or config.model.share_embeddings:
      raise UserError(
        'pictures have no source words; expected an output layer that does not copy and share_embeddings=False, got '
        f'config.model.output={config.model.output!r}, share_embeddings={config.model.share_embeddings}'
      )
    auxiliary = auxiliary_losses(training.auxiliary)
    check_weights(auxiliary, model.decoder.attention if model.traits.attends else None)
    if training.select in POINTING_METRICS and not model.traits.attends:
      raise UserError(f'training.select={training.select!r} measures weights: expected a decoder with attention')
    for name, row in auxiliary.items():
      if row.needs_text:
        supported = ', '.join(name for name, row in LOSSES.items() if not row.needs_text)
        raise UserError(f'auxiliary loss {name!r} needs a text as source; for pictures, expected one of: {supported}')
    batch = _dummy_batch(model, TRACED_SHAPE)
    params = jax.eval_shape(lambda: initializer_for_batch(model, batch)(0))
    check_parameter_options(training, params)
    trace_loss(_loss(model, training), params, batch)

  @classmethod
  def preparation(cls, config: RunConfig) -> Preparation:
    return prepare_captions(config.data)

  @classmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    return CAPTION_METRICS | text_metric_directions(config.evaluation)

  @functools.cached_property
  def pictures(self) -> Mapping[str, Pictures]:
    """The splits as pictures and text."""
    return self._load_data()

  @functools.cached_property
  def encoded(self) -> Mapping[str, CaptionSplit]:
    """The splits as pictures and ids."""
    return LazySplits(self.pictures, lambda name: encode_captions(self.pictures[name], self.vocabulary))

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config.training)

  def corpus(self, split: str) -> Corpus:
    """Returns the names of the pictures and their captions."""
    return self.pictures[split].corpus

  @property
  def report(self) -> list[str]:
    lines = [f'vocabulary {self.config.data.vocabulary}: {len(self.vocabulary)} entries']
    for name, split in self.pictures.items():
      lines.append(describe_captions(name, split, self.encoded[name], self._lengths))
    return lines

  @property
  def splits(self) -> list[str]:
    return list(self.pictures)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return LazySplits(self.pictures, lambda name: self.encoded[name].identity)

  @property
  def implementation(self) -> str:
    return describe_decoder_implementation(self.model.decoder)

  def save(self, folder: str) -> list[str]:
    path = self.vocabulary.save(folder, 'target')
    atomic.write_text(epath.Path(folder) / SHAPE_FILE, json.dumps(self.shape))
    return [epath.Path(path).name, SHAPE_FILE]

  def initializer(self) -> Callable[[int], Any]:
    return initializer_for_batch(self.model, _dummy_batch(self.model, self.shape))

  def batches(self, seed: int, share: Share | None = None) -> CaptionBatches:
    size = self.config.data.batch_size
    return CaptionBatches(self.encoded['train'], self._lengths, size, seed, share or self.share)

  def check_data(self, log: Log) -> None:
    for name, encoded in self.encoded.items():
      check_rows_fit(name, assign_captions(encoded, self._lengths), self.config.data.max_left_out)
    self.config.evaluation.constraints.check(self._max_length)
    select = self.config.training.select
    if select in POINTING_METRICS and 'validation' in self.splits and self.pictures['validation'].boxes is None:
      raise UserError(f'training.select={select!r} needs gold boxes: expected a validation split with boxes')
    dtype = self.pictures['train'].pictures.dtype
    expected_dtype = self.model.encoder.input_dtype
    if dtype != expected_dtype:
      raise UserError(
        f'config.model.encoder={self.config.model.encoder!r} reads {expected_dtype.__name__}, the pictures are '
        f'{dtype}; expected grid for pictures (uint8) or precomputed for features (float32)'
      )
    # Raises for pictures whose shape does not suit the encoder.
    params = jax.eval_shape(lambda: self.initializer()(0))
    trace_loss(self.loss, params, _dummy_batch(self.model, self.shape), deterministic=True)

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], list[Prediction]]:
    pictures = self.pictures[choose(split, self.pictures, 'split')]
    batches = eval_caption_batches(self.encoded[split], self._lengths, self._scorer.batch_rows)
    forced = self._scorer.score_batches(params, batches, len(pictures.captions), watch)
    metrics = {
      'loss': MetricValue(forced.loss, 'nat/token', 'targets:forced'),
      'accuracy': MetricValue(100 * forced.accuracy, '%', 'targets:forced'),
    }
    row_of_name = {name: i for i, name in enumerate(pictures.names)}

    def predict(names: Sequence[str], beams: int, watch: Watch) -> list[Prediction]:
      return self.predict(params, pictures.pictures[[row_of_name[name] for name in names]], names, beams, watch)

    options = self.config.evaluation
    text_metrics, predictions = predict_and_evaluate(
      pictures.corpus, predict, options, beams=beams or options.beams, watch=watch
    )
    metrics |= text_metrics
    if weights := [w for w in forced.weights if w is not None and w[:-1].any()]:  # w[-1]: EOS
      metrics['entropy'] = weight_metrics(weights)['entropy']
      if pictures.boxes is not None:
        metrics |= self._pointing_metrics(pictures, forced.weights)
    return metrics, predictions

  def predict(
    self, params: Any, pictures: np.ndarray, names: Sequence[str], beams: int, watch: Watch = unwatched
  ) -> list[Prediction]:
    """Searches for captions.

    Args:
      params: the parameters of `model`.
      pictures: [P, height, width, C].
      names: names of the pictures, which become the sources of the predictions.
      beams: beam size; 1 is greedy.
      watch: called before each batch.
    """
    search = self._compile_search(beams)
    batch_rows = self._scorer.batch_rows
    params = self.place_params(params)

    def search_from(start: int) -> Hypotheses:
      chunk = pictures[start : start + batch_rows]
      mask = np.arange(batch_rows) < len(chunk)
      padded = np.pad(chunk, [(0, batch_rows - len(chunk))] + [(0, 0)] * (chunk.ndim - 1))
      return search(params, *shard_rows((padded, mask[:, None]), self.mesh))

    predictions = []
    for start, hypotheses in map_batches(search_from, range(0, len(pictures), batch_rows), watch, self.mesh):
      chunk_names = names[start : start + batch_rows]
      predictions += [self._read_prediction(hypotheses, i, name) for i, name in enumerate(chunk_names)]
    return predictions

  def format_predictions(self, predictions: Sequence[Prediction]) -> list[str]:
    return [p.hypotheses[0].text if p.hypotheses else '' for p in predictions]

  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes one map per word: for a .png path, a picture and an animation (.gif) beside it; for .html, a page.

    Rows are pictures of the split, and `inputs` are image files. Image files are drawn at
    overlays.IMAGE_SIZE. A split with image files is drawn from them, as its pictures may be features.

    Arguments: see `System.plot`.
    """
    if inputs:
      hypotheses = self._best_hypotheses(params, self._read_images(inputs), list(inputs))
      items = overlays.overlay_files(inputs, hypotheses, self._cell_centres)
    else:
      pictures = self.pictures[choose(split, self.pictures, 'split')]
      row_numbers = parse_rows(rows, split, len(pictures.names))
      names = [pictures.names[row] for row in row_numbers]
      hypotheses = self._best_hypotheses(params, pictures.pictures[row_numbers], names)
      items = overlays.overlay_rows(pictures, row_numbers, hypotheses, self._cell_centres, self.vocabulary)
    overlays.write(items, path)

  def predict_lines(self, params: Any, lines: Sequence[str], name: str, first: int = 1) -> list[LinePrediction]:
    """Returns for each image file its caption, and a record with tokens and weights [tokens, rows, columns].

    Arguments: see `SupportsLinePrediction.predict_lines`.
    """
    images = self._read_images(lines, [f'{name}:{number}: ' for number in range(first, first + len(lines))])
    outputs = []
    for best in self._best_hypotheses(params, images, lines):
      record = {'caption': best.text, 'score': best.score, 'log_prob': best.log_prob}
      outputs.append(
        (best.text, record | {'tokens': best.tokens, 'weights': overlays.weight_maps(best, self._cell_centres)})
      )
    return outputs

  def _best_hypotheses(self, params: Any, pictures: np.ndarray, names: Sequence[str]) -> list[Hypothesis]:
    predictions = self.predict(params, pictures, names, self.config.evaluation.beams)
    for prediction in predictions:
      if not prediction.hypotheses:
        raise UserError(f'no caption for {prediction.source!r}: no hypothesis has a finite probability')
    return [prediction.hypotheses[0] for prediction in predictions]

  def _read_images(self, files: Sequence[str], error_prefixes: Sequence[str] = ()) -> np.ndarray:
    """Reads image files [P, height, width, C]; an error message begins with the prefix of its file."""
    if self.model.encoder.input_dtype is not np.uint8:
      raise UserError('this run reads features, not images; expected rows of a split, or a run whose encoder is grid')
    prefixes = error_prefixes or [''] * len(files)
    return np.stack([read_image(file, self.shape[0], prefix) for file, prefix in zip(files, prefixes, strict=True)])

  @property
  def _cell_centres(self) -> tuple[np.ndarray, ...]:
    """Centres of the rows and of the columns of cells, from 0 to 1."""
    return tuple(map(self.model.encoder.cell_centres, self.shape[:2]))

  @property
  def _lengths(self) -> tuple[int, ...]:
    return check_caption_buckets(self.config.data.buckets)

  @property
  def _max_length(self) -> int:
    """Maximum length of hypotheses, EOS included."""
    return self.config.evaluation.max_length or self._lengths[-1]

  @functools.cached_property
  def _scorer(self) -> TeacherForcedScorer:
    size = self.config.evaluation.batch_size
    return TeacherForcedScorer(self.model, (), size, self.config.training.evaluations, self.mesh)

  @functools.cached_property
  def _compile_search(self) -> Callable[[int], Callable]:
    """Beam size -> the compiled search."""
    options = self.config.evaluation

    @functools.cache
    def compile_for(beams: int) -> Callable:
      search = (BeamSearch(beams), self._max_length, options.ranking)
      return compile_search(self.model, *search, self.mesh, constraints=options.constraints)

    return compile_for

  def _read_prediction(self, hypotheses: Hypotheses, row: int, name: str) -> Prediction:
    """Returns row `row` of the result of a search as text. Length 0 marks a beam without a hypothesis."""
    texts = []
    for k, length in enumerate(hypotheses.lengths[row].tolist()):
      if not length:
        continue
      ids = hypotheses.tokens[row, k, :length].tolist()
      content = ids[:-1] if ids[-1] == EOS else ids
      texts.append(
        Hypothesis(
          self.vocabulary.decode(content),
          [self.vocabulary.id_to_token(id) for id in content],
          float(hypotheses.scores[row, k]),
          float(hypotheses.log_probs[row, k]),
          hypotheses.weights[row, k, :length].copy(),  # a view would keep the whole batch in memory
        )
      )
    return Prediction(name, [], texts)

  def _pointing_metrics(self, pictures: Pictures, weights: Iterable[np.ndarray | None]) -> dict[str, MetricValue]:
    """Pointing game: share of phrases ('pointing') or tokens ('pointing_words') whose argmax is in their gold box."""
    rows = [
      (matrix, overlays.token_boxes(boxes, caption, self.vocabulary))
      for boxes, caption, matrix in zip(pictures.boxes, pictures.captions, weights, strict=True)
      if matrix is not None
    ]
    cell_centres = tuple(centres * size for centres, size in zip(self._cell_centres, self.shape[:2], strict=True))
    metrics = {}
    for name, merge_phrases in (('pointing', True), ('pointing_words', False)):  # phrase: adjacent tokens with one box
      counts = [count_pointing_hits(matrix, boxes, cell_centres, merge_phrases=merge_phrases) for matrix, boxes in rows]
      hits, total = map(sum, zip(*counts, strict=True))
      unit = 'phrases' if merge_phrases else 'tokens'
      signature = f'argmax cell in box|targets:forced|{unit}:{total}'
      metrics[name] = MetricValue(100 * hits / max(total, 1), '%', signature)
    return metrics


def _dummy_batch(model: EncoderDecoder, shape: Sequence[int]) -> Batch:
  """One picture of the given shape with a caption of two tokens, for tracing."""
  pictures = np.zeros((1, *shape), model.encoder.input_dtype)
  target = np.zeros((1, 2), np.int32)
  return Batch(pictures, np.ones((1, 1), bool), target, np.ones((1, 2), bool), np.zeros(1, np.int32))


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)


def _check_no_source_words(config: RunConfig) -> None:
  """Raises UserError for options of the search that need the words of a source."""
  if config.evaluation.replace_unknown:
    raise UserError('evaluation.replace_unknown must be False for pictures, which have no source words; got True')
