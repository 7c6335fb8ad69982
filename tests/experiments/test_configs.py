"""Every kind of model that configs and presets make together is built; one shrunken step of each preset runs."""

import gzip
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from attention_jax.data.builders import dates, entailment, records, shapes
from attention_jax.systems.presets import PRESETS
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.loop import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step
from experiments.launch import load_config
from tests.experiments.helpers import ROOT, WORDS, write_task

CONFIGS = {path.stem: load_config(str(path)).system for path in sorted((ROOT / 'configs').glob('[a-z]*.py'))}
ONLY = {'parikh2016': ['entailment']}  # it compares pairs of texts
PAIRS = [(name, preset) for name in CONFIGS for preset in PRESETS[CONFIGS[name]] if name in ONLY.get(preset, [name])]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The files that the configs name, with a few lines in each."""
  folder = write_task(tmp_path_factory.mktemp('data'))
  table = (folder / 'train.tsv').read_bytes()
  for name in ('german.train', 'german.dev'):
    (folder / f'{name}.tsv').write_bytes(table)
  for name in ('length.train', 'length.test'):
    (folder / f'{name}.tsv.gz').write_bytes(gzip.compress(table))
  for split in ('train', 'val', 'validation', 'test2016', 'test'):
    for side in ('en', 'de', 'source', 'target'):
      (folder / f'{split}.{side}').write_text('\n'.join([' '.join(WORDS)] * 20), 'utf-8')
  rows = [json.dumps({'text': 'It is good. ' * (i + 1), 'label': i % 2}) for i in range(8)]
  for split in ('train', 'dev'):
    (folder / f'{split}.jsonl.gz').write_bytes(gzip.compress('\n'.join(rows).encode()))
  (folder / 'images').mkdir()
  for i in range(10):
    Image.new('RGB', (20, 20), (25 * i, 0, 0)).save(folder / 'images' / f'{i}.png')
  captions = [f'{i % 10}.png,{WORDS[0]} {WORDS[1]}\n' for i in range(20)]
  (folder / 'captions.csv').write_text('image,caption\n' + ''.join(captions), 'utf-8')
  return folder


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
  columns = {'source': ['5 March 1999'] * 8, 'target': ['1999-03-05'] * 8, 'links': ['8-0 9-1'] * 8}
  monkeypatch.setattr(dates, 'load', lambda split, folder: columns)
  for builder in (records, entailment, shapes):
    monkeypatch.setattr(builder, 'SIZES', dict.fromkeys(builder.SIZES, 64))


def shrunken(name: str, preset: str):
  """A config with every size of its model at 4, and few rows in a batch."""
  config = load_config(f'{ROOT}/configs/{name}.py:{preset}').lock()
  small = lambda spec: re.sub(r'(layers|heads)=\d+', r'\1=2', re.sub(r'(features|readout|hidden)=\d+', r'\1=4', spec))
  for part in {'encoder', 'decoder', 'classifier', 'cell'} & set(config.model):
    config.model[part] = small(config.model[part])
  for size in {'embedding', 'features', 'hidden'} & set(config.model):
    config.model[size] = min(4, config.model[size])
  if 'attention' in config.model:
    config.model.attention.features = 4
    config.model.attention.heads = min(2, config.model.attention.heads)
  config.data.batch_size = {'sentences': 8, 'tokens': 256}[config.data.get('batch_unit', 'sentences')]
  return config.to_dict()


def opened(config, folder: Path):
  """The system of a config on the files of `folder`, with few subwords."""
  source = config['data'] | ({'folder': str(folder)} if 'folder' in config['data'] else {})
  if 'vocabulary' in source:
    source['vocabulary'] = re.sub(r'size=\d+', 'size=40', source['vocabulary'])
  if config['system'] == 'translation' and source['task'].startswith('tfds'):  # which has tests of its own
    source['task'] = "text(train='train', test='test', source='en', target='de')"
  return SYSTEMS[config['system']].load(config | {'data': source}, None)


def kind(config) -> str:
  """What decides whether the parts of a config fit together: all of it that is no number."""
  training = {name: config['training'].get(name) for name in ('objective', 'auxiliary', 'anneal')}
  parts = config['system'], config['model'], config['data'].get('shared_vocabulary'), training
  return re.sub(r'\d[\d.e-]*', '', str(parts))


def kinds() -> list:
  """One (config, preset) of each kind; those whose config and preset were both there before for `make test-all`."""
  found, seen = [], set()
  for pair in {kind(shrunken(*pair)): pair for pair in PAIRS}.values():
    found.append(pytest.param(*pair, marks=[pytest.mark.product] * (seen >= set(pair))))
    seen |= set(pair)
  return found


@pytest.mark.parametrize(('name', 'preset'), kinds())
def test_builds(name, preset):
  config = shrunken(name, preset)
  SYSTEMS[config['system']].check(config, Training(**config['training']))


def test_heads_divide_what_they_share():
  for name, preset in PAIRS:
    attention = load_config(f'{ROOT}/configs/{name}.py:{preset}').model.get('attention')
    assert attention is None or attention.features % attention.heads == 0, (name, preset)


def test_what_is_selected_is_measured():
  for pair in PAIRS:
    config = shrunken(*pair)
    assert Training(**config['training']).select in SYSTEMS[config['system']].selectable_metrics(config), pair


def different():
  """(config, preset) of all presets that are not another one in another size, each with one of the configs.

  Where only the score or the alignment is another, `make test-all` makes the step, as the tests of cells train every
  one, and so for the other systems, which have tests of their own.
  """
  found, seen = [], set()
  for system in SYSTEMS:
    kinds, names = {}, [name for name in CONFIGS if CONFIGS[name] == system]
    for preset in PRESETS[system]:
      config = shrunken(ONLY.get(preset, names)[-1], preset)
      rest = config['training'], config['data'].get('shared_vocabulary')
      attention = config['model'].pop('attention', {})
      kinds.setdefault(str((config['model'], attention, rest)), (str((config['model'], rest)), preset))
    for i, (parts, preset) in enumerate(kinds.values()):
      fit = ONLY.get(preset, names)
      trained = system != 'translation' or parts in seen
      found.append(pytest.param(fit[i % len(fit)], preset, marks=[pytest.mark.product] * trained))
      seen.add(parts)
  return found


@pytest.mark.parametrize(('name', 'preset'), different())
def test_one_step(name, preset, folder):
  config = shrunken(name, preset)
  system, training = opened(config, folder), Training(**config['training'])
  assert 'train' in system.splits and set(system.splits) & {'validation', 'test'}
  schedule, mesh = make_schedule(training.schedule, training.steps), make_mesh(jax.devices()[:1])
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  step = make_train_step(system.loss, optimizer, schedule, mesh, seed=0)
  # Parameters that are cheap to make: all 0.1.
  params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), jax.eval_shape(lambda: system.initializer()(0)))
  state = replicate(init_state(params, optimizer, training.average, system.loss.running), mesh)
  state, metrics = step(state, system.batches(0)[0])
  assert int(state.step) == 1 and np.isfinite(metrics['loss']) and metrics['grad_norm'] > 0
