"""Every config with every preset builds its model; one shrunken step of each config runs."""

import functools
import gzip
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import ROOT, WORDS, write_task

from attention_jax.data import tasks
from attention_jax.data.batching import Batches
from attention_jax.data.builders import dates, records
from attention_jax.models.seq2seq import build
from attention_jax.training.loop import Training
from attention_jax.training.losses import sequence_loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.presets import PRESETS
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step
from attention_jax.training.translation import Translation, initial_params
from experiments.launch import load_config

CONFIGS = sorted(path.stem for path in (ROOT / 'configs').glob('[a-z]*.py'))


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
  return folder


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
  columns = {'source': ['5 March 1999'] * 8, 'target': ['1999-03-05'] * 8, 'links': ['8-0 9-1'] * 8}
  monkeypatch.setattr(dates, 'load', lambda split, folder: columns)
  monkeypatch.setattr(records, 'SIZES', dict.fromkeys(records.SIZES, 64))


def data(config, folder: Path):
  """The data of a config, with few subwords; they hardly depend on the preset."""
  source = config['data'] | {'folder': str(folder)}
  source['vocabulary'] = re.sub(r'size=\d+', 'size=40', source['vocabulary'])
  if source['task'].startswith('tfds'):  # which has tests of its own
    source['task'] = "text(train='train', test='test', source='en', target='de')"
  return loaded(tuple(source.items()))


@functools.cache
def loaded(source):
  return tasks.load(dict(source), None)


def shrunken(name: str, preset: str):
  """A config with every size of its model at 4, and few rows in a batch."""
  config = load_config(f'{ROOT}/configs/{name}.py:{preset}').lock()
  model = config.model
  small = lambda spec: re.sub(r'(layers|heads)=\d+', r'\1=2', re.sub(r'(features|readout|hidden)=\d+', r'\1=4', spec))
  model.encoder, model.decoder = small(model.encoder), small(model.decoder)
  model.embedding = model.attention.features = 4
  config.data.batch_size = {'sentences': 8, 'tokens': 256}[config.data.batch_unit]
  model.attention.heads = min(2, model.attention.heads)
  return config.to_dict()


def one_step(config, data, devices):
  """The state and the metrics after one update of parameters that are cheap to make: all 0.1."""
  training, mesh = Training(**config['training']), make_mesh(devices)
  model = build(config['model'], len(data.source_vocab), len(data.target_vocab))
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  loss = sequence_loss(model, training.label_smoothing, training.auxiliary)
  step = make_train_step(loss, optimizer, schedule, mesh, seed=0)
  params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), jax.eval_shape(lambda: initial_params(model, 0)))
  source = config['data']
  batches = Batches(data.encoded['train'], source['buckets'], source['batch_size'], source['batch_unit'], seed=0)
  return step(replicate(init_state(params, optimizer, training.average, loss.running), mesh), batches[0])


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('name', CONFIGS)
def test_builds(name, preset, folder):
  config = shrunken(name, preset)
  found = data(config, folder)
  assert config['training']['select'] in Translation.selectable(config)
  assert 'train' in found.corpora and set(found.corpora) & {'validation', 'test'}
  model = build(config['model'], len(found.source_vocab), len(found.target_vocab))
  ids = jax.ShapeDtypeStruct((8, 5), np.int32)
  outputs, _ = jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x, x == 0, x), ids)
  words = len(found.target_vocab) + 5 * model.output.copies
  assert outputs.logits.shape == (8, 5, words) and outputs.weights.shape == (8, 5, 5)


def different():
  """(config, preset) of all presets that are not another one in another size."""
  kinds = {}
  for preset in PRESETS:
    config = shrunken('dates', preset)
    kinds.setdefault(str((config['model'], config['training'], config['data']['shared_vocabulary'])), preset)
  return [(CONFIGS[i % len(CONFIGS)], preset) for i, preset in enumerate(kinds.values())]


@pytest.mark.parametrize(('name', 'preset'), different())
def test_one_step(name, preset, folder):
  config = shrunken(name, preset)
  state, metrics = one_step(config, data(config, folder), jax.devices()[:1])
  assert int(state.step) == 1 and np.isfinite(metrics['loss']) and metrics['grad_norm'] > 0
