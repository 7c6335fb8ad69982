"""The programs on pictures: trained, resumed, measured against boxes, drawn, refused."""

import json

import numpy as np
import pytest
from PIL import Image

from attention_jax.data.builders import shapes
from tests.experiments.helpers import copy_interrupted_run, run

SMALL = {
  'model.encoder': 'grid(features=8, halvings=4)',
  'model.embedding': 8,
  'model.attention.features': 8,
  'model.decoder': 'bahdanau(rnn="gru", features=8, readout=8, gate=True)',
  'data.batch_size': 8,
  'training.steps': 12,
  'training.schedule': 'constant(rate=1e-2)',
  'training.evaluate_every': 6,
  'training.checkpoint_every': 3,
  'evaluation.batch_size': 16,
}
ARGS = ['--config=configs/shapes.py:xu2015_soft', *(f'--config.{name}={value}' for name, value in SMALL.items())]


@pytest.fixture(scope='module', autouse=True)
def few_scenes():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shapes, 'SIZES', {'train': 32, 'validation': 16, 'test': 16, 'unseen': 8})
    yield


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('captioned') / 'run'
  ran = run('train', *ARGS, f'--workdir={folder}')
  assert ran.code == 0, ran.err
  return folder, ran.out


def test_what_is_measured(trained):
  folder, out = trained
  assert 'test: 16 pictures (64 x 64 x 3), 16 captions' in out
  results = json.loads((folder / 'results.json').read_text())['results']
  assert set(results['test']) == {'loss', 'accuracy', 'exact_match', 'bleu', 'entropy', 'pointing', 'pointing_words'}
  boxes = [box for scene in shapes.generate('test') for box in scene.boxes if box]
  assert results['test']['pointing_words']['signature'].endswith(f'words:{len(boxes)}')
  assert results['test']['pointing']['signature'].endswith(f'things:{len(set(boxes))}')
  assert len((folder / 'hypotheses.unseen.txt').read_text().split('\n')) == 9


def test_the_same_command_goes_on_exactly(trained, tmp_path):
  folder = copy_interrupted_run(trained[0], tmp_path / 'run')
  assert 'going on at' in run('train', *ARGS, f'--workdir={folder}').out
  whole, parts = (json.loads((path / 'results.json').read_text()) for path in (trained[0], folder))
  assert whole == parts


def test_new_pictures_are_told(trained, tmp_path):
  workdir, own = f'--workdir={trained[0]}', tmp_path / 'own.png'
  Image.new('RGB', (90, 70), 'red').save(own)
  (said,) = run('predict', workdir, stdin=f'{own}\n'.encode()).out.splitlines()
  found = json.loads(run('predict', workdir, '--json', stdin=f'{own}\n'.encode()).out)
  assert found['caption'] == said and found['input'] == str(own) and found['log_prob'] < 0
  assert np.shape(found['weights']) == (len(found['tokens']), 4, 4)
  assert np.allclose(np.sum(found['weights'], axis=(1, 2)), 1, atol=1e-3)
  ran = run('predict', workdir, stdin=f'{own}\n{tmp_path}/no.png\n'.encode())
  assert ran.code == 2 and ran.err == f'error: stdin:2: {tmp_path}/no.png: no such file\n'


def test_it_is_evaluated_and_drawn(trained, tmp_path):
  folder, _ = trained
  ran = run('evaluate', f'--workdir={folder}', '--split=unseen', '--beams=2', f'--output={tmp_path}/said.txt')
  assert ran.code == 0 and 'pointing' in ran.out
  ran = run('inspect_attention', f'--workdir={folder}', '--rows=0,2')
  assert ran.code == 0, ran.err
  with Image.open(folder / 'attention.png') as picture, Image.open(folder / 'attention.gif') as film:
    assert picture.width > 300 and film.n_frames > 1
  Image.new('RGB', (90, 70), 'red').save(tmp_path / 'own.png')
  ran = run('inspect_attention', f'--workdir={folder}', f'--text={tmp_path}/own.png', f'--output={tmp_path}/out.png')
  assert ran.code == 0 and (tmp_path / 'out.gif').exists()
  ran = run('inspect_attention', f'--workdir={folder}', f'--text={tmp_path}/no.png', f'--output={tmp_path}/new.png')
  assert ran.code == 2 and 'no.png: no such file' in ran.err


def test_hard_attention_is_trained_by_its_own_loss(tmp_path):
  args = [ARGS[0].replace('soft', 'hard'), *ARGS[1:], '--config.training.steps=3', '--config.training.log_every=1']
  ran = run('train', *args, f'--workdir={tmp_path}/run')
  assert ran.code == 0, ran.err
  records = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert any(record.get('train/reinforce') for record in records)


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('model.encoder=birnn', "unknown encoder of pictures 'birnn'"),
    ('model.output=pointer', 'a picture has no words'),
    ('data.buckets=((4, 4),)', 'buckets are lengths of captions'),
    ('model.encoder=precomputed(features=8)', 'reads float32, the pictures are uint8; possible: grid for pictures'),
    ('training.auxiliary=guided', 'guided is of a source of words; possible for pictures: coverage'),
    ('data.task=dates', "unknown task 'dates'"),
    ('training.select=bleu_4', "unknown metric in training.select: 'bleu_4'"),
    ('model.encoder=grid(halvings=-1)', 'halvings is -1'),
    ('data.buckets=(2,)', 'rows fits a bucket'),
    ('evaluation.replace_unknown=True', 'a picture has no words; possible: False'),
    ('model.decoder=plain(features=8)', "training.select='pointing' is of weights, and this decoder"),
  ],
)
def test_mistakes_are_one_line(tmp_path, flag, said):
  pointing = ['--config.training.select=pointing', '--config.training.auxiliary='] * ('plain' in flag)
  ran = run('train', *ARGS, *pointing, f'--config.{flag}', f'--workdir={tmp_path}/run')
  assert ran.code == 2 and said in ran.err and ran.err.count('\n') == 1
  assert not (tmp_path / 'run').exists()
