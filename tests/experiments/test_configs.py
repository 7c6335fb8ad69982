"""Every combination of parts that configs and presets select is valid; one update runs of each distinct tiny preset."""

import copy
import functools
import gzip
import json
import operator
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from attention_jax.data.builders import dates, records
from attention_jax.errors import UserError
from attention_jax.systems.captioning import shapes
from attention_jax.systems.classification import entailment
from attention_jax.systems.config import parse_config
from attention_jax.systems.presets import PRESETS
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.config import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step
from experiments.config_files import load_config
from tests.experiments.helpers import ROOT, WORDS, write_task

# name of the config file -> its system
CONFIGS = {
  path.stem: load_config(str(path)).system
  for path in sorted((ROOT / 'configs').glob('[a-z]*.py'))
  if path.stem != 'from_run'
}
# preset -> the configs that it is tested with. parikh2016 compares pairs of texts. ba2015 reads several objects; the
# pictures of mnist are not in the repository, those of digits come with scikit-learn.
REQUIRED_CONFIGS = {'parikh2016': ['entailment'], 'ba2015': ['digits']}
PAIRS = [
  (name, preset)
  for name, system in CONFIGS.items()
  for preset in PRESETS[system]
  if name in REQUIRED_CONFIGS.get(preset, [name])
]
MECHANISMS = {'score', 'alignment', 'encoder', 'decoder', 'output', 'classifier', 'pooling'}
TINY = 4  # features of every layer
TINY_BATCHES = {'sentences': 8, 'tokens': 256}  # batch size by batch unit


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
  pairs = [f'I am {word}.\tJe suis {word}.\tCC-BY\n' for word in WORDS]
  (folder / 'fra.txt').write_text(''.join(pairs), 'utf-8')
  documents = [json.dumps({'text': 'It is good. ' * (i + 1), 'label': i % 2}) for i in range(8)]
  for split in ('train', 'dev'):
    (folder / f'{split}.jsonl.gz').write_bytes(gzip.compress('\n'.join(documents).encode()))
  (folder / 'images').mkdir()
  for i in range(10):
    Image.new('RGB', (20, 20), (25 * i, 0, 0)).save(folder / 'images' / f'{i}.png')
  captions = [f'{i % 10}.png,{WORDS[0]} {WORDS[1]}\n' for i in range(20)]
  (folder / 'captions.csv').write_text('image,caption\n' + ''.join(captions), 'utf-8')
  return folder


@pytest.fixture(autouse=True)
def small_generated_data(monkeypatch):
  columns = {'source': ['5 March 1999'] * 8, 'target': ['1999-03-05'] * 8, 'links': ['8-0 9-1'] * 8}
  monkeypatch.setattr(dates, 'load', lambda split, folder: columns)
  for builder in (records, entailment, shapes):
    monkeypatch.setattr(builder, 'SIZES', dict.fromkeys(builder.SIZES, 64))


def test_sizes_of_own_text_and_an_unknown_one():
  path = f'{ROOT}/configs/text.py'
  tiny, small, base = (load_config(f'{path}:transformer2017@{size}') for size in ('tiny', 'small', 'base'))
  assert base == load_config(f'{path}:transformer2017')
  for config, size in ((tiny, 'features=128, layers=2'), (small, 'features=256, layers=3'), (base, 'features=512, la')):
    assert size in config.model.encoder
  for name in ('tinny', ''):
    with pytest.raises(UserError, match=f"unknown size '{name}'.*expected one of: base, small, tiny"):
      load_config(f'{path}:transformer2017@{name}')
  numbers = load_config(f'{ROOT}/configs/numbers.py:transformer2017@tiny')
  assert numbers.data.task == 'numbers' and numbers.model == tiny.model


@functools.cache
def full_config(name: str, preset: str) -> dict[str, Any]:
  return load_config(f'{ROOT}/configs/{name}.py:{preset}').to_dict()


def tiny_config(name: str, preset: str) -> dict[str, Any]:
  """Returns a config with every size of its model at TINY, and few rows in a batch."""
  config = copy.deepcopy(full_config(name, preset))
  model = config['model']
  for part in {'encoder', 'decoder', 'classifier', 'cell'} & set(model):
    model[part] = tiny_spec(model[part])
  for size in {'embedding', 'features', 'hidden'} & set(model):
    model[size] = min(TINY, model[size])
  if 'attention' in model:
    model['attention'] |= {'features': TINY, 'heads': min(2, model['attention']['heads'])}
  config['data']['batch_size'] = TINY_BATCHES[config['data'].get('batch_unit', 'sentences')]
  return config


def tiny_spec(spec: str) -> str:
  spec = re.sub(r'(features|readout|hidden)=\d+', rf'\1={TINY}', spec)
  return re.sub(r'(layers|heads)=\d+', r'\1=2', spec)


def load_system(config: dict[str, Any], folder: Path):
  """Returns the system of a config on the files of `folder`, with few subwords."""
  data = config['data'] | ({'folder': str(folder)} if 'folder' in config['data'] else {})
  if 'vocabulary' in data:
    data['vocabulary'] = re.sub(r'size=\d+', 'size=40', data['vocabulary'])
  if config['system'] == 'translation' and data['task'].startswith('tfds'):  # which has tests of its own
    data['task'] = "text(train='train', test='test', source='en', target='de')"
  return SYSTEMS[config['system']].load(parse_config(config | {'data': data}), None)


def combination(config: dict[str, Any]) -> str:
  """Returns the fields that decide whether the parts of a config fit together, without their numbers."""
  training = {name: config['training'].get(name) for name in ('objective', 'auxiliary', 'anneal')}
  parts = config['system'], config['model'], config['data'].get('shared_vocabulary'), training
  return re.sub(r'\d[\d.e-]*', '', str(parts))


def distinct_combinations() -> list:
  """Returns one (config, preset) of each combination.

  `make test` checks every fourth preset once; test_startup.py checks a few others.
  """
  params = []
  tested = set()
  for pair in {combination(tiny_config(*pair)): pair for pair in PAIRS}.values():
    name, preset = pair
    params.append(
      pytest.param(name, preset, marks=[pytest.mark.product] if preset in tested or len(tested) % 4 else [])
    )
    tested.add(preset)
  return params


@pytest.mark.parametrize(('name', 'preset'), distinct_combinations())
def test_combination_is_valid(name, preset):
  config = parse_config(tiny_config(name, preset))
  SYSTEMS[config.system].check(config)


def test_no_task_changes_the_mechanisms_of_a_preset_and_heads_divide_the_features():
  for name, preset in PAIRS:
    config = full_config(name, preset)
    attention = config['model'].get('attention')
    assert attention is None or attention['features'] % attention['heads'] == 0, (name, preset)
    for path, spec in PRESETS[config['system']][preset].settings.items():
      if path.startswith('model.') and path.split('.')[-1] in MECHANISMS:
        value = functools.reduce(operator.getitem, path.split('.'), config)
        assert value.split('(')[0] == spec.split('(')[0], (name, preset, path)


@pytest.mark.long
def test_the_selecting_metric_is_available():
  for pair in PAIRS:
    config = parse_config(tiny_config(*pair))
    assert config.training.select in SYSTEMS[config.system].selectable_metrics(config), pair


def distinct_presets(system: str) -> list:
  """Returns (config, preset) for all presets that differ in more than sizes, each with one of the configs.

  Presets that differ only in score or alignment, those of the other systems, and eleven of twelve of the rest are for
  `make test-all`: scores, alignments and the other systems have tests of their own.
  """
  names = [name for name, config_system in CONFIGS.items() if config_system == system]
  presets = {}  # tiny config -> the same without its attention, and the preset
  for preset in PRESETS[system]:
    config = tiny_config(REQUIRED_CONFIGS.get(preset, names)[-1], preset)
    attention = config['model'].pop('attention', {})
    without_attention = config['model'], config['training'], config['data'].get('shared_vocabulary')
    presets.setdefault(str((without_attention, attention)), (str(without_attention), preset))
  params = []
  tested = set()
  for i, (without_attention, preset) in enumerate(presets.values()):
    allowed = REQUIRED_CONFIGS.get(preset, names)
    is_covered = system != 'translation' or without_attention in tested
    marks = [pytest.mark.product] if is_covered or i % 12 else []
    params.append(pytest.param(allowed[i % len(allowed)], preset, marks=marks))
    tested.add(without_attention)
  return params


@pytest.mark.parametrize(('name', 'preset'), [param for system in SYSTEMS for param in distinct_presets(system)])
def test_one_update_is_finite_and_has_a_gradient(name, preset, folder):
  config = tiny_config(name, preset)
  system = load_system(config, folder)
  training = Training(**config['training'])
  assert 'train' in system.splits and set(system.splits) & {'validation', 'test'}
  mesh = make_mesh(jax.devices()[:1])
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  step = make_train_step(system.loss, optimizer, schedule, mesh, seed=0)
  # Constant parameters, because random ones take longer to compile.
  params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), jax.eval_shape(lambda: system.initializer()(0)))
  state = replicate(init_state(params, optimizer, training.average, system.loss.running), mesh)
  state, metrics = step(state, system.batches(0)[0])
  assert int(state.step) == 1 and np.isfinite(metrics['loss']) and metrics['grad_norm'] > 0
