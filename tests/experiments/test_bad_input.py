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
  ([CONFIG, WORKDIR, '--nodistributed=false'], ['--nodistributed=false does not take an argument']),
  ([CONFIG, WORKDIR, '--noconfig.data.shared_vocabulary=false'], ['shared_vocabulary=false does not take an argument']),
  ([CONFIG, WORKDIR, '--flagfile=nowhere/flags'], ['error: Unable to open flagfile', "'nowhere/flags'"]),
  ([CONFIG, WORKDIR, 'extra'], ["unexpected argument 'extra'"]),
  (['--config=configs/dats.py:x', WORKDIR], ["no config file 'configs/dats.py'", "'configs/dates.py'?", 'multi30k.py']),
  (['--config', 'nowhere/dates.py', WORKDIR], ["no config file 'nowhere/dates.py'", 'config files in nowhere: none']),
  (['--config=configs', WORKDIR], ["no config file 'configs'; config files in configs: ", 'multi30k.py']),
  (['--config=', WORKDIR], ["no config file ''"]),
  (
    ['--config=configs/dates.py:bahdanu2015', WORKDIR],
    ["unknown preset 'bahdanu2015'", "'bahdanau2015'?", 'luong2015'],
  ),
  (['--config=configs/dates.py:', WORKDIR], ["unknown preset ''", 'sutskever2014']),
  (['--config.training.steps=3', WORKDIR], ['--config.training.steps=3: write --config=FILE:PRESET before it']),
  (['--config.training.steps=3', CONFIG, WORKDIR], ['write --config=FILE:PRESET before it']),
  (
    [CONFIG, *['--config.data.buckets=((9, 9),)'] * 2, WORKDIR],
    ['--config.data.buckets must be set once, got it twice'],
  ),
]

# field=value -> parts of the message
FIELDS = [
  (
    'modle.dropout=0',
    ["unknown field of config: 'modle'", "'model'?", 'initial_run, initial_state, initial_vectors, mesh, model'],
  ),
  (
    'model.atention.score=dot',
    ["unknown field of config.model: 'atention'", "'attention'?", 'expected one of: attention'],
  ),
  ('model.attention.scor=dot', ["unknown field of config.model.attention: 'scor'", "'score'?", 'implementation']),
  ('training.steps.x=3', ['config.training.steps is 3000 and has no fields']),
  ('training=3', ['--config.training is a group of fields', 'steps']),
  ('training.steps=ten', ['config.training.steps must be a whole number such as 3000', "got 'ten'"]),
  ('training.clip=x', ['config.training.clip must be a number such as 1.0', "got 'x'"]),
  ('data.shared_vocabulary=maybe', ['config.data.shared_vocabulary must be true or false', "got 'maybe'"]),
  ('data.buckets=(10,10', ['config.data.buckets must be a tuple such as ((16, 11),', "got '(10,10'"]),
  ('data.buckets=abc', ['distinct pairs of a source and a target length', "got ('abc',)"]),
  ('data.task=datse', ["unknown task 'datse'", "'dates'?", 'text, tfds, tsv']),
  ('data.vocabulary=wrd', ["unknown vocabulary 'wrd'", "'word'?", 'char, sentencepiece, subword']),
  ('evaluation.beams=2000000000', ['config.evaluation.beams must be at least 1 and at most 10000', 'got 2000000000']),
  ('data.batch_unit=token', ["unknown batch unit 'token'", 'sentences, tokens']),
  ('model.attention.score=adittive', ["unknown score 'adittive'", "'additive'?", 'scaled_dot']),
  ('model.attention.alignment=softmax(temp=3)', ["unknown option of alignment 'softmax': 'temp'", "'temperature'?"]),
  ('model.attention.implementation=fast', ["unknown implementation 'fast'", 'xla']),
  (
    'model.attention.implementation=chunked',
    ['computes all queries at once, but this decoder has one query at a time', 'auto, xla'],
  ),
  ('model.encoder=birn', ["unknown encoder 'birn'", "'birnn'?"]),
  ('model.decoder=bahdanu', ["unknown decoder 'bahdanu'", "'bahdanau'?", 'luong']),
  ('model.output=pointer', ["config.model.output='pointer' needs one vocabulary", 'shared_vocabulary=True']),
  ('model.dtype=float64', ["unknown dtype 'float64'", 'bfloat16, float32']),
  ('model.dropout=1.5', ['config.model.dropout must be at least 0 and less than 1, got 1.5']),
  ('training.optimizer=adan', ["unknown optimizer 'adan'", "'adam'?"]),
  ('training.schedule=cosin(peak=1)', ["unknown schedule 'cosin'", "'cosine'?"]),
  ('training.auxiliary=guide', ["unknown auxiliary loss 'guide'", "'guided'?", 'coverage, diagonal']),
  (
    'training.auxiliary=coverage, guided',
    ["cannot parse auxiliary losses 'coverage, guided'", "'name(option=literal, ...) + name"],
  ),
  ('training.objective=r_dorp', ["unknown objective 'r_dorp'", "'r_drop'?", 'likelihood, minimum_risk']),
  ('model.encoder=transformer(layer_dropout=1)', ['option layer_dropout must be at least 0 and less than 1, got 1']),
  (
    'training.anneal=temperature: cosine',
    ['training.anneal: this model has no scalar parameter', 'alignments with one: normed_additive'],
  ),
  ('training.clip=nan', ['config.training.clip must be finite, got nan']),
  ('training.steps=0', ['config.training.steps must be at least 1, got 0']),
  ('training.steps=10000000000', ['config.training.steps must be at most 2147483647, got 10000000000']),
  ('training.on_nonfinite=ignore', ["unknown training.on_nonfinite 'ignore'", 'skip, stop']),
  ('seeds=1001', ['config.seeds must be at least 1 and at most 1000, got 1001']),
  ('evaluation.max_length=1000000', ['config.evaluation.max_length must be', 'at most 100000, got 1000000']),
  ('training.select=bleu', ["'bleu'", 'exact_match']),
  ('evaluation.metrics=blue', ["unknown metric 'blue'", "'bleu'?", 'chrf']),
  ('evaluation.metrics=("exact_match", "bleu(tokenize=\'x\')")', ["unknown tokenizer of bleu 'x'", '13a']),
  ('evaluation.beams=0', ['config.evaluation.beams must be at least 1 and at most 10000, got 0']),
  ('evaluation.beta=-0.1', ['config.evaluation.beta must be at least 0 and at most 10000, got -0.1']),
  ('evaluation.gamma=-1', ['config.evaluation.gamma must be at least 0 and at most 10000, got -1.0']),
  ('evaluation.gamma=nan', ['config.evaluation.gamma must be finite, got nan']),
]

# bytes of a table -> parts of the message; {path} is the path of the table
TABLES = [
  (b'', ['{path}: the file is empty']),
  (b'a\tb\nc\n', ['{path}:2: 1 column', 'source TAB target']),
  (b'a\tb\t0-0\td\n', ['{path}:1: 4 columns']),
  (b'a\tb\n\xe4\tb\n', ['{path}:2: not UTF-8', '0xe4']),
  (b'a\tb\t0-1\n', ["{path}:1: link '0-1' is out of range"]),
  (b'\n\n', ['{path}: no pairs, all 2 are blank']),
  (b'a b c d e f\tb\n', ['train: 1 of 1 pair fit no bucket', 'line 1 of {path}', 'config.data.buckets']),
]


EMBEDDED = '--config.model.encoder=embedded'  # is checked faster


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
def test_a_decoder_without_attention_cannot_be_selected_by_alignments(tmp_path):
  fields = ('--config.model.decoder=plain', '--config.training.select=precision')
  result = run('train', CONFIG, f'--workdir={tmp_path / "run"}', *fields)
  assert_user_error(result, ["training.select='precision' measures alignments", 'has no attention'])


@pytest.mark.long
def test_buckets_longer_than_the_positions_are_user_errors(task, tmp_path):
  encoder = 'transformer(features=4, heads=2, hidden=4, position="learned(max_positions=3)")'
  result = run('train', *tiny_arguments(task, tmp_path / 'run', f'--config.model.encoder={encoder}'))
  assert_user_error(result, ["position 'learned': sequences must have at most max_positions=3 positions, got 5"])
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
@pytest.mark.parametrize(('content', 'parts'), TABLES)
def test_wrong_tables_are_user_errors(task, content, parts, tmp_path):
  path = tmp_path / 'table.tsv'
  path.write_bytes(content)
  result = run('train', *tiny_arguments(task, tmp_path / 'run', EMBEDDED, f"--config.data.task=tsv(train='{path}')"))
  assert_user_error(result, [part.format(path=path) for part in parts])
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_tasks_that_cannot_be_read_are_user_errors(task, tmp_path):
  def assert_task_error(spec, *parts):
    result = run('train', *tiny_arguments(task, tmp_path / 'run', EMBEDDED, f'--config.data.task={spec}'))
    assert_user_error(result, parts)
    assert not (tmp_path / 'run').exists()

  (tmp_path / 'a.en').write_text('a\nb\n')
  (tmp_path / 'a.de').write_text('a\n')
  (tmp_path / 'x.tsv.gz').write_bytes(b'plain')
  assert_task_error("tsv(train='tran.tsv')", f'{task}/tran.tsv: no such file', f"did you mean '{task}/train.tsv'?")
  assert_task_error(f"tsv(train='{tmp_path}')", f'{tmp_path}: is a directory')
  assert_task_error(f"tsv(train='{tmp_path}/x.tsv.gz')", f'{tmp_path}/x.tsv.gz: not a whole gzip file')
  assert_task_error(f"text(train='{tmp_path}/a', source='en', target='de')", 'a.en has 2 lines but', 'a.de has 1')
  assert_task_error(f"text(train='{tmp_path}/a', source='en', target='fr')", 'a.fr: no such file')
  assert_task_error("tsv(trian='train.tsv')", "unknown option of task 'tsv': 'trian'", "'train'?")
  assert_task_error("tfds(name='../../x')", "tfds set '../../x' must be a name such as 'wmt14_translate/de-en'")
  assert_task_error("tsv(train='/dev/zero')", '/dev/zero: is a pipe or a device, expected a file')
  assert_task_error("tfds(name='nosuchset/de-en')", "tfds set 'nosuchset/de-en' is not prepared in")


@pytest.mark.long
def test_losses_and_schedules_whose_requirements_are_not_met_are_user_errors(task, tmp_path):
  def assert_fields_error(fields, *parts):
    result = run('train', *tiny_arguments(task, tmp_path / 'run', EMBEDDED, *(f'--config.{field}' for field in fields)))
    assert_user_error(result, parts)
    assert not (tmp_path / 'run').exists()

  (tmp_path / 'plain.tsv').write_text('eins\tzwei\n' * 8)
  unlinked = f"data.task=tsv(train='{tmp_path}/plain.tsv')"
  assert_fields_error([unlinked, 'training.auxiliary=guided'], 'links are required, but the 8 pairs have no links')
  assert_fields_error(
    ['model.dropout=0', 'training.objective=r_drop'], 'r_drop needs a model with dropout', 'set model.dropout'
  )
  learned = ['model.attention.alignment=entmax', 'model.attention.score=cosine']
  unknown_parameter = "unknown parameter in training.anneal: 'temperature'"
  assert_fields_error(
    [*learned, 'training.anneal=temperature: cosine'], unknown_parameter, 'expected one of: alpha, beta'
  )
  assert_fields_error([*learned, 'training.anneal=alpha: cosin'], "unknown schedule 'cosin'", "'cosine'?")
  assert_fields_error(['data.vocabulary=subword(size=8000)'], 'subword(size=8000)', '<=')


@pytest.mark.long
def test_unusable_folders_are_user_errors(task, trained, tmp_path):
  before = read_tree(task)
  assert_user_error(
    run('train', *tiny_arguments(task, task)), ['holds files (dev.tsv, test.tsv, train.tsv) but no config.json']
  )
  assert_user_error(run('train', *tiny_arguments(task, task / 'train.tsv')), ['train.tsv as the folder of a run'])
  assert_user_error(run('train', *tiny_arguments(task, task / 'train.tsv' / 'run')), ['cannot use', 'Not a directory'])
  assert read_tree(task) == before
  folder, _ = trained
  before = read_tree(folder)
  other = run('train', *tiny_arguments(task, folder, '--config.model.embedding=6', '--config.training.seed=2'))
  assert_user_error(
    other, ['model.embedding is 4 in its config.json, 6 in', 'training.seed is 0 in its config.json, 2 in']
  )
  assert read_tree(folder) == before


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
  assert_user_error(run(program, f'--workdir={tmp_path}/no'), [f'{tmp_path}/no holds no config.json'])
  assert_user_error(run(program, f'--workdir={tmp_path}', '--checkpoint=bst'), ['holds no config.json'])
  assert_user_error(run(program, f'--workdr={tmp_path}'), ["'workdr'", 'Did you mean: workdir', 'checkpoint'])
  assert os.listdir(tmp_path) == []


def test_a_run_with_unknown_fields_is_a_user_error(trained, tmp_path):
  config = (trained[0] / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(config.replace('"seed": 0', '"sed": 0'))
  result = run('translate', f'--workdir={tmp_path}', stdin=b'eins')
  assert_user_error(result, [f'{tmp_path}/config.json', 'training.sed', 'default_config()'])


@pytest.mark.long
def test_splits_rows_and_outputs_that_do_not_fit_a_run_are_user_errors(trained, tmp_path):
  folder, _ = trained
  workdir = f'--workdir={folder}'
  existing = tmp_path / 'existing.txt'
  existing.write_text('text')
  exists = f'{existing} exists; choose another --output'
  splits = ['unknown split', 'expected one of: test, train, validation']
  assert_user_error(run('evaluate', workdir, '--split=unseen'), splits)
  assert_user_error(run('evaluate', workdir, f'--output={existing}'), [exists])
  assert_user_error(
    run('evaluate', workdir, f'--output={tmp_path}/no/h.txt'), [f"'{tmp_path}/no' is not a writable folder"]
  )
  assert_user_error(run('evaluate', workdir, '--beams=0'), ['--beams=0'])
  assert_user_error(run('inspect_attention', workdir, '--split=unseen'), splits)
  assert_user_error(run('inspect_attention', workdir, f'--output={existing}'), [exists])
  for rows, expected in (('5', '0 to 4'), ('', 'from 0'), ('x', 'from 0'), ('-1', 'from 0'), ('²', 'from 0')):
    parts = [f"row '{rows}' is not in split 'test'", expected]
    assert_user_error(run('inspect_attention', workdir, f'--rows={rows}'), parts)
  assert_user_error(run('inspect_attention', workdir, '--text= '), ['an empty line has no attention weights'])
  assert_user_error(run('inspect_attention', workdir, '--text=a \udcff'), [r"--text: not UTF-8: 'a \udcff'"])
  assert existing.read_text() == 'text'


def test_mistakes_in_input_and_options_of_translate_are_user_errors(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  assert_user_error(run('translate', workdir, stdin=b''), ['stdin: the file is empty'])
  assert_user_error(run('translate', workdir, '--max_length=100000000'), ['--max_length=100000000', '100000'])
  assert_user_error(run('translate', workdir, stdin=b'eins\n\xff\n'), ['stdin:2: not UTF-8', '0xff'])
  assert_user_error(run('translate', workdir, f'--input={tmp_path}/no.txt'), [f'{tmp_path}/no.txt: no such file'])
  assert_user_error(run('translate', workdir, '--nbest=3', stdin=b'eins'), ['--nbest must be at most --beams=2, got 3'])
  assert_user_error(run('translate', workdir, '--top_p=0.5', stdin=b'eins'), ['--top_p=0.5 is an option of --samples'])
  assert_user_error(
    run('translate', workdir, '--samples=1', '--beams=2', stdin=b'eins'), ['cannot be combined with --beams=2']
  )
  assert_user_error(run('translate', workdir, '--samples=1', '--min_p=2', stdin=b'eins'), ['min_p must be', 'got 2.0'])
