"""A Transformer is exported as MarianMT and imported again; the imported run is a run like any other."""

import dataclasses
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest

from attention_jax.systems.config import default_config, parse_config, read_run_config
from attention_jax.systems.export import write_run
from attention_jax.systems.initial_run import check_initial_run
from attention_jax.systems.runs import open_run
from attention_jax.systems.translation.system import TranslationSystem
from attention_jax.tokens import EOS
from experiments.config_files import load_config
from tests.experiments.helpers import ROOT, run
from tests.experiments.test_bad_input import assert_user_error

PYTHON = ROOT / '.venv/references/bin/python'
LINES = b'eins zwei drei\nvier\n'
STACK = 'transformer(features=8, layers=2, heads=2, hidden=12, bias=True)'
FIELDS = {
  'model.encoder': STACK,
  'model.decoder': STACK,
  'model.output': 'tied',
  'model.embedding': 8,
  'model.share_embeddings': True,
  'model.attention.score': 'scaled_dot',
  'model.attention.features': 8,
  'model.attention.heads': 2,
  'model.attention.bias': True,
  'data.task': "tsv(train='train.tsv', validation='dev.tsv', test='test.tsv')",
  'data.vocabulary': 'subword(size=40)',
  'data.shared_vocabulary': True,
  'data.buckets': ((32, 32),),
  'evaluation.length_penalty': 'power',
  'evaluation.beams': 2,
  'evaluation.max_length': 40,  # generate ends hypotheses of the maximum length without EOS
}


def check(*arguments, stdin=b''):
  result = run(*arguments, stdin=stdin)
  assert result.code == 0, result.err
  return result.out


@pytest.fixture(scope='module')
def folders(task, tmp_path_factory):
  """The folders of a run with random parameters, of its export and of the run imported from it."""
  path = tmp_path_factory.mktemp('marian')
  trained, exported, imported = path / 'trained', path / 'exported', path / 'imported'
  config = default_config()
  config.data.folder = str(task)
  config.update_from_flattened_dict(FIELDS)
  system = TranslationSystem.load(parse_config(config), None)
  random = np.random.default_rng(2)  # with which hypotheses end
  shapes = jax.eval_shape(lambda: system.initializer()(0))
  params = jax.tree.map(lambda x: (1.2 * random.normal(size=x.shape)).astype(x.dtype), shapes)
  params['output']['bias'][EOS] = 0.0
  write_run(system, params, trained)
  printed = check('export', f'--workdir={trained}', f'--output={exported}', '--format=marian')
  assert 'config.json, generation_config.json, model.safetensors, source.spm, target.spm' in printed
  data = [f'--folder={task}', f'--task={FIELDS["data.task"]}']
  assert 'written to' in check('import_model', f'--from={exported}', f'--workdir={imported}', *data)
  return trained, exported, imported


@pytest.mark.long
def test_an_exported_transformer_is_imported_bit_for_bit(folders):
  trained, imported = (open_run(str(folder)) for folder in (folders[0], folders[2]))
  jax.tree.map(np.testing.assert_array_equal, imported.params, trained.params)
  for name in ('encoder', 'decoder', 'output'):
    assert type(getattr(imported.model, name)) is type(getattr(trained.model, name))
  line = 'eins neun drei'
  for one, other in zip(imported.vocabularies, trained.vocabularies, strict=True):
    assert one.encode(line) == other.encode(line)
    assert one.decode(one.encode('eins drei')) == 'eins drei'
  printed = [
    check('translate', f'--workdir={run.folder}', '--nbest=1', '--beams=1', stdin=LINES) for run in (imported, trained)
  ]
  assert printed[0] == printed[1] and printed[0].count('\n') == 2


@pytest.mark.long
def test_programs_read_an_imported_run(folders, tmp_path):
  workdir = f'--workdir={folders[2]}'
  for name, text in (('source', 'eins zwei\n'), ('target', 'zwei eins\n')):
    (tmp_path / name).write_text(text)
  pair = [f'--source={tmp_path}/source', f'--target={tmp_path}/target']
  assert '"log_prob"' in check('score', workdir, *pair)
  assert '-' in check('align', workdir, *pair)
  assert '"bleu' in check('evaluate', workdir, '--split=test', '--json', '--max_length=8')
  check('inspect_attention', workdir, f'--output={tmp_path}/attention.png', '--text=eins zwei')
  check('export', workdir, f'--output={tmp_path}/functions', '--beams=1')
  config = f'--config=configs/from_run.py:{folders[2]}'
  grid = '--grid=model.attention.alignment=softmax,entmax15'
  assert 'entmax15' in check('ablate', config, f'--workdir={tmp_path}/sweep', '--seeds=1', grid, '--dry_run')


@pytest.mark.long
def test_transformers_translates_with_an_exported_model(folders):
  """MarianMT with beams and early_stopping='never' gives the same texts and scores."""
  if not PYTHON.exists():
    pytest.skip(f'needs {PYTHON}: make test-all')
  command = [PYTHON, ROOT / 'tests/references/make_pretrained.py', '--translate', folders[1]]
  lines = LINES.decode().splitlines()
  printed = subprocess.run(command, input=LINES.decode(), text=True, stdout=subprocess.PIPE, check=True).stdout
  expected = [json.loads(line) for line in printed.splitlines()]
  for found, (text, score) in zip(open_run(str(folders[2])).translate(lines), expected, strict=True):
    assert found.text == text
    assert found.score == pytest.approx(score, rel=1e-4)


@pytest.mark.long
def test_from_run_is_the_config_of_a_run_that_starts_from_it(folders):
  config = parse_config(load_config(f'configs/from_run.py:{folders[2]}'))
  assert config == dataclasses.replace(read_run_config(folders[2]), initial_run=str(folders[2]))
  check_initial_run(config)
  TranslationSystem.check(config)


@pytest.mark.long
def test_an_imported_run_is_trained_further(folders, tmp_path):
  arguments = [f'--config=configs/from_run.py:{folders[2]}', f'--workdir={tmp_path}/tuned', '--config.training.steps=2']
  out = check('train', *arguments, '--config.data.batch_size=8', '--config.training.select=loss')
  assert 'parameter arrays from config.initial_run' in out
  expected, tuned = (open_run(str(path)) for path in (folders[2], tmp_path / 'tuned'))
  assert jax.tree.structure(tuned.params) == jax.tree.structure(expected.params)


# file of a pretrained model -> None: removed, bytes: replaced, fields: changed, those of None removed
BROKEN = [
  ('model.safetensors', None, 'model.safetensors: no such file; expected a folder as save_pretrained'),
  ('model.safetensors', b'x', 'model.safetensors: not a safetensors file, or damaged'),
  ('source.spm', None, 'source.spm: '),
  ('vocab.json', None, 'vocab.json: '),
  ('config.json', None, 'config.json: no such file'),
  ('config.json', {'model_type': 'gpt2'}, "unknown model_type of .*config.json: 'gpt2'"),
  ('config.json', {'d_model': None}, 'config.json: d_model is missing'),
  ('config.json', {'d_model': 16}, 'must be .*, got '),
  ('config.json', {'encoder_layers': 3}, 'missing arrays .*encoder.layers.2'),
  ('config.json', {'decoder_layers': 1}, 'arrays that are not of this model .*decoder.layers.1'),
  ('config.json', {'tie_word_embeddings': False}, 'embeddings that .* do not share are not supported'),
  ('config.json', {'vocab_size': 9}, 'vocab_size is 9, but the tokenizer in this folder has ids up to'),
]


@pytest.mark.parametrize(('file', 'change', 'message'), BROKEN)
def test_files_that_are_missing_or_wrong_are_reported_in_one_line(file, change, message, folders, tmp_path):
  path = shutil.copytree(folders[1], tmp_path / 'model') / file
  fields = json.loads(path.read_text()) if isinstance(change, dict) else {}
  path.unlink()
  if isinstance(change, bytes):
    path.write_bytes(change)
  elif change:
    path.write_text(json.dumps({key: value for key, value in (fields | change).items() if value is not None}))
  result = run('import_model', f'--from={tmp_path}/model', f'--workdir={tmp_path}/run')
  assert result.code == 2 and not (tmp_path / 'run').exists()
  assert result.err.count('\n') == 1 and re.search(message, result.err), result.err


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--format=bart'], "unknown format 'bart'; expected one of: functions, marian"),
    (['--format=marian', '--beams=2'], '--beams has no effect with --format=marian'),
  ],
)
def test_wrong_exports_are_reported(flags, message, folders, tmp_path):
  assert_user_error(run('export', f'--workdir={folders[0]}', f'--output={tmp_path}/out', *flags), [message])


@pytest.mark.long
def test_a_run_without_a_transformer_is_not_exported_as_marian(trained, tmp_path):
  result = run('export', f'--workdir={trained[0]}', f'--output={tmp_path}/out', '--format=marian')
  assert_user_error(result, ['expected a run of translation with a Transformer, as MarianMT'])


def test_a_transformer_that_marianmt_cannot_represent_is_reported(folders, tmp_path):
  folder = shutil.copytree(folders[0], tmp_path / 'run')
  config = json.loads((folder / 'config.json').read_text())
  config['model']['encoder'] = config['model']['encoder'].replace('bias=True', "bias=True, position='alibi'")
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'digests.json').unlink()
  result = run('export', f'--workdir={folder}', f'--output={tmp_path}/out', '--format=marian')
  part = "MarianMT cannot represent config.model.encoder.position='alibi'; expected 'sinusoidal'"
  assert_user_error(result, [part])
