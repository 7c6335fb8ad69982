"""A whole experiment from its config: data, model, training, test metrics. And how to open one that was run."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.data import tasks
from attention_jax.data.batching import Batch, Batches
from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError, choose
from attention_jax.functional.table import parse_spec
from attention_jax.models.seq2seq import EncoderDecoder, build
from attention_jax.training.anneal import make_anneal
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.config import Evaluation, complete, default_config
from attention_jax.training.evaluation import ALIGNMENT, FORCED, Scorer, evaluate
from attention_jax.training.folder import check_folder, prepare_folder, read_config
from attention_jax.training.loop import Result, Training, fit
from attention_jax.training.losses import Loss, sequence_loss
from attention_jax.training.metrics import Result as Measured
from attention_jax.training.metrics import higher_is_better, measure
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import check_rows, make_mesh, sharding
from attention_jax.training.prediction import Predictor
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
  batch, rng = _smallest(), jax.random.key(seed)
  return jax.jit(lambda rng: model.init(rng, batch.source, batch.source_mask, batch.target))(rng)['params']


def _smallest() -> Batch:
  """A batch by which parameters and shapes are told."""
  ids, real = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
  return Batch(ids, real, ids, real, ids[:, 0], jnp.ones((1, 2, 2), bool))


def train(config: Config, folder: str | Path, say=print) -> dict[str, dict[str, Measured]]:
  """Trains in `folder`, or goes on where a run of the same config was interrupted; then measures the tested splits.

  Args:
    config: as `training.config.default_config` lays it out.
    folder: of the run; what is in it afterwards is listed by `say`.
    say: is told what a person should read.

  Returns: split -> metric -> Result, of the best parameters by validation. Also written to results.json.
  Raises: UserError for anything wrong with the config, the data or the folder, before anything is overwritten.
  """
  config = complete(config, 'the config')
  training = _checked(config)
  defaults = default_config().to_dict()
  resumed = check_folder(folder, config, defaults)
  say = say if jax.process_index() == 0 else lambda line: None
  data = tasks.load(config['data'], str(folder) if resumed else None)
  for line in data.report:
    say(line)
  model = build(config['model'], len(data.source_vocab), len(data.target_vocab))
  params = initial_params(model, training.seed)
  say(_describe(model, params))
  loss = _loss(model, training)
  batches = Batches(
    data.encoded['train'], config['data']['buckets'], config['data']['batch_size'], config['data']['batch_unit'],
    seed=training.seed, shard=jax.process_index(), shards=jax.process_count(), links=loss.links,
  )  # fmt: skip
  say(f'{len(batches)} batches an epoch, of shapes (rows, source, target) {sorted(set(batches.shapes))}')
  _check_with_data(config, data, batches, say)
  folder = prepare_folder(folder, config, defaults)
  if not resumed:
    tasks.save_vocabularies(config['data'], data, str(folder))
  began = time.monotonic()
  result = fit(
    folder, training, loss=loss, params=params, stream=lambda start, stop: stream(batches, start, stop),
    evaluate=_validation(config, model, data),
    direction='max' if selectable(config)[training.select] else 'min',
  )  # fmt: skip
  say(f'{result.reason} ({time.monotonic() - began:.0f} s, {result.compilations} shapes compiled)')
  if result.reason.startswith('stopped by'):
    say(f'the same command goes on from step {int(result.state.step)}')
    return {}
  return _finish(config, folder, model, data, result, say)


def open_run(folder: str | Path, checkpoint: str = 'best') -> Run:
  """A run that was trained, ready to predict, without its data. `checkpoint`: 'best' or 'latest'.

  Raises: UserError when the folder holds no run, or its checkpoint cannot be read.
  """
  folder = Path(folder)
  config = complete(read_config(folder), f'{folder}/config.json')
  source_vocab, target_vocab = tasks.load_vocabularies(config['data'], str(folder))
  model = build(config['model'], len(source_vocab), len(target_vocab))
  state = _restore(config, folder, model, BEST if checkpoint == 'best' else LATEST)
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


def _checked(config: Config) -> Training:
  """Everything in a config that can be wrong without its data, said before the folder belongs to it."""
  training = Training(**config['training'])
  make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  _check_with_model(build(config['model'], 4, 4), training)
  tasks.check(config['data'])
  Evaluation(**config['evaluation'])
  for spec in config['evaluation']['metrics']:
    measure(spec, ['a'], [['a']])  # also refuses values that only the metric itself knows
  choose(training.select, selectable(config), 'metric in training.select:')
  return training


def _loss(model: EncoderDecoder, training: Training) -> Loss:
  return sequence_loss(model, training.label_smoothing, training.auxiliary)


def _check_with_model(model: EncoderDecoder, training: Training) -> None:
  """What can be wrong with a model, and with losses and schedules for it; all of it is told by shapes alone."""
  loss, params = _loss(model, training), jax.eval_shape(lambda: initial_params(model, 0))
  make_anneal(training.anneal, params, training.steps)
  jax.eval_shape(loss, params, _smallest(), step_rngs(jax.random.key(0)), dict.fromkeys(loss.running, 0.0))


def _check_with_data(config: Config, data: tasks.Data, batches: Batches, say) -> None:
  """What only the data can tell to be wrong with a config."""
  training, validation = config['training'], data.corpora.get('validation')
  if validation is None:
    say('no validation split: training.select and training.patience have nothing to look at, the last step is measured')
  if validation is not None and validation.links is None and training['select'] in ALIGNMENT:
    raise UserError(f'training.select={training["select"]!r} needs gold links, which the validation split has not')
  for rows, _, _ in batches.shapes:
    check_rows(rows * jax.process_count(), make_mesh(), training['accumulate'])


def selectable(config: Config) -> dict[str, bool]:
  """The metrics a validation may have, and whether more of each is better."""
  texts = {parse_spec(spec)[0]: higher_is_better(spec) for spec in config['evaluation']['metrics']}
  return FORCED | texts


def _describe(model: EncoderDecoder, params: Any) -> str:
  size = sum(x.size for x in jax.tree.leaves(params))
  devices = jax.devices()
  return (
    f'{size:,} parameters; attention implementation '
    f'{model.decoder.cell.attention.implementation!r}; {len(devices)} x {devices[0].device_kind}'
  )


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


def _restore(config: Config, folder: Path, model: EncoderDecoder, kind: str) -> TrainState:
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
    return checkpoints.restore(like, kind)[0]
  finally:
    checkpoints.close()


def _finish(config: Config, folder: Path, model, data: tasks.Data, result: Result, say) -> dict:
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
  record['implementation'] = config['model']['attention']['implementation']
  record['results'] = {s: {n: m._asdict() for n, m in found.items()} for s, found in results.items()}
  _write(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  say(f'written to {folder}: {", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir()))}')
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
