"""Mistakes in flags, configs, data and run folders: one line, exit code 2, and no file is lost or left behind."""

import os
import shutil

import pytest

from tests.experiments.helpers import ROOT, read_tree, run, tiny_arguments

CONFIG = '--config=configs/dates.py:bahdanau2015_deep_tanh'
WORKDIR = '--workdir=somewhere'

# arguments of train.py -> parts of the message
FLAGS = [
  ([], ['--config is missing', 'configs/dates.py:bahdanau2015_deep_tanh']),
  ([CONFIG], ['--workdir is missing']),
  ([CONFIG, '--workdr=x'], ["'workdr'", 'Did you mean: workdir', 'flags of this program: config, coordinator']),
  ([CONFIG, WORKDIR, '--noconfig.data.shared_vocabulary=false'], ['shared_vocabulary=false does not take an argument']),
  ([CONFIG, WORKDIR, '--flagfile=nowhere/flags'], ['error: Unable to open flagfile', "'nowhere/flags'"]),
  ([CONFIG, WORKDIR, 'extra'], ["unexpected argument 'extra'"]),
  (['--config=configs/dats.py:x', WORKDIR], ["no config file 'configs/dats.py'", "'configs/dates.py'?", 'multi30k.py']),
  (['--config', 'nowhere/dates.py', WORKDIR], ["no config file 'nowhere/dates.py'", 'config files in nowhere: none']),
  (['--config=configs', WORKDIR], ["no config file 'configs'; config files in configs: ", 'multi30k.py']),
  (['--config=configs/dates.py:bahdanu2015', WORKDIR], ["preset 'bahdanu2015'", "'bahdanau2015'?", 'luong2015']),
  (['--config.training.steps=3', CONFIG, WORKDIR], ['write --config=FILE:PRESET before it']),
  ([CONFIG, *['--config.data.buckets=((9, 9),)'] * 2, WORKDIR], ['data.buckets must be set once, got it twice']),
]

# field=value -> parts of the message
FIELDS = [
  ('modle.dropout=0', ["unknown field of config: 'modle'", "'model'?", 'initial_vectors, mesh, model']),
  ('model.attention.scor=dot', ["unknown field of config.model.attention: 'scor'", "'score'?", 'implementation']),
  ('training.steps.x=3', ['config.training.steps is 3000 and has no fields']),
  ('training=3', ['--config.training is a group of fields', 'steps']),
  ('training.steps=ten', ['config.training.steps must be a whole number such as 3000', "got 'ten'"]),
  ('training.clip=x', ['config.training.clip must be a number such as 1.0', "got 'x'"]),
  ('data.shared_vocabulary=maybe', ['config.data.shared_vocabulary must be true or false', "got 'maybe'"]),
  ('data.buckets=(10,10', ['config.data.buckets must be a tuple such as ((16, 11),', "got '(10,10'"]),
  ('training.auxiliary=coverage, guided', ["cannot parse auxiliary losses 'coverage, guided'", "'name(option=lit"]),
  ('model.encoder=transformer(layer_dropout=1)', ['option layer_dropout must be at least 0 and less than 1, got 1']),
  ('training.clip=nan', ['config.training.clip must be finite, got nan']),
  ('training.steps=10000000000', ['config.training.steps must be at most 2147483647, got 10000000000']),
  ('training.on_nonfinite=ignore', ["unknown training.on_nonfinite 'ignore'", 'skip, stop']),
  ('evaluation.max_length=1000000', ['config.evaluation.max_length must be', 'at most 100000, got 1000000']),
  ('evaluation.metrics=("exact_match", "bleu(tokenize=\'x\')")', ["unknown tokenizer of bleu 'x'", '13a']),
  ('evaluation.beams=0', ['config.evaluation.beams must be at least 1 and at most 10000, got 0']),
  ('evaluation.beta=-0.1', ['config.evaluation.beta must be at least 0 and at most 10000, got -0.1']),
  ('evaluation.gamma=-1', ['config.evaluation.gamma must be at least 0 and at most 10000, got -1.0']),
]


# field of a config with the tiny task -> parts of the message; tests/data has every mistake in a file
DATA = [
  ("data.task=tsv(train='{path}')", ['{path}:2: 1 column', 'source TAB target']),
  ("data.task=tsv(train='tran.tsv')", ['/tran.tsv: no such file (did you mean ', "/train.tsv'?)"]),
  ('data.vocabulary=subword(size=8000)', ['subword(size=8000)', '<=']),
]


def assert_user_error(result, parts):
  """Checks that a program failed with exit code 2 and one line, which contains all parts."""
  assert result.code == 2, result
  assert result.err.startswith('error: ') and result.err.count('\n') == 1 and 'Traceback' not in result.err, result.err
  for part in parts:
    assert part in result.err, result.err


@pytest.mark.parametrize(('args', 'parts'), FLAGS, ids=[' '.join(args) or 'no flags' for args, _ in FLAGS])
def test_wrong_flags_are_user_errors(args, parts):
  assert_user_error(run('train', *args), parts)
  assert not (ROOT / 'somewhere').exists()


@pytest.mark.long
@pytest.mark.parametrize(('field', 'parts'), FIELDS)
def test_wrong_config_fields_are_user_errors(field, parts, tmp_path):
  assert_user_error(run('train', CONFIG, f'--workdir={tmp_path / "run"}', f'--config.{field}'), parts)
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
@pytest.mark.parametrize(('field', 'parts'), DATA)
def test_data_that_cannot_be_read_are_user_errors(task, field, parts, tmp_path):
  path = tmp_path / 'table.tsv'
  path.write_bytes(b'a\tb\nc\n')
  fields = ['--config.model.encoder=embedded', f'--config.{field.format(path=path)}']
  result = run('train', *tiny_arguments(task, tmp_path / 'run', *fields))
  assert_user_error(result, [part.format(path=path) for part in parts])
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_unusable_folders_are_user_errors(task, trained):
  folder, _ = trained
  before = read_tree(task), read_tree(folder)
  for arguments, parts in [
    ([task], ['holds files (dev.tsv, test.tsv, train.tsv) but no config.json']),
    ([task / 'train.tsv' / 'run'], ['cannot use', 'Not a directory']),
    ([folder, '--config.model.embedding=6'], ['model.embedding is 4 in its config.json, 6 in']),
  ]:
    assert_user_error(run('train', *tiny_arguments(task, *arguments)), parts)
  assert (read_tree(task), read_tree(folder)) == before


@pytest.mark.long
def test_damaged_checkpoints_are_user_errors(trained, task, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(trained[0], folder)
  for path in (folder / 'checkpoints').rglob('*'):
    if path.is_file() and path.stat().st_size:
      path.write_bytes(b'?' * 10)
  before = read_tree(folder)
  parts = [f'checkpoint {folder}/checkpoints/4 cannot be read', 'others can be read by --checkpoint: best, 2']
  assert_user_error(run('translate', f'--workdir={folder}', '--checkpoint=latest', stdin=b'eins'), parts)
  assert read_tree(folder) == before
  result = run('train', *tiny_arguments(task, folder))
  assert result.code == 2 and f'checkpoint {folder}/checkpoints/2 cannot be read' in result.err
  assert f'moved to {folder}/damaged-4-1; resuming from step 2' in result.out


@pytest.mark.parametrize('program', ['evaluate', 'translate', 'inspect_attention'])
def test_folders_without_a_run_are_user_errors(program, tmp_path):
  assert_user_error(run(program), ['--workdir is missing'])
  assert_user_error(run(program, f'--workdir={tmp_path}', '--checkpoint=bst'), [f'{tmp_path} holds no config.json'])
  assert_user_error(run(program, f'--workdr={tmp_path}'), ["'workdr'", 'Did you mean: workdir', 'checkpoint'])
  assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_splits_rows_and_outputs_that_do_not_fit_a_run_are_user_errors(trained, tmp_path):
  existing = tmp_path / 'existing.txt'
  existing.write_text('text')
  for program, flag, part in [
    ('evaluate', '--split=unseen', "unknown split 'unseen'; expected one of: test, train, validation"),
    ('evaluate', f'--output={existing}', f'{existing} exists; choose another --output'),
    ('evaluate', f'--output={tmp_path}/no/h.txt', f"'{tmp_path}/no' is not a writable folder"),
    ('evaluate', '--beams=0', '--beams=0'),
    ('inspect_attention', '--split=unseen', "unknown split 'unseen'"),
    ('inspect_attention', f'--output={existing}', f'{existing} exists; choose another --output'),
    ('inspect_attention', '--rows=5', "row '5' is not in split 'test'; expected 0 to 4"),
    ('inspect_attention', '--text= ', 'an empty line has no attention weights'),
    ('inspect_attention', '--text=a \udcff', r"--text: not UTF-8: 'a \udcff'"),
  ]:
    assert_user_error(run(program, f'--workdir={trained[0]}', flag), [part])
  assert existing.read_text() == 'text'


def test_mistakes_in_input_and_options_of_translate_are_user_errors(trained, tmp_path):
  for stdin, flags, parts in [
    (b'', [], ['stdin: the file is empty']),
    (b'eins\n\xff\n', [], ['stdin:2: not UTF-8', '0xff']),
    (b'', [f'--input={tmp_path}/no.txt'], [f'{tmp_path}/no.txt: no such file']),
    (b'', ['--max_length=100000000'], ['--max_length=100000000', '100000']),
    (b'eins', ['--nbest=3'], ['--nbest must be at most --beams=2, got 3']),
    (b'eins', ['--top_p=0.5'], ['--top_p=0.5 is an option of --samples']),
    (b'eins', ['--samples=1', '--beams=2'], ['cannot be combined with --beams=2']),
    (b'eins', ['--samples=1', '--min_p=2'], ['min_p must be', 'got 2.0']),
  ]:
    assert_user_error(run('translate', f'--workdir={trained[0]}', *flags, stdin=stdin), parts)
