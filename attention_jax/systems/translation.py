"""From text to text: the system of sequence-to-sequence models."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.data import tasks, vocab
from attention_jax.data.batching import Batch, Batches, check_any_row_fits
from attention_jax.data.encoding import assign_buckets, check_buckets
from attention_jax.data.resegment import make_resegmenter
from attention_jax.data.text import Corpus
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.errors import UserError
from attention_jax.inference.evaluation import ALIGNMENT_METRICS, FORCED_METRICS, TeacherForcedScorer, evaluate_corpus
from attention_jax.inference.metrics import compute_metric, higher_is_better
from attention_jax.inference.predictor import Predictor, compile_beam_search, max_output_length, search_lengths
from attention_jax.kernels import auto
from attention_jax.losses.auxiliary import auxiliary_losses, check_weights
from attention_jax.losses.objectives import OBJECTIVES
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.specs import Count, NonNegative, Size, check_fields, parse
from attention_jax.systems import heatmaps
from attention_jax.systems.base import Config
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.loss import Loss
from attention_jax.training.step import step_rngs


@dataclasses.dataclass(frozen=True)
class TranslationData:
  """The fields of `config.data`.

  Attributes:
    task: a spec of data.tasks.TASKS.
    folder: what relative paths in the task start from; where tfds sets are.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    shared_vocabulary: one vocabulary for both sides.
    buckets: (source, target) lengths, the end-of-sentence token included; each is one compilation.
    batch_size, batch_unit: rows of a batch ('sentences'), or its tokens ('tokens').
  """

  task: str = 'dates'
  folder: str = 'data'
  vocabulary: str = 'char'
  shared_vocabulary: bool = False
  buckets: tuple[tuple[int, int], ...] = ((42, 11),)
  batch_size: Size = 128
  batch_unit: str = 'sentences'


@dataclasses.dataclass(frozen=True)
class TranslationEvaluation:
  """The fields of `config.evaluation`.

  Attributes:
    metrics: specs of inference.metrics.METRICS.
    group_references: whether rows with the same source are one question with several right answers.
    beams: of the search at the end of training and in evaluate.py; 1 is greedy. Validation while training is greedy.
    alpha, beta, gamma: of the ranking of hypotheses, see decoding.search.Ranking: the length penalty
      ((5 + length) / 6)^alpha, the coverage penalty and the end-of-sentence normalisation; 0 is none.
    max_length: of hypotheses; 0 is the longest target of the buckets.
    batch_size: sources searched at once.
    replace_unknown: whether an unknown word becomes the source word with the heaviest weight (Jean et al. 2015).
  """

  metrics: tuple[str, ...] = ('exact_match', 'character_error_rate')
  group_references: bool = False
  beams: Size = 5
  alpha: NonNegative = DEFAULT_RANKING.alpha
  beta: NonNegative = DEFAULT_RANKING.beta
  gamma: NonNegative = DEFAULT_RANKING.gamma
  max_length: Count = 0
  batch_size: Size = 128
  replace_unknown: bool = False

  def __post_init__(self):
    check_fields(self, 'config.evaluation')
    names = [parse(spec)[0] for spec in self.metrics]
    if twice := [name for name in names if names.count(name) > 1]:
      raise UserError(f'evaluation.metrics has {twice[0]!r} twice; possible: each once')

  @property
  def ranking(self) -> Ranking:
    """What the search ranks finished hypotheses by."""
    return Ranking(self.alpha, self.beta, self.gamma)


class TranslationSystem:
  """Any encoder, decoder and output layer on any task of pairs of texts."""

  config_groups: Mapping[str, type] = {
    'data': TranslationData,
    'model': ModelConfig,
    'model.attention': Attention,
    'evaluation': TranslationEvaluation,
  }
  plot_filename = 'attention.png'

  def __init__(self, config: Config, model, source_vocab, target_vocab, data: Callable[[], tasks.TranslationData]):
    """`data` gives the splits when they are asked for."""
    self.config, self.model, self.source_vocab, self.target_vocab = config, model, source_vocab, target_vocab
    self._data = data

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'TranslationSystem':
    data = tasks.load(config['data'], folder)
    model = build(config['model'], len(data.source_vocab), len(data.target_vocab))
    return cls(config, model, data.source_vocab, data.target_vocab, lambda: data)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'TranslationSystem':
    vocabularies = tasks.load_vocabularies(config['data'], folder)
    model = build(config['model'], *map(len, vocabularies))
    return cls(config, model, *vocabularies, lambda: tasks.load(config['data'], folder))

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    model = build(config['model'], 4, 4)
    loss, params = _loss(model, training), jax.eval_shape(lambda: initial_params(model, 0))
    make_anneal(training.anneal, params, training.steps)
    _trace(loss, params, _smallest())
    tasks.check(config['data'])
    # Two vocabularies of one size would pass for a shared one.
    if (model.copies or config['model']['share_embeddings']) and not config['data']['shared_vocabulary']:
      which = 'share_embeddings' if config['model']['share_embeddings'] else f'output={config["model"]["output"]!r}'
      possible = 'one vocabulary for both sides; set config.data.shared_vocabulary=True'
      raise UserError(f'config.model.{which} needs {possible}')
    cut, objective = vocab.sampling_option(config['data']['vocabulary']), parse(training.objective)[0]
    if cut and OBJECTIVES[objective].uses_references:
      raise UserError(
        f'training.objective={training.objective!r} holds pieces against those of the target, which {cut} cuts '
        f'otherwise in each epoch; possible: a vocabulary without {cut}'
      )
    check_weights(auxiliary_losses(training.auxiliary), model.decoder.attention if model.traits.attends else None)
    if training.select in ALIGNMENT_METRICS and not model.traits.attends:
      raise UserError(f'training.select={training.select!r} is of alignments, and this decoder attends to nothing')
    if TranslationEvaluation(**config['evaluation']).replace_unknown and not model.traits.attends:
      raise UserError('evaluation.replace_unknown goes by where the weights are, and this decoder attends to nothing')
    for spec in config['evaluation']['metrics']:
      compute_metric(spec, ['a'], [['a']])  # also refuses values that only the metric itself knows

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return FORCED_METRICS | text_metric_directions(config)

  def ensemble(self, others: Sequence['TranslationSystem']) -> 'TranslationSystem':
    """This and others as one, whose parameters are a tuple with those of each.

    Raises: UserError where their vocabularies are not the same.
    """
    for other in others:
      mine, theirs = ((system.source_vocab, system.target_vocab) for system in (self, other))
      if not all(map(vocab.same_entries, mine, theirs)):
        raise UserError('runs with different vocabularies cannot be an ensemble')
    model = Ensemble([system.model for system in (self, *others)])
    return TranslationSystem(self.config, model, self.source_vocab, self.target_vocab, self._data)

  @functools.cached_property
  def data(self) -> tasks.TranslationData:
    """The splits, as text and as ids."""
    return self._data()

  def corpus(self, split: str) -> Corpus:
    """The rows of a split."""
    return self.data.corpora[split]

  @property
  def report(self) -> list[str]:
    return self.data.report

  @property
  def splits(self) -> list[str]:
    return list(self.data.corpora)

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, Training(**self.config['training']))

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.data.encoded

  @property
  def implementation(self) -> str:
    attention = self.model.decoder.attention
    several = auto.describe_choice(attention.resolved_score, attention.resolved_alignment)
    chosen = f' ({"xla, one query at a time" if self.model.traits.attends_in_recurrence else several})'
    return attention.implementation + chosen * (attention.implementation == 'auto')

  def save(self, folder: str) -> None:
    tasks.save_vocabularies(self.config['data'], self.source_vocab, self.target_vocab, folder)

  def initializer(self) -> Callable[[int], Any]:
    return initializer(self.model)

  def batches(self, seed: int) -> Batches:
    data, options = self.data, self.config['data']
    encoded = data.encoded['train']
    resegment = make_resegmenter(encoded, data.corpora['train'], self.source_vocab, self.target_vocab, seed)
    return Batches(
      encoded,
      options['buckets'],
      options['batch_size'],
      options['batch_unit'],
      seed=seed,
      shard=jax.process_index(),
      shards=jax.process_count(),
      links=self.loss.needs_links,
      resegment=resegment,
    )

  def check_data(self, log: Callable[[str], None]) -> None:
    training, validation = self.config['training'], self.data.corpora.get('validation')
    if validation is not None and validation.links is None and training['select'] in ALIGNMENT_METRICS:
      raise UserError(f'training.select={training["select"]!r} needs gold links, which the validation split has not')
    _check_lengths(self.config, self.data, self.model, self.loss)
    train = self.data.encoded['train']
    if not self.model.output.generates and train.num_uncopyable_tokens:
      share = f'{train.num_uncopyable_tokens / len(train.target):.1%} of the tokens of training targets'
      log(f'{share} stand nowhere in their source, and {self.config["model"]["output"]!r} says nothing else')

  def predictor(self, params: Any) -> Predictor:
    """What translates lines with these parameters."""
    options = self.config['evaluation']
    return Predictor(
      self.model,
      params,
      self.source_vocab,
      self.target_vocab,
      buckets=self.config['data']['buckets'],
      max_length=options['max_length'],
      batch_size=options['batch_size'],
      ranking=TranslationEvaluation(**options).ranking,
      replace_unknown=options['replace_unknown'],
    )

  def evaluate(self, params: Any, split: str, *, beams: int | None = None):
    corpus, encoded = tasks.get_split(self.data, split)
    (scorer, predictor), options = self._measuring(params), self.config['evaluation']
    return evaluate_corpus(params, corpus, encoded, scorer, predictor, options, beams=beams or options['beams'])

  def format_predictions(self, predictions) -> list[str]:
    return [p.hypotheses[0].text if p.hypotheses else '' for p in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    beams = self.config['evaluation']['beams']
    if inputs:
      return heatmaps.plot_lines(self.predictor(params), inputs, beams, path)
    return heatmaps.plot_rows(self.model, params, self.data, split, rows, self.config['data']['buckets'], path)

  def plot_layers(
    self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]
  ) -> None:
    """The same of every layer and head by itself, targets forced: those of a split, or the best hypotheses."""
    if inputs:
      found = self.predictor(params)(inputs, beams=self.config['evaluation']['beams'])
      corpus, titles = Corpus(list(inputs), self.format_predictions(found)), inputs
      if silent := [line for line, text in zip(inputs, corpus.target, strict=True) if not text]:
        raise UserError(f'the best hypothesis for {silent[0]!r} is empty; possible: a line that has an output')
    else:
      chosen, corpus = heatmaps.select_pairs(self.data, split, rows)
      titles = [f'{split} {row}' for row in chosen]
    vocabs, buckets = (self.source_vocab, self.target_vocab), self.config['data']['buckets']
    heatmaps.plot_layers(self.model, params, corpus, titles, *vocabs, buckets, path)

  def _measuring(self, params: Any) -> tuple[TeacherForcedScorer, Predictor]:
    """What scores and searches, with these parameters: made once, so that nothing is compiled twice."""
    if not hasattr(self, '_tools'):
      scorer = TeacherForcedScorer(self.model, self.config['data']['buckets'], self.config['evaluation']['batch_size'])
      self._tools = scorer, self.predictor(params)
    self._tools[1].set_params(params)
    return self._tools


def text_metric_directions(config: Config) -> dict[str, bool]:
  """The metrics of texts that a config names, and whether more of each is better."""
  return {parse(spec)[0]: higher_is_better(spec) for spec in config['evaluation']['metrics']}


def initial_params(model: EncoderDecoder, seed: int) -> Any:
  """The initial parameters: a function of the seed alone."""
  return initializer(model)(seed)


def initializer(model: EncoderDecoder) -> Callable[[int], Any]:
  """seed -> `initial_params`; several seeds are drawn by one program."""
  batch = _smallest()

  @jax.jit
  def drawn(rng):
    return model.init(rng, *map(jnp.asarray, (batch.source, batch.source_mask, batch.target)))['params']

  return lambda seed: drawn(jax.random.key(seed))


def _smallest(source: int = 2, target: int = 2) -> Batch:
  """A batch of one pair of these lengths, by which parameters and shapes are told."""
  side = lambda size: (np.zeros((1, size), np.int32), np.ones((1, size), bool))
  return Batch(*side(source), *side(target), np.zeros(1, np.int32), np.ones((1, target, source), bool))


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)


def _trace(loss: Loss, params: Any, batch: Batch) -> None:
  """Raises whatever the loss raises at a batch of this shape; computes nothing."""
  jax.eval_shape(loss, params, batch, step_rngs(jax.random.key(0)), dict.fromkeys(loss.running, 0.0))


def _check_lengths(config: Config, data: tasks.TranslationData, model: EncoderDecoder, loss: Loss) -> None:
  """Raises what a model with a greatest length would raise hours later, at the longest source or target of a split."""
  buckets = check_buckets(config['data']['buckets'])
  held = {split: assign_buckets(encoded, buckets) for split, encoded in data.encoded.items()}
  for split, chosen in held.items():
    check_any_row_fits(split, chosen)
  chosen = np.unique(np.concatenate(list(held.values())))
  sources, targets = zip(*(buckets[i] for i in chosen if i >= 0), strict=True)
  params = jax.eval_shape(lambda: initial_params(model, 0))
  _trace(loss, params, _smallest(max(sources), max(targets)))
  searched = [encoded for split, encoded in data.encoded.items() if split != 'train']
  longest = max((int(encoded.lengths[0].max(initial=1)) for encoded in searched), default=1)
  source = max(*sources, min(size for size in search_lengths(buckets, longest) if size >= longest))
  find = compile_beam_search(model, 1, max_output_length(buckets, config['evaluation']['max_length']))
  jax.eval_shape(find, params, *_smallest(source)[:2])
