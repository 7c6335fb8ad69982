"""Trained runs: opens, restores, averages and ensembles them, and evaluates them on a split."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from attention_jax import atomic
from attention_jax.analysis.alignment import alignment_scores
from attention_jax.data.text import Corpus, normalize_corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.metrics import MetricValue
from attention_jax.decoding.minimum_bayes_risk import rank_hypotheses
from attention_jax.decoding.predictor import Hypothesis, Predictor
from attention_jax.decoding.scoring import PairScorer, ScoredPair, has_layer_weights
from attention_jax.decoding.word_alignment import AlignedPair, align, link_units
from attention_jax.errors import UserError, choose
from attention_jax.modules.parameter_files import SUFFIX, load_weights, read_metadata
from attention_jax.systems.base import SupportsCorpus, SupportsEnsembles, SupportsTranslation, System
from attention_jax.systems.config import RunConfig, read_run_config, to_dict
from attention_jax.systems.plugins import check_plugins
from attention_jax.systems.ready_made import resolve_folder
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.text_evaluation import predict_links, text_metrics
from attention_jax.tokens import EOS, SPECIAL_TOKENS
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.digests import check_file_digests
from attention_jax.training.partition import MeshConfig, make_mesh, parameter_shardings, replicate
from attention_jax.training.state import evaluation_field
from attention_jax.training.watch import Watch, unwatched

Support = TypeVar('Support')
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
CHECKPOINT_NAMES = ('best', 'latest', 'average')


class Vocabularies(NamedTuple):
  """The vocabularies of a run of translation."""

  source: Vocabulary
  target: Vocabulary


class AttentionWeights(NamedTuple):
  """Attention weights of one source and one target, by teacher forcing.

  Attributes:
    source_tokens: S tokens, EOS included.
    target_tokens: T tokens, EOS included.
    weights: [T, S], those that the model's `weights` are: of one layer, averaged over heads.
    layer_weights: [L, N, T, S] weights of every layer and head; None for a decoder that does not attend in each of its
      layers, and for an ensemble.
  """

  source_tokens: list[str]
  target_tokens: list[str]
  weights: np.ndarray
  layer_weights: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained run.

  `translate`, `score`, `align`, `head_error_rates` and `attention` need a run of translation.

  Attributes:
    folder: the run folder; of an ensemble, that of the first run.
    system: the system of the run, or of the ensemble.
    params: the parameters to predict with; of an ensemble, a tuple with those of each run.
    steps: steps of the checkpoints that `params` come from: several for an average or an ensemble.
  """

  folder: epath.Path
  system: System
  params: Any
  steps: tuple[int, ...]

  @property
  def step(self) -> int:
    """The last of the steps."""
    return self.steps[-1]

  @property
  def config(self) -> RunConfig:
    """The whole config of the run."""
    return self.system.config

  @property
  def model(self) -> Any:
    """The flax module."""
    return self.system.model

  @functools.cached_property
  def predictor(self) -> Predictor:
    """Translates lines. Raises UserError for a run of a system that does not translate."""
    return self.system_with(SupportsTranslation).predictor(self.params)

  @property
  def vocabularies(self) -> Vocabularies:
    """The vocabularies. Raises UserError for a run of a system that does not translate."""
    return Vocabularies(self.predictor.source_vocab, self.predictor.target_vocab)

  def translate(
    self, lines: Sequence[str], *, beams: int | None = None, nbest: int | None = None, **options: Any
  ) -> list[Hypothesis] | list[list[Hypothesis]]:
    """Translates lines of text.

    Args:
      lines: the sources.
      beams: beams of the search; by default config.evaluation.beams.
      nbest: number of hypotheses of each line, at most `beams` or the number of samples; None for the best one alone.
      **options: further options of `Predictor.stream`, such as `sampling=Sampling(8)` or `prefixes`.

    Returns:
      The best hypothesis of each line, or with `nbest` a list of hypotheses, best first, without repetitions. Samples
      are in the order of sampling, repetitions included.

    Raises:
      UserError: for a blank line, a line without a hypothesis, such as one that is too long for the model, more
        hypotheses than the search finds, and as `Predictor.stream`.
    """
    predict = self.predictor
    _check_texts(lines, 'lines')
    sampling = options.get('sampling')
    beams = self.config.evaluation.beams if beams is None else beams
    count, kind = (sampling.hypotheses, 'samples') if sampling else (beams, 'beams')
    if nbest is not None and not 1 <= nbest <= count:
      raise UserError(f'nbest must be from 1 to {count}, the number of {kind}, got {nbest}')
    translations = []
    for row, prediction in enumerate(predict(lines, beams=beams, **options)):
      if not prediction.hypotheses:
        reason = 'it is too long for the model, or no hypothesis has a finite probability'
        raise UserError(f'no output for {lines[row][:40]!r} at index {row}: {reason}')
      translations.append(rank_hypotheses(prediction.hypotheses, is_sampled=sampling is not None))
    return [ranked[0] for ranked in translations] if nbest is None else [ranked[:nbest] for ranked in translations]

  def score(self, pairs: Sequence[tuple[str, str]] | Corpus, *, layers: bool = False) -> list[ScoredPair]:
    """Scores targets by teacher forcing: their log-probabilities, those of each token, and the attention weights.

    Args:
      pairs: a source and a target each.
      layers: whether to add the weights of every layer and head.

    Raises:
      UserError: for a blank side, and as `PairScorer`.
    """
    return self._scorer(_as_corpus(pairs), layers)

  def align(self, pairs: Sequence[tuple[str, str]] | Corpus, *, level: str = 'word') -> list[AlignedPair]:
    """Links the words of sources and targets: each of the target to that of the source with the largest weight.

    Args:
      pairs: a source and a target each; a Corpus has its own level.
      level: the unit that links connect, 'word' or 'char'.

    Raises:
      UserError: for a blank side, a run without attention, an unknown level, a vocabulary whose tokens are not parts of
        the units, and for a text whose number of units config.data.normalization changes.
    """
    scorer = self._scorer
    self._check_attends()
    corpus = _as_corpus(pairs, level)
    linked = corpus._replace(links=[()] * len(corpus.source))  # the units that are linked must be those of the texts
    corpus = normalize_corpus(linked, self.config.data.normalization)
    return align(corpus, scorer(corpus), *self.vocabularies)

  def head_error_rates(self, corpus: Corpus, *, unlinked_targets: bool = True) -> np.ndarray:
    """Returns the alignment error rate of the links of each layer and head alone, against those of the corpus.

    Links are those of `align`: each word of the target is linked to that of the source with the largest weight.

    Args:
      corpus: pairs with links.
      unlinked_targets: whether links of a target word that has no gold link are errors; otherwise they are left out.

    Returns:
      [L, N], 0 (best) to 1. [1, 1], for the weights of the model, if its decoder does not attend in each of its layers,
      and for an ensemble.

    Raises:
      UserError: for a corpus without links, and as `align`.
    """
    scorer = self._scorer
    self._check_attends()
    if corpus.links is None:
      raise UserError(f'{corpus.name or "the corpus"} has no gold links; expected links source-target of each pair')
    link_units(corpus.level, *self.vocabularies)  # raises UserError before the pairs are scored
    corpus = normalize_corpus(corpus, self.config.data.normalization)
    scored = scorer(corpus, has_layer_weights(self.model))
    weights = [pair.weights[None, None] if pair.layer_weights is None else pair.layer_weights for pair in scored]

    def error_rate(layer, head):
      matrices = [matrix[layer, head] for matrix in weights]
      links = predict_links(corpus, matrices, range(len(matrices)), *self.vocabularies, unlinked_targets)
      return alignment_scores(*links).error_rate

    layers, heads = weights[0].shape[:2]
    return np.array([[error_rate(layer, head) for head in range(heads)] for layer in range(layers)])

  def attention(self, source: str, target: str | None = None) -> AttentionWeights:
    """Returns the attention weights of a source and a target.

    Args:
      source: the source.
      target: the target; None for the best hypothesis.

    Raises:
      UserError: for a blank source or target, a source without a hypothesis, and a run without attention.
    """
    scorer = self._scorer
    self._check_attends()
    _check_texts([source] if target is None else [source, target], 'source and target')
    text = self.translate([source])[0].text if target is None else target
    (pair,) = scorer(Corpus([source], [text]), has_layer_weights(self.model))
    end = SPECIAL_TOKENS[EOS]
    source_tokens = [*self.vocabularies.source.tokenize(source), end]
    return AttentionWeights(source_tokens, [*pair.tokens, end], pair.weights, pair.layer_weights)

  def evaluate(self, split: str) -> dict[str, MetricValue]:
    """Returns the metrics of a split, by name. Arguments and errors: see `evaluate_split`."""
    return evaluate_split(self, split)[0]

  @functools.cached_property
  def _scorer(self) -> PairScorer:
    return PairScorer(self.model, self.params, *self.vocabularies, self.predictor.buckets)

  def _check_attends(self) -> None:
    if not self.model.traits.attends:
      raise UserError(f'{self.folder}: this run has no attention; expected a run whose decoder attends')

  def system_with(self, protocol: type[Support]) -> Support:
    """Returns the system, if it implements a protocol.

    Args:
      protocol: one of systems.base, such as SupportsTranslation.

    Raises:
      UserError: if the system does not implement it; the message lists the systems that do.
    """
    if isinstance(self.system, protocol):
      return self.system
    names = _systems_with(protocol)
    raise UserError(f'{self.folder} is a run of system {self.config.system!r}; expected one of: {names}')


def _check_texts(texts: Sequence[str], name: str) -> None:
  """Raises UserError for anything but a list of texts, none of them blank."""
  if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
    raise UserError(f'{name} must be a list of texts, got {texts!r}')
  if blank := [number for number, text in enumerate(texts) if not text.strip()]:
    raise UserError(f'{name} must not be blank, got {texts[blank[0]]!r} at index {blank[0]}')


def _as_corpus(pairs: Sequence[tuple[str, str]] | Corpus, level: str = 'word') -> Corpus:
  """The corpus of pairs, which are checked."""
  if isinstance(pairs, Corpus):
    return pairs
  pairs = list(pairs)
  if wrong := [pair for pair in pairs if not isinstance(pair, tuple | list) or len(pair) != 2]:
    raise UserError(f'pairs must be pairs of a source and a target, got {wrong[0]!r}')
  sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
  _check_texts(sources, 'sources')
  _check_texts(targets, 'targets')
  return Corpus(sources, targets, level=level, name='pairs')


def _systems_with(protocol: type) -> str:
  """The names of the systems that implement a protocol, for error messages."""
  return ', '.join(name for name, cls in SYSTEMS.items() if issubclass(cls, protocol))


def open_run_or_ensemble(
  folders: str, checkpoints: str = 'best', evaluation: Mapping[str, Any] = NO_OVERRIDES, dtype: str = ''
) -> Run:
  """Opens one run, or several as an ensemble with the config of the first.

  Args:
    folders: one run folder, or several separated by commas; an existing folder of that name is one run.
    checkpoints: one checkpoint as for `open_run`, or several separated by commas, each of which is opened in each
      folder.
    evaluation, dtype: as for `open_run`.

  Raises:
    UserError: as `open_run` does, for an empty name between commas, and for runs that cannot be an ensemble.
  """
  pairs = itertools.product(split_commas(folders, 'workdir'), split_commas(checkpoints, 'checkpoint'))
  runs = [open_run(folder, checkpoint, evaluation, dtype) for folder, checkpoint in pairs]
  if len(runs) == 1:
    return runs[0]
  for run in runs:
    if not isinstance(run.system, SupportsEnsembles):
      name = run.config.system
      names = _systems_with(SupportsEnsembles)
      raise UserError(f'{run.folder}: runs of system {name!r} cannot be an ensemble; expected runs of one of: {names}')
  try:
    system = runs[0].system.ensemble([run.system for run in runs[1:]])
  except UserError as error:
    raise UserError(f'{folders}: {error}') from error
  return Run(
    folder=runs[0].folder,
    system=system,
    params=tuple(run.params for run in runs),
    steps=tuple(step for run in runs for step in run.steps),
  )


def open_run(
  folder: epath.PathLike, checkpoint: str = 'best', evaluation: Mapping[str, Any] = NO_OVERRIDES, dtype: str = ''
) -> Run:
  """Opens a trained run for prediction. Reads no data.

  Args:
    folder: the run folder, its URL, or '@NAME' for a ready-made model (systems.ready_made).
    checkpoint: 'best' (the latest if there is none), 'latest', 'average' (the mean of the parameters of the last
      training.keep checkpoints), the step of a checkpoint, or a file of weights that ends with .safetensors.
    evaluation: fields of config.evaluation to override.
    dtype: overrides config.model.dtype, unless empty.

  Raises:
    UserError: as `resolve_folder` and `check_run_files`; if the folder holds no run or several, if the checkpoint
      cannot be read, and for an unknown field, an invalid value of a field and an unknown dtype.
  """
  folder = resolve_folder(folder)
  check_run_files(folder)
  config = dataclasses.replace(read_run_config(folder), mesh=MeshConfig())  # this machine may have fewer devices
  for field in evaluation:
    choose(field, to_dict(config.evaluation), f'field of config.evaluation of {folder}:')
  config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **evaluation))
  if dtype:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
  if config.seeds > 1:
    members = ', '.join(str(seed_folder(folder, seed)) for seed in config.run_seeds)
    raise UserError(f'{folder} holds {config.seeds} runs, one for each seed; expected one of: {members}')
  system = SYSTEMS[config.system].open(config, str(folder))
  params, steps = restore_params(folder, system, checkpoint)
  return Run(folder, system, params, steps)


def system_of(folder: epath.PathLike) -> tuple[str, type[System]]:
  """Returns the name and the class of the system of a run, from the config of its folder alone.

  Raises:
    UserError: if the folder holds no run.
  """
  folder = resolve_folder(folder)
  name = read_run_config(folder).system
  return name, SYSTEMS[name]


def check_run_files(folder: epath.Path) -> None:
  """Checks the files of a run folder that have digests, and that this process has loaded the plug-ins of the run.

  Raises:
    UserError: for a file that is missing or changed, and for a run with a file of --plugins that was not loaded.
  """
  check_file_digests(folder)
  check_plugins(folder)


def evaluate_split(run: Run, split: str, watch: Watch = unwatched) -> tuple[dict[str, MetricValue], Any]:
  """Evaluates a run on a split of its task.

  Args:
    run: the run.
    split: the name of the split.
    watch: called before each batch.

  Returns:
    The metrics, and the predictions.

  Raises:
    UserError: as `System.evaluate`.
  """
  choose(split, run.system.splits, 'split')
  return run.system.evaluate(run.params, split, watch=watch)


def evaluate_hypotheses(run: Run, split: str, lines: Sequence[str]) -> dict[str, MetricValue]:
  """Computes the text metrics of a run for hypotheses from elsewhere.

  Args:
    run: the run whose task and metrics are used.
    split: a split of its task.
    lines: one hypothesis per row of the split.

  Raises:
    UserError: for an unknown split, for another number of lines, for a run of a system whose references are not texts,
      and if config.evaluation.metrics is empty.
  """
  choose(split, run.system.splits, 'split')
  corpus = run.system_with(SupportsCorpus).corpus(split)
  if not run.config.evaluation.metrics:
    raise UserError('config.evaluation.metrics of the run is empty; expected metrics of texts, as in --metrics=bleu')
  if len(lines) != len(corpus.source):
    counts = f'{len(lines)} hypotheses for the {len(corpus.source)} rows of {split}; expected one for each row'
    raise UserError('; '.join([counts, *corpus.report]))  # the report names the lines that are no rows
  return text_metrics(corpus, lines, run.config.evaluation)


def seed_folder(folder: epath.Path, seed: int) -> epath.Path:
  """Returns the folder of one of several runs that are trained side by side."""
  return folder / f'seed_{seed}'


def restore_params(folder: epath.Path, system: System, checkpoint: str) -> tuple[Any, tuple[int, ...]]:
  """Restores the parameters to predict with.

  Args:
    folder: the run folder.
    system: the system of the run.
    checkpoint: as for `open_run`.

  Returns:
    The parameters, and the steps of the checkpoints that they come from.
  """
  if checkpoint.endswith(SUFFIX):
    return _load_params(system, checkpoint)
  training = system.config.training
  field = evaluation_field(training.average)
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    # Shapes are enough: compiling the initial values would take seconds.
    shapes = jax.eval_shape(lambda: system.initializer()(training.seed))
    layouts = parameter_shardings(shapes, system.mesh)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, layouts)
    kind, steps = _select_checkpoints(checkpoints, checkpoint, training.keep)
    params = [checkpoints.restore_field(field, like, kind, step) for step in steps or [None]]
    if len(params) == 1:
      return params[0], tuple(steps)
    return jax.tree.map(lambda *x: sum(x) / len(x), *params), tuple(steps)
  finally:
    checkpoints.close()


def _load_params(system: System, path: str) -> tuple[Any, tuple[int, ...]]:
  """The parameters of a file of weights, and the steps that it names; step 0 if it names none."""
  shapes = jax.eval_shape(lambda: system.initializer()(0))
  params = replicate(load_weights(path, shapes), make_mesh(jax.local_devices()))
  steps = read_metadata(path).get('steps', '').split()
  return params, tuple(int(step) for step in steps if step.isdecimal()) or (0,)


def _select_checkpoints(checkpoints: Checkpoints, name: str, keep: int) -> tuple[str, list[int]]:
  """Returns the kind and the steps of the checkpoints that a name selects; no steps if there are no checkpoints."""
  if name.isdecimal():
    kinds = {step: kind for kind in (LATEST, BEST) for step in checkpoints.steps(kind)}
    if kinds:
      step = int(choose(str(int(name)), map(str, kinds), f'checkpoint of {checkpoints.folder}:'))
      return kinds[step], [step]
    name = 'latest'  # restoring it reports that there are no checkpoints
  choose(name, CHECKPOINT_NAMES, 'checkpoint or step')
  kind = BEST if name == 'best' and checkpoints.steps(BEST) else LATEST
  if name == 'best' and kind == LATEST:
    best = (checkpoints.host_values() or {}).get('best', {}).get('step')
    if best is not None:  # else a run without a validation split, or before its first evaluation
      raise UserError(
        f'{checkpoints.folder / BEST} has no checkpoint, but its run has saved that of step {best}; restore it, or '
        'read others by --checkpoint, such as latest'
      )
  count = keep if name == 'average' else 1
  return kind, checkpoints.steps(kind)[-count:]


def split_commas(value: str, name: str) -> list[str]:
  """Returns the values of a flag that are separated by commas; the name of an existing file or folder is one value.

  Args:
    value: the value of the flag.
    name: the name of the flag, for the error.

  Raises:
    UserError: for an empty value.
  """
  if os.path.exists(os.path.expanduser(value)):
    return [value]
  parts = [part.strip() for part in value.split(',')]
  if not all(parts):
    raise UserError(f'{name} must be one value or several separated by commas, none of them empty, got {value!r}')
  return parts


def write_lines(path: epath.Path, lines: Sequence[str]) -> None:
  """Writes one line for each row of a split, in order. In a multi-process run, only process 0 writes."""
  if jax.process_index() == 0:
    atomic.write_text(path, ''.join(f'{line}\n' for line in lines))


def write_json(path: epath.Path, record: Mapping[str, Any]) -> None:
  """Writes an indented JSON object, see `atomic.to_json`. In a multi-process run, only process 0 writes."""
  if jax.process_index() == 0:
    atomic.write_text(path, atomic.to_json(record, indent=2) + '\n')
