"""Translation: the system of sequence-to-sequence models from text to text."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from attention_jax.analysis import reading_files
from attention_jax.analysis.reading import Reading, ReadingRequest
from attention_jax.data import tasks, vocab
from attention_jax.data.batching import Batches, Share, check_rows_fit, dummy_batch
from attention_jax.data.encoding import assign_buckets
from attention_jax.data.preparing import Preparation, prepare_pairs
from attention_jax.data.text import Corpus
from attention_jax.decoding.compiled_search import compile_beam_search
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.metrics import MetricValue, compute_metric
from attention_jax.decoding.predictor import Prediction, Predictor, max_output_length
from attention_jax.errors import UserError
from attention_jax.losses.auxiliary import auxiliary_losses, check_weights
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, build
from attention_jax.systems.base import (
  Log,
  System,
  check_parameter_options,
  describe_decoder_implementation,
  initializer_for_batch,
  trace_loss,
)
from attention_jax.systems.config import RunConfig
from attention_jax.systems.text_evaluation import (
  ALIGNMENT_METRICS,
  TEACHER_FORCED_METRICS,
  TeacherForcedScorer,
  TextEvaluationConfig,
  evaluate_corpus,
  text_metric_directions,
)
from attention_jax.systems.translation.readings import read
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.watch import Watch, unwatched

TRACED_VOCABULARY_SIZE = 4  # vocabulary size of the model that `check` traces


class TranslationSystem(System):
  """Any encoder, decoder and output layer on any task of pairs of texts.

  Args:
    config: the whole config of the run.
    model: the model, or an ensemble of models.
    source_vocab, target_vocab: the vocabularies of the run.
    buckets: the buckets of the run.
    load_data: returns the splits; called on first use.
  """

  config_groups: Mapping[str, type] = {
    'data': tasks.TranslationDataConfig,
    'model': ModelConfig,
    'evaluation': TextEvaluationConfig,
  }
  plot_filename = 'attention.png'
  extra_metrics = ('entropy', 'monotonicity', 'average_lagging')

  def __init__(
    self,
    config: RunConfig,
    model: EncoderDecoder | Ensemble,
    source_vocab: vocab.Vocabulary,
    target_vocab: vocab.Vocabulary,
    buckets: Sequence[Sequence[int]],
    load_data: Callable[[], tasks.TranslationData],
  ):
    self.config = config
    self.model = model
    self.source_vocab = source_vocab
    self.target_vocab = target_vocab
    self.buckets = buckets
    self._load_data = load_data
    self._predictor: Predictor | None = None

  @classmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'TranslationSystem':
    data = tasks.load(config.data, folder)
    model = build(config.model, len(data.source_vocab), len(data.target_vocab))
    return cls(config, model, data.source_vocab, data.target_vocab, data.buckets, lambda: data)

  @classmethod
  def open(cls, config: RunConfig, folder: str) -> 'TranslationSystem':
    source_vocab, target_vocab = tasks.load_vocabularies(config.data, folder)
    model = build(config.model, len(source_vocab), len(target_vocab))
    buckets = tasks.load_buckets(config.data, folder)
    return cls(config, model, source_vocab, target_vocab, buckets, lambda: tasks.load(config.data, folder))

  def with_config(self, config: RunConfig) -> 'TranslationSystem':
    model = build(config.model, len(self.source_vocab), len(self.target_vocab))
    return TranslationSystem(config, model, self.source_vocab, self.target_vocab, self.buckets, self._load_data)

  @classmethod
  def check(cls, config: RunConfig) -> None:
    training = config.training
    model = build(config.model, TRACED_VOCABULARY_SIZE, TRACED_VOCABULARY_SIZE)
    loss = _loss(model, training)
    params = jax.eval_shape(lambda: initial_params(model, 0))
    check_parameter_options(training, params)
    trace_loss(loss, params, dummy_batch(packed=config.data.packed))
    tasks.check(config.data)
    _check_shared_vocabulary(config, model)
    check_weights(auxiliary_losses(training.auxiliary), model.decoder.attention if model.traits.attends else None)
    if training.select in ALIGNMENT_METRICS and not model.traits.attends:
      raise UserError(f'training.select={training.select!r} measures alignments, but this decoder has no attention')
    if config.evaluation.replace_unknown and not model.traits.attends:
      raise UserError('evaluation.replace_unknown=True uses attention weights, but this decoder has no attention')
    for spec in config.evaluation.metrics:
      compute_metric(spec, ['a'], [['a']])  # some options are checked only when the metric is computed

  @classmethod
  def preparation(cls, config: RunConfig) -> Preparation:
    tasks.check(config.data)
    return prepare_pairs(config.data)

  @classmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    return TEACHER_FORCED_METRICS | text_metric_directions(config.evaluation)

  def ensemble(self, others: Sequence['TranslationSystem']) -> 'TranslationSystem':
    """Returns the ensemble of this system and others; its parameters are a tuple with those of each.

    Its buckets are those of this system, without those that are longer than another model accepts.

    Raises:
      UserError: if their vocabularies differ, if only some of the models copy from the source, or if no bucket is left.
    """
    for other in others:
      same_source = vocab.same_entries(self.source_vocab, other.source_vocab)
      if not same_source or not vocab.same_entries(self.target_vocab, other.target_vocab):
        raise UserError('runs with different vocabularies cannot be an ensemble; evaluate --mbr combines their outputs')
    models = [system.model for system in (self, *others)]
    buckets = self.buckets
    if any(other.buckets != buckets for other in others):
      buckets = _common_buckets(buckets, models)
    vocabularies = self.source_vocab, self.target_vocab
    return TranslationSystem(self.config, Ensemble(models), *vocabularies, buckets, lambda: self.data)

  def with_model(self, model: Any) -> 'TranslationSystem':
    """Returns this system with another model on the same data."""
    vocabularies = self.source_vocab, self.target_vocab
    return TranslationSystem(self.config, model, *vocabularies, self.buckets, lambda: self.data)

  @functools.cached_property
  def data(self) -> tasks.TranslationData:
    """The splits, as text and as ids."""
    return self._load_data()

  def corpus(self, split: str) -> Corpus:
    """Returns the pairs of texts of a split."""
    return self.data.corpora[split]

  @property
  def report(self) -> list[str]:
    return self.data.report

  @property
  def splits(self) -> list[str]:
    return list(self.data.corpora)

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config.training)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return {split: encoded.identity for split, encoded in self.data.encoded.items()}

  @property
  def implementation(self) -> str:
    return describe_decoder_implementation(self.model.decoder)

  def save(self, folder: str) -> list[str]:
    names = tasks.save_vocabularies(self.config.data, self.source_vocab, self.target_vocab, folder)
    return names + tasks.save_buckets(self.config.data, self.buckets, folder)

  def initializer(self) -> Callable[[int], Any]:
    return initializer(self.model)

  def embedding_tables(self) -> Mapping[str, vocab.Vocabulary]:
    if self.config.model.share_embeddings:
      return {'encoder.embedding': self.source_vocab}
    return {'encoder.embedding': self.source_vocab, 'embedding': self.target_vocab}

  def batches(self, seed: int, share: Share | None = None) -> Batches:
    options = self.config.data
    return Batches(
      self.data.encoded['train'],
      self.buckets,
      options.batch_size,
      options.batch_unit,
      seed=seed,
      share=share or self.share,
      links=self.loss.needs_links,
      packed=options.packed,
    )

  def check_data(self, log: Log) -> None:
    select = self.config.training.select
    validation = self.data.corpora.get('validation')
    if validation is not None and validation.links is None and select in ALIGNMENT_METRICS:
      raise UserError(f'training.select={select!r} needs gold links, but the validation split has none')
    params = jax.eval_shape(lambda: initial_params(self.model, 0))
    _check_lengths(self.config, self.data, self.model, self.loss, params)
    evaluation = self.config.evaluation
    evaluation.constraints.check(max_output_length(self.buckets, evaluation.max_length))
    train = self.data.encoded['train']
    if not self.model.output.generates and train.num_uncopyable_tokens:
      share = train.num_uncopyable_tokens / train.num_tokens[1]
      output = self.config.model.output
      log(f'{share:.1%} of the training target tokens do not occur in their source; output {output!r} cannot emit them')

  def predictor(self, params: Any, rounds: int = 1) -> Predictor:
    """Returns the function that translates lines with these parameters; see Predictor for `rounds`."""
    evaluation = self.config.evaluation
    return Predictor(
      self.model,
      params,
      self.source_vocab,
      self.target_vocab,
      buckets=self.buckets,
      max_length=evaluation.max_length,
      batch_size=evaluation.batch_size,
      ranking=evaluation.ranking,
      constraints=evaluation.constraints,
      replace_unknown=evaluation.replace_unknown,
      rounds=rounds,
      mesh=self.mesh,
    )

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], list[Prediction]]:
    corpus, encoded = tasks.get_split(self.data, split)
    options = self.config.evaluation
    predictor = self.cached_predictor(params)
    return evaluate_corpus(
      params, corpus, encoded, self._scorer, predictor, options, beams=beams or options.beams, watch=watch
    )

  def format_predictions(self, predictions: Sequence[Prediction]) -> list[str]:
    return [p.hypotheses[0].text if p.hypotheses else '' for p in predictions]

  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Plots the weights of the best hypothesis of each input, or of the reference of each row with its gold links.

    Arguments: see `System.plot`.
    """
    reading_files.write(self.read(params, ReadingRequest(split, rows, inputs)), path)

  def read(self, params: Any, request: ReadingRequest) -> list[Reading]:
    """Returns the readings of the best hypotheses of each input, or of the reference of each row."""
    return read(self, params, request)

  @functools.cached_property
  def _scorer(self) -> TeacherForcedScorer:
    size = self.config.evaluation.batch_size
    return TeacherForcedScorer(self.model, self.buckets, size, self._evaluations, self.mesh)

  @property
  def _evaluations(self) -> int:
    """Number of evaluations of the validation split in a run that is not stopped before its last step."""
    return self.config.training.evaluations

  def cached_predictor(self, params: Any) -> Predictor:
    """Returns the predictor of evaluations and readings with these parameters; its search is compiled only once."""
    if self._predictor is None:
      self._predictor = self.predictor(params, self._evaluations)
    self._predictor.set_params(params)
    return self._predictor


def initial_params(model: EncoderDecoder, seed: int) -> Any:
  """Returns the initial parameters of a model for a seed."""
  return initializer(model)(seed)


def initializer(model: EncoderDecoder) -> Callable[[int], Any]:
  """Returns seed -> `initial_params`, compiled once for all seeds."""
  return initializer_for_batch(model, dummy_batch())


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)


def _check_shared_vocabulary(config: RunConfig, model: EncoderDecoder) -> None:
  """Raises UserError for a model that needs one vocabulary for both sides, unless the config shares it."""
  # Not checked by size: two vocabularies of equal size would pass for a shared one.
  is_read = vocab.VOCABULARIES[vocab.parse_kind(config.data.vocabulary)].is_read
  if config.data.shared_vocabulary or is_read:  # of a file, both sides have the same ids
    return
  if config.model.share_embeddings:
    field = 'share_embeddings=True'
  elif model.copies:
    field = f'output={config.model.output!r}'
  else:
    return
  raise UserError(f'config.model.{field} needs one vocabulary for both sides; set config.data.shared_vocabulary=True')


def _check_lengths(
  config: RunConfig, data: tasks.TranslationData, model: EncoderDecoder, loss: Loss, params: Any
) -> None:
  """Traces training and search at the greatest lengths to which batches are padded.

  A model with a maximum length would otherwise fail hours later, at the longest source or target of a split.

  Args:
    config: the whole config of the run.
    data: the splits.
    model: the model.
    loss: the training loss.
    params: the shapes of the model's parameters.

  Raises:
    UserError: if too few rows of a split fit a bucket, and for lengths that the model does not support.
  """
  buckets = data.buckets
  assigned = {split: assign_buckets(encoded, buckets) for split, encoded in data.encoded.items()}
  for split, indices in assigned.items():
    check_rows_fit(split, indices, config.data.max_left_out)
  used = np.unique(np.concatenate(list(assigned.values())))
  sources, targets = zip(*(buckets[i] for i in used if i >= 0), strict=True)
  trace_loss(loss, params, dummy_batch(max(sources), max(targets), config.data.packed))
  searched = [encoded for split, encoded in data.encoded.items() if split != 'train']
  longest = max((int(encoded.lengths[0].max(initial=1)) for encoded in searched), default=1)
  # Sources longer than all buckets are padded beyond their length only if the model accepts it, see Predictor.
  search_length = min((source for source, _ in buckets if source >= longest), default=longest)
  search = compile_beam_search(model, 1, max_output_length(buckets, config.evaluation.max_length))
  batch = dummy_batch(max(*sources, search_length))
  jax.eval_shape(search, params, batch.source, batch.source_mask)


def _common_buckets(buckets: Sequence[Sequence[int]], models: Sequence[EncoderDecoder]) -> tuple[Sequence[int], ...]:
  """Returns the buckets whose lengths all models accept.

  Raises:
    UserError: if there are none.
  """
  accepted = tuple(bucket for bucket in buckets if all(_accepts(model, bucket) for model in models))
  if not accepted:
    raise UserError(f'the buckets of the first run are {buckets}; another run accepts none of these lengths')
  return accepted


def _accepts(model: EncoderDecoder, bucket: Sequence[int]) -> bool:
  """Whether a model accepts the lengths of a bucket; learned positions or parameters of some models limit them."""

  def run(initial, batch):
    arrays = (initial.source, initial.source_mask, initial.target)
    return model.apply(model.init(jax.random.key(0), *arrays), batch.source, batch.source_mask, batch.target)

  try:
    jax.eval_shape(run, dummy_batch(), dummy_batch(*bucket))
  except UserError:
    return False
  return True
