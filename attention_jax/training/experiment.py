"""A whole experiment from its config: data, model, training, test metrics. And how to open one that was run."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.data import tasks
from attention_jax.data.batching import Batch, Batches, Together
from attention_jax.data.encoding import assign, check_buckets
from attention_jax.data.pipeline import stream
from attention_jax.data.resegment import resegmented
from attention_jax.data.vocab import same
from attention_jax.errors import UserError, choose
from attention_jax.functional.table import parse_spec
from attention_jax.kernels import auto
from attention_jax.models.ensemble import Ensemble
from attention_jax.models.seq2seq import EncoderDecoder, build
from attention_jax.training.anneal import make_anneal
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.config import Evaluation, complete
from attention_jax.training.evaluation import ALIGNMENT, FORCED, Scorer, evaluate
from attention_jax.training.folder import check_folder, prepare_folder, read_config
from attention_jax.training.loop import Training, fit
from attention_jax.training.losses import Loss, sequence_loss
from attention_jax.training.metrics import Result as Measured
from attention_jax.training.metrics import Spread, higher_is_better, measure, over_runs
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import check_rows, make_mesh, sharding
from attention_jax.training.prediction import Predictor, compile_search, longest_output, searched_sizes
from attention_jax.training.seeds import Results, fit_seeds
from attention_jax.training.state import TrainState, evaluation_params, init_state
from attention_jax.training.step import step_rngs

RESULTS = 'results.json'
TESTED = ('test', 'unseen')  # splits that are measured once, at the end
Config = Mapping[str, Any]


class Run(NamedTuple):
  """A trained run: its folder, config and model, the parameters to predict with, and the step they are from."""

  folder: Path
  config: Config
  model: EncoderDecoder
  params: Any
  step: int
  predictor: Predictor


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


def train(config: Config, folder: str | Path, say=print) -> dict[str, dict[str, Measured | Spread]]:
  """Trains in `folder`, or goes on where a run of the same config was interrupted; then measures the tested splits.

  With config['seeds'] of several, so many runs are trained side by side, each in a folder seed_N below, and what is
  returned are means over them.

  Args:
    config: as `training.config.default_config` lays it out.
    folder: of the run; what is in it afterwards is listed by `say`.
    say: is told what a person should read.

  Returns: split -> metric -> what was measured, of the best parameters by validation. Also written to results.json.
  Raises: UserError for anything wrong with the config, the data or the folder, before anything is overwritten.
  """
  config = complete(config, 'the config')
  training = _checked(config)
  resumed = check_folder(folder, config)
  say = say if jax.process_index() == 0 else lambda line: None
  data = tasks.load(config['data'], str(folder) if resumed else None)
  for line in data.report:
    say(line)
  model = build(config['model'], len(data.source_vocab), len(data.target_vocab))
  seeds = _seeds(config)
  params = list(map(initializer(model), seeds))
  say(_describe(model, params[0]))
  loss = _loss(model, training)
  batches = [_batches(config, data, loss, seed) for seed in seeds]
  say(f'{len(batches[0])} batches an epoch, of shapes (rows, source, target) {sorted(set(batches[0].shapes))}')
  _check_with_data(config, data, batches[0], model, loss, say)
  folder = prepare_folder(folder, config)
  if not resumed:
    tasks.save_vocabularies(config['data'], data, str(folder))
  began, direction = time.monotonic(), 'max' if selectable(config)[training.select] else 'min'
  given = {'loss': loss, 'evaluate': _validation(config, model, data), 'direction': direction}
  members = _members(config, folder, data)
  step, reasons, compilations = _fit(folder, [own for _, own in members], training, params, batches, given)
  for reason in dict.fromkeys(reasons):
    say(f'{reason} ({time.monotonic() - began:.0f} s, {compilations} shapes compiled)')
  if any(reason.startswith('stopped by') for reason in reasons):
    say(f'the same command goes on from step {step}')
    return {}
  found = [_finish(own_config, own, model, data, say) for own_config, own in members]
  return found[0] if len(seeds) == 1 else _summary(folder, seeds, found, say)


def _fit(
  folder: Path, folders: Sequence[Path], training: Training, params: Sequence[Any], batches: Sequence[Batches],
  given: Mapping[str, Any],
) -> Results:  # fmt: skip
  """One run by itself, several side by side. `folders`, `params` and `batches`: of each run; `given`: for either."""
  if len(params) > 1:
    together = lambda start, stop: stream(Together(batches), start, stop)
    return fit_seeds(folder, folders, training, params=params, stream=together, **given)
  alone = lambda start, stop: stream(batches[0], start, stop)
  result = fit(folder, training, params=params[0], stream=alone, **given)
  return Results(int(result.state.step), [result.reason], result.compilations)


def open_runs(folders: str, checkpoint: str = 'best') -> Run:
  """As open_run; folders with commas between them are an ensemble, with the config of the first.

  Raises: UserError besides where runs have different vocabularies.
  """
  runs = [open_run(folder, checkpoint) for folder in folders.split(',')]
  if len(runs) == 1:
    return runs[0]
  first = runs[0]
  for run in runs[1:]:
    for side in ('source_vocab', 'target_vocab'):
      if not same(getattr(first.predictor, side), getattr(run.predictor, side)):
        raise UserError(f'{first.folder} and {run.folder} cannot be an ensemble: they have different vocabularies')
  model, params = Ensemble([run.model for run in runs]), tuple(run.params for run in runs)
  vocabularies = first.predictor.source_vocab, first.predictor.target_vocab
  return first._replace(model=model, params=params, predictor=_predictor(first.config, model, params, *vocabularies))


def open_run(folder: str | Path, checkpoint: str = 'best') -> Run:
  """A run that was trained, ready to predict, without its data.

  Args: checkpoint, 'best', 'latest', or 'average': the mean of the parameters of all that are kept (training.keep).
  Raises: UserError when the folder holds no run, or its checkpoint cannot be read.
  """
  folder = Path(folder)
  config = complete(read_config(folder), f'{folder}/config.json')
  if config['seeds'] > 1:
    possible = ', '.join(str(_own(folder, seed)) for seed in _seeds(config))
    raise UserError(f'{folder} holds {config["seeds"]} runs, one for each seed; possible: {possible}')
  source_vocab, target_vocab = tasks.load_vocabularies(config['data'], str(folder))
  model = build(config['model'], len(source_vocab), len(target_vocab))
  state = _restore(config, folder, model, BEST if checkpoint == 'best' else LATEST, checkpoint == 'average')
  params = evaluation_params(state)
  predictor = _predictor(config, model, params, source_vocab, target_vocab)
  return Run(folder, config, model, params, int(state.step), predictor)


def evaluate_split(run: Run, split: str, *, beams: int | None = None, data: tasks.Data | None = None):
  """(metrics, predictions) of one split of a run's task. Raises: UserError naming the splits there are."""
  data = data or tasks.load(run.config['data'], str(run.folder))
  corpus, encoded = tasks.split_of(data, split)
  options = run.config['evaluation']
  scorer = Scorer(run.model, run.config['data']['buckets'], options['batch_size'])
  beams = options['beams'] if beams is None else beams
  return evaluate(run.params, corpus, encoded, scorer, run.predictor, options, beams=beams)


def _seeds(config: Config) -> list[int]:
  """The seeds of the runs of a config."""
  return [config['training']['seed'] + i for i in range(config['seeds'])]


def _own(folder: Path, seed: int) -> Path:
  """The folder of one of several runs."""
  return folder / f'seed_{seed}'


def _members(config: Config, folder: Path, data: tasks.Data) -> list[tuple[Config, Path]]:
  """The config and the folder of each run; of several, those that it would have if it were trained alone."""
  if config['seeds'] == 1:
    return [(config, folder)]
  configs = [dict(config, seeds=1, training=config['training'] | {'seed': seed}) for seed in _seeds(config)]
  members = [(own, prepare_folder(_own(folder, own['training']['seed']), own)) for own in configs]
  for own, path in members:
    tasks.save_vocabularies(own['data'], data, str(path))
  return members


def _batches(config: Config, data: tasks.Data, loss: Loss, seed: int) -> Batches:
  """The training batches of a run."""
  encoded = data.encoded['train']
  resegment = resegmented(encoded, data.corpora['train'], data.source_vocab, data.target_vocab, seed)
  return Batches(
    encoded, config['data']['buckets'], config['data']['batch_size'], config['data']['batch_unit'],
    seed=seed, shard=jax.process_index(), shards=jax.process_count(), links=loss.links,
    resegment=resegment,
  )  # fmt: skip


def _checked(config: Config) -> Training:
  """Everything in a config that can be wrong without its data, said before the folder belongs to it."""
  if config['seeds'] < 1 or (config['seeds'] > 1 and jax.process_count() > 1):
    possible = '1 in several processes' if jax.process_count() > 1 else '1 or more'
    raise UserError(f'config.seeds is {config["seeds"]}; possible: {possible}')
  training = Training(**config['training'])
  make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  model = build(config['model'], 4, 4)
  _check_with_model(model, training)
  tasks.check(config['data'])
  # Two vocabularies of one size would pass for a shared one.
  if (model.output.copies or config['model']['share_embeddings']) and not config['data']['shared_vocabulary']:
    which = 'share_embeddings' if config['model']['share_embeddings'] else f'output={config["model"]["output"]!r}'
    raise UserError(f'config.model.{which} needs one vocabulary for both sides; set config.data.shared_vocabulary=True')
  Evaluation(**config['evaluation'])
  for spec in config['evaluation']['metrics']:
    measure(spec, ['a'], [['a']])  # also refuses values that only the metric itself knows
  choose(training.select, selectable(config), 'metric in training.select:')
  return training


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)


def _check_with_model(model: EncoderDecoder, training: Training) -> None:
  """What can be wrong with a model, and with losses and schedules for it; all of it is told by shapes alone."""
  loss, params = _loss(model, training), jax.eval_shape(lambda: initial_params(model, 0))
  make_anneal(training.anneal, params, training.steps)
  _trace(loss, params, _smallest())


def _trace(loss: Loss, params: Any, batch: Batch) -> None:
  """Raises whatever the loss raises at a batch of this shape; computes nothing."""
  jax.eval_shape(loss, params, batch, step_rngs(jax.random.key(0)), dict.fromkeys(loss.running, 0.0))


def _check_with_data(config: Config, data: tasks.Data, batches: Batches, model: EncoderDecoder, loss: Loss, say):
  """What only the data can tell to be wrong with a config."""
  training, validation = config['training'], data.corpora.get('validation')
  if validation is None:
    say('no validation split: training.select and training.patience have nothing to look at, the last step is measured')
  if validation is not None and validation.links is None and training['select'] in ALIGNMENT:
    raise UserError(f'training.select={training["select"]!r} needs gold links, which the validation split has not')
  for rows, _, _ in batches.shapes:
    check_rows(rows * jax.process_count(), make_mesh(seeds=config['seeds']), training['accumulate'])
  _check_lengths(config, data, model, loss)


def _check_lengths(config: Config, data: tasks.Data, model: EncoderDecoder, loss: Loss) -> None:
  """Raises what a model with a greatest length would raise hours later, at the longest source or target of a split."""
  buckets = check_buckets(config['data']['buckets'])
  chosen = np.unique(np.concatenate([assign(encoded, buckets) for encoded in data.encoded.values()]))
  sources, targets = zip(*(buckets[i] for i in chosen if i >= 0), strict=True)
  params = jax.eval_shape(lambda: initial_params(model, 0))
  _trace(loss, params, _smallest(max(sources), max(targets)))
  longest = max(int(encoded.lengths[0].max(initial=1)) for encoded in data.encoded.values())
  source = max(*sources, min(size for size in searched_sizes(buckets, longest) if size >= longest))
  find = compile_search(model, 1, longest_output(buckets, config['evaluation']['max_length']))
  jax.eval_shape(find, params, *_smallest(source)[:2])


def selectable(config: Config) -> dict[str, bool]:
  """The metrics a validation may have, and whether more of each is better."""
  texts = {parse_spec(spec)[0]: higher_is_better(spec) for spec in config['evaluation']['metrics']}
  return FORCED | texts


def _describe(model: EncoderDecoder, params: Any) -> str:
  size = sum(x.size for x in jax.tree.leaves(params))
  devices = jax.devices()
  where = f'{len(devices)} x {devices[0].device_kind}'
  return f'{size:,} parameters; attention implementation {_implementation(model)}; {where}'


def _implementation(model: EncoderDecoder) -> str:
  """The name of what computes attention over the source; of 'auto' with what it chooses."""
  attention = model.decoder.attention
  several = auto.described(attention.score_of, attention.alignment_of)
  chosen = f' ({"xla, one query at a time" if model.decoder.attends_inside else several})'
  return attention.implementation + chosen * (attention.implementation == 'auto')


def _predictor(config: Config, model: EncoderDecoder, params: Any, source_vocab, target_vocab) -> Predictor:
  options = config['evaluation']
  return Predictor(
    model, params, source_vocab, target_vocab, buckets=config['data']['buckets'],
    max_length=options['max_length'], batch_size=options['batch_size'], ranking=Evaluation(**options).ranking,
  )  # fmt: skip


def _validation(config: Config, model: EncoderDecoder, data: tasks.Data):
  """state -> metrics of the validation split by greedy search; None where the task has no validation split."""
  if 'validation' not in data.corpora:
    return None
  options = config['evaluation']
  scorer = Scorer(model, config['data']['buckets'], options['batch_size'])
  predictor = None

  def validate(state: TrainState) -> dict[str, float]:
    nonlocal predictor
    params = evaluation_params(state)
    if predictor is None:
      predictor = _predictor(config, model, params, data.source_vocab, data.target_vocab)
    predictor.use(params)
    found, _ = evaluate(
      params, data.corpora['validation'], data.encoded['validation'], scorer, predictor, options, beams=1
    )
    return {name: result.value for name, result in found.items()}

  return validate


def _restore(config: Config, folder: Path, model: EncoderDecoder, kind: str, mean: bool = False) -> TrainState:
  """The last state of a kind; `mean`: with the mean of the parameters of all that are kept."""
  training = Training(**config['training'])
  optimizer = make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  # Shapes are enough: initial values would take seconds to compile.
  running = _loss(model, training).running
  like = jax.eval_shape(lambda: init_state(initial_params(model, training.seed), optimizer, training.average, running))
  place = sharding(make_mesh(jax.local_devices()), 'state')
  checkpoints = Checkpoints(folder, training.keep, read_only=True)
  try:
    kind = kind if checkpoints.latest(kind) is not None else LATEST
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
    states = [checkpoints.restore(like, kind, step)[0] for step in checkpoints.steps(kind)[0 if mean else -1 :]]
    last = states[-1] if states else checkpoints.restore(like, kind)[0]
    if not mean:
      return last
    params = [evaluation_params(state) for state in states]
    return last._replace(params=jax.tree.map(lambda *x: sum(x) / len(x), *params), average=())
  finally:
    checkpoints.close()


def _finish(config: Config, folder: Path, model, data: tasks.Data, say) -> dict[str, dict[str, Measured]]:
  """Measures the tested splits with the best parameters and writes results and hypotheses."""
  state = _restore(config, folder, model, BEST)
  params = evaluation_params(state)
  predictor = _predictor(config, model, params, data.source_vocab, data.target_vocab)
  run = Run(folder, config, model, params, int(state.step), predictor)
  results = {}
  for split in _measured(data):
    results[split], predictions = evaluate_split(run, split, data=data)
    write_hypotheses(folder / f'hypotheses.{split}.txt', predictions)
  chosen = f'the best by validation {config["training"]["select"]}' if 'validation' in data.corpora else 'the last'
  what = ' and '.join(results) or 'nothing, as the task has only a training split'
  say(f'measured: {what}; parameters: step {run.step}, {chosen}')
  record = {'step': run.step, 'beams': config['evaluation']['beams']}
  record['implementation'] = _implementation(model)
  record['results'] = {s: {n: m._asdict() for n, m in found.items()} for s, found in results.items()}
  _write(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  say(f'written to {folder}: {", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir()))}')
  return results


def _summary(folder: Path, seeds: list[int], found: list[dict[str, dict[str, Measured]]], say):
  """Mean and spread over runs of what was measured in each; written to results.json as well."""
  results = {
    split: {name: over_runs([run[split][name] for run in found]) for name in found[0][split]} for split in found[0]
  }
  record = {'seeds': seeds, 'results': {s: {n: m._asdict() for n, m in some.items()} for s, some in results.items()}}
  _write(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  say(f'written to {folder}: the means over {len(seeds)} seeds in {RESULTS}')
  return results


def _measured(data: tasks.Data) -> list[str]:
  """The tested splits; of a task that has none (it comes without a test set) the one that chose the parameters."""
  return [split for split in TESTED if split in data.corpora] or [s for s in ('validation',) if s in data.corpora]


def write_hypotheses(path: Path, predictions) -> None:
  """The best hypothesis of every source, one a line, in order."""
  lines = [p.hypotheses[0].text if p.hypotheses else '' for p in predictions]
  _write(path, ''.join(f'{line}\n' for line in lines))


def _write(path: Path, text: str) -> None:
  if jax.process_index() == 0:
    partial = path.with_name(f'.{path.name}.part')
    partial.write_text(text, 'utf-8')
    os.replace(partial, path)
