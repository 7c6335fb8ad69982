"""The programs on pictures: training, evaluation against boxes, plots, mistakes."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from attention_jax.data.vocab import char
from attention_jax.decoding.predictor import Hypothesis
from attention_jax.systems.captioning import shapes
from attention_jax.systems.captioning.data import Pictures
from attention_jax.systems.captioning.overlays import overlay_rows
from attention_jax.training.digests import FILE_DIGESTS
from attention_jax.training.folder import read_config
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error

SMALL = {
  'model.encoder': 'grid(features=8, halvings=4)',
  'model.embedding': 8,
  'model.attention.features': 8,
  'model.decoder': 'bahdanau(rnn="gru", features=8, readout=8, gate=True)',
  'data.batch_size': 8,
  'training.steps': 4,
  'training.schedule': 'constant(rate=1e-2)',
  'training.evaluate_every': 2,
  'training.checkpoint_every': 2,
  'evaluation.batch_size': 16,
}
ARGS = ['--config=configs/shapes.py:xu2015_soft', *(f'--config.{name}={value}' for name, value in SMALL.items())]


@pytest.fixture(scope='module', autouse=True)
def few_scenes():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shapes, 'SIZES', {'train': 32, 'validation': 16, 'test': 16, 'unseen': 16})
    yield


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('captioned') / 'run'
  result = run('train', *ARGS, f'--workdir={folder}')
  assert result.code == 0, result.err
  return folder, result.out


def test_a_run_writes_results_and_hypotheses(trained):
  folder, out = trained
  assert 'test: 16 pictures (64 x 64 x 3), 16 captions' in out
  record = json.loads((folder / 'results.json').read_text())
  assert record['implementation'] == 'auto (xla, one query at a time)'
  results = record['results']
  assert set(results['test']) == {'loss', 'accuracy', 'exact_match', 'bleu', 'entropy', 'pointing', 'pointing_words'}
  boxes = [box for scene in shapes.generate('test') for box in scene.boxes if box]
  assert results['test']['pointing_words']['signature'].endswith(f'tokens:{len(boxes)}')
  assert results['test']['pointing']['signature'].endswith(f'phrases:{len(set(boxes))}')
  assert len((folder / 'hypotheses.unseen.txt').read_text().split('\n')) == 17


def test_new_pictures_get_captions(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  picture = tmp_path / 'picture.png'
  Image.new('RGB', (90, 70), 'red').save(picture)
  (caption,) = run('predict', workdir, stdin=f'{picture}\n'.encode()).out.splitlines()
  record = json.loads(run('predict', workdir, '--json', stdin=f'{picture}\n'.encode()).out)
  assert record['caption'] == caption and record['input'] == str(picture) and record['log_prob'] < 0
  assert np.shape(record['weights']) == (len(record['tokens']), 4, 4)
  assert np.allclose(np.sum(record['weights'], axis=(1, 2)), 1, atol=1e-3)
  result = run('predict', workdir, stdin=f'{picture}\n{tmp_path}/no.png\n'.encode())
  assert_user_error(result, [f'error: stdin:2: {tmp_path}/no.png: no such file\n'])


def test_splits_are_evaluated_and_drawn(trained, tmp_path):
  folder, _ = trained
  result = run('evaluate', f'--workdir={folder}', '--split=unseen', '--beams=1', f'--output={tmp_path}/hypotheses.txt')
  assert result.code == 0 and 'pointing' in result.out
  result = run('inspect_attention', f'--workdir={folder}', '--rows=2')
  assert result.code == 0, result.err
  with Image.open(folder / 'attention.png') as plot, Image.open(folder / 'attention.gif') as animation:
    assert plot.width > 300 and animation.n_frames > 1


def test_options_that_need_source_words_are_errors(trained):
  workdir = f'--workdir={trained[0]}'
  for flag, part in [
    ('--by=source_length', "system 'captioning'; expected one of: translation\n"),
    ('--by=rarest_word', "system 'captioning'; expected one of: translation\n"),
    ('--replace_unknown', 'for pictures, which have no source words'),
  ]:
    assert_user_error(run('evaluate', workdir, flag), [part])
  result = run('evaluate', workdir, '--beams=1', '--by=target_length', '--bins=1')
  assert result.code == 0 and 'target_length' in result.out


@pytest.mark.long
def test_metrics_by_a_property_need_metrics(trained, tmp_path):
  folder = shutil.copytree(trained[0], tmp_path / 'run')
  config = read_config(folder)
  config['evaluation']['metrics'] = []
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / FILE_DIGESTS).unlink()  # otherwise the changed config is an error
  result = run('evaluate', f'--workdir={folder}', '--by=target_length', f'--plot={tmp_path / "bins.png"}')
  assert_user_error(result, ['config.evaluation.metrics of the run is empty; set --metrics'])


@pytest.mark.long
def test_new_pictures_are_drawn_and_rows_are_written_as_a_page(trained, tmp_path):
  command = ['inspect_attention', f'--workdir={trained[0]}']
  Image.new('RGB', (90, 70), 'red').save(tmp_path / 'picture.png')
  result = run(*command, f'--text={tmp_path}/picture.png', f'--output={tmp_path}/out.png')
  assert result.code == 0 and (tmp_path / 'out.gif').exists()
  page = tmp_path / 'page.html'
  result = run(*command, '--rows=0,2', f'--output={page}')
  assert result.code == 0 and result.out == f'written to {page}\n' and page.stat().st_size > 10_000, result.err
  result = run(*command, f'--text={tmp_path}/no.png', f'--output={tmp_path}/new.png')
  assert_user_error(result, ['no.png: no such file'])


@pytest.mark.parametrize('caption', ['a dog', 'a cat'])
def test_characters_have_the_gold_boxes_of_their_words(caption):
  box = (1, 2, 3, 4)
  scene = Pictures(np.zeros((1, 8, 8, 3), np.uint8), ['test 0'], ['a dog'], [0], [[None, box]])
  hypothesis = Hypothesis(caption, list(caption), 0.0, 0.0, np.full((len(caption) + 1, 4), 0.25))
  cell_centres = (np.array([0.25, 0.75]),) * 2
  (overlay,) = overlay_rows(scene, [0], [hypothesis], cell_centres, char(['a dog']))
  assert overlay.boxes == ([None, None, box, box, box] if caption == 'a dog' else None)
  assert overlay.gold == [box] and overlay.maps.shape == (5, 2, 2)


@pytest.mark.parametrize('splits', [pytest.param(('train',), marks=pytest.mark.long), ('train', 'validation')])
def test_a_selection_by_boxes_needs_boxes_in_the_validation_split_if_there_is_one(splits, tmp_path):
  for split in splits:
    Image.new('RGB', (64, 64), 'red').save(tmp_path / f'{split}.png')
  rows = ['image,caption,split', *(f'{split}.png,red,{split}' for split in splits)]
  (tmp_path / 'captions.csv').write_text('\n'.join(rows))
  data = ["--config.data.task=captions(images='.')", f'--config.data.folder={tmp_path}', '--config.training.steps=1']
  result = run('train', *ARGS, *data, '--config.training.select=pointing', f'--workdir={tmp_path}/run')
  if 'validation' in splits:
    part = "training.select='pointing' needs gold boxes: expected a validation split with boxes"
    assert_user_error(result, [part])
  else:
    assert result.code == 0 and 'no validation split: training.select' in result.out, result.err


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (['model.output=pointer'], 'pictures have no source words'),
    (['model.encoder=precomputed(features=8)'], 'reads float32, the pictures are uint8; expected grid for pictures'),
    (['training.auxiliary=guided'], "'guided' needs a text as source; for pictures, expected one of: coverage"),
    (['data.task=dates'], "unknown task 'dates'"),
    (['training.select=bleu_4'], "unknown metric in training.select: 'bleu_4'"),
    (['model.encoder=grid(halvings=-1)'], 'option halvings must be at least'),
    (['evaluation.replace_unknown=True'], 'evaluation.replace_unknown must be False for pictures'),
    (
      ['training.select=pointing', 'training.auxiliary=', 'model.decoder=plain(features=8)'],
      "training.select='pointing' measures weights: expected a decoder with attention",
    ),
  ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, fields, message):
  result = run('train', *ARGS, *(f'--config.{field}' for field in fields), f'--workdir={tmp_path}/run')
  assert_user_error(result, [message])
  assert not (tmp_path / 'run').exists()
