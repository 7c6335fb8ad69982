"""Every mistake a user can make on the command line: one clear line, exit code 2, and nothing lost or left behind."""

import os
import shutil

import pytest

from tests.experiments.helpers import read_tree, run, tiny_arguments

CONFIG = '--config=configs/dates.py:bahdanau2015'
SOME = '--workdir=somewhere'

# arguments of train.py -> what the line says, part after part
FLAGS = [
  ([], ['--config is missing', 'configs/dates.py:bahdanau2015']),
  ([CONFIG], ['--workdir is missing']),
  ([CONFIG, '--workdr=x'], ['unknown flag --workdr', 'did you mean --workdir?', 'possible: config, distributed']),
  ([CONFIG, SOME, 'extra'], ["unexpected argument 'extra'"]),
  (['--config=configs/dats.py:x', SOME], ["no config file 'configs/dats.py'", "'configs/dates.py'?", 'multi30k.py']),
  (['--config', 'nowhere/dates.py', SOME], ["no config file 'nowhere/dates.py'", 'possible in nowhere: none']),
  (['--config=configs', SOME], ["no config file 'configs'"]),
  (['--config=', SOME], ["no config file ''"]),
  (['--config=configs/dates.py:bahdanu2015', SOME], ["unknown preset 'bahdanu2015'", "'bahdanau2015'?", 'luong2015']),
  (['--config=configs/dates.py:', SOME], ["unknown preset ''", 'sutskever2014']),
  (['--config.training.steps=3', SOME], ['--config.training.steps=3: write --config=FILE:PRESET before it']),
  (['--config.training.steps=3', CONFIG, SOME], ['write --config=FILE:PRESET before it']),
  ([CONFIG, *['--config.data.buckets=((9, 9),)'] * 2, SOME], ['--config.data.buckets is given twice', 'once']),
]

FIELDS = [
  ('modle.dropout=0', ["unknown field of config: 'modle'", "'model'?", 'evaluation, model, seeds, system, training']),
  ('model.atention.score=dot', ["unknown field of config.model: 'atention'", "'attention'?", 'possible: attention']),
  ('model.attention.scor=dot', ["unknown field of config.model.attention: 'scor'", "'score'?", 'implementation']),
  ('training.steps.x=3', ['config.training.steps is 3000 and has no fields']),
  ('training=3', ['--config.training is a group of fields', 'steps']),
  ('training.steps=ten', ['config.training.steps is a whole number like 3000', "got 'ten'"]),
  ('training.clip=x', ['config.training.clip is a number like 1.0', "got 'x'"]),
  ('data.shared_vocabulary=maybe', ['config.data.shared_vocabulary is true or false like False', "got 'maybe'"]),
  ('data.buckets=(10,10', ['config.data.buckets is a tuple like ((16, 11),', "got '(10,10'"]),
  ('data.buckets=abc', ['buckets are different (source, target) lengths', "got ('abc',)"]),
  ('data.task=datse', ["unknown task 'datse'", "'dates'?", 'text, tfds, tsv']),
  ('data.vocabulary=wrd', ["unknown vocabulary 'wrd'", "'word'?", 'char, subword, unigram']),
  ('data.batch_unit=token', ["unknown batch unit 'token'", 'sentences, tokens']),
  ('model.attention.score=adittive', ["unknown score 'adittive'", "'additive'?", 'scaled_dot']),
  ('model.attention.score=additive(', ["cannot read 'additive('", "'name(option=literal, ...)'"]),
  ('model.attention.alignment=softmax(temp=3)', ["unknown option of alignment 'softmax': 'temp'", "'temperature'?"]),
  ('model.attention.alignment=softmx', ["unknown alignment 'softmx'", "'softmax'?", 'sparsemax']),
  ('model.attention.implementation=fast', ["unknown implementation 'fast'", 'xla']),
  ('model.attention.implementation=chunked', ['computes many queries at once, this decoder asks for one', 'auto, xla']),
  ('model.attention.heads=3', ['features=128 cannot be divided among heads=3']),
  ('model.encoder=birn', ["unknown encoder 'birn'", "'birnn'?"]),
  ('model.encoder=birnn(rnn="gruu")', ["unknown rnn 'gruu'", "'gru'?", 'lstm']),
  ('model.encoder=birnn(layer=2)', ["unknown option of encoder 'birnn': 'layer'", "'layers'?"]),
  ('model.decoder=bahdanu', ["unknown decoder 'bahdanu'", "'bahdanau'?", 'luong']),
  ('model.decoder=luong(features=0)', ["decoder 'luong': features is 0", '1 or more']),
  ('model.output=pointer', ["config.model.output='pointer' needs one vocabulary", 'shared_vocabulary=True']),
  ('model.dtype=float64', ["unknown dtype 'float64'", 'bfloat16, float32']),
  ('model.dropout=1.5', ['dropout is 1.5', 'from 0 to below 1']),
  ('training.optimizer=adan', ["unknown optimizer 'adan'", "'adam'?"]),
  ('training.schedule=cosin(peak=1)', ["unknown schedule 'cosin'", "'cosine'?"]),
  ('training.auxiliary=guide', ["unknown auxiliary loss 'guide'", "'guided'?", 'coverage, diagonal']),
  ('training.auxiliary=diagonal(widht=1)', ["option of auxiliary loss 'diagonal': 'widht'", "'width'?"]),
  ('training.auxiliary=diagonal(width=0)', ['diagonal: width must be greater than 0, got 0']),
  ('training.auxiliary=coverage, guided', ["cannot read 'coverage, guided'", "'name(option=literal, ...) + name"]),
  ('training.auxiliary=reinforce', ['reinforce needs an alignment that draws', 'possible: hard']),
  ('training.objective=r_dorp', ["unknown objective 'r_dorp'", "'r_drop'?", 'likelihood, minimum_risk']),
  ('training.objective=minimum_risk(samples=1)', ['minimum_risk: samples is 1', '2 or more']),
  ('model.encoder=transformer(layer_dropout=1)', ['layer_dropout is 1', 'from 0 to below 1']),
  ('training.anneal=temperature: cosine', ["unknown parameter in training.anneal: 'temperature'", 'possible: gain']),
  ('training.anneal=temperature', ['training.anneal: ']),
  ('training.clip=nan', ['training.clip is nan', '0 or more']),
  ('training.steps=0', ['training.steps is 0', '1 or more']),
  ('training.select=bleu', ["'bleu'", 'exact_match']),
  ('evaluation.metrics=blue', ["unknown metric 'blue'", "'bleu'?", 'chrf']),
  ('evaluation.metrics=("exact_match", "bleu(tokenize=\'x\')")', ["unknown tokenizer of bleu 'x'", '13a']),
  ('evaluation.beams=0', ['evaluation.beams is 0', '1 or more']),
  ('evaluation.beta=-0.1', ['evaluation.beta is -0.1', '0 or more']),
  ('evaluation.gamma=-1', ['evaluation.gamma is -1.0', '0 or more']),
  ('evaluation.gamma=nan', ['evaluation.gamma is nan', '0 or more']),
]

# a table's bytes -> what the line says of it; {path} is its path
TABLES = [
  (b'', ['{path}: the file is empty']),
  (b'a\tb\nc\n', ['{path}:2: 1 column', 'source TAB target']),
  (b'a\tb\t0-0\td\n', ['{path}:1: 4 columns']),
  (b'a\tb\n\xe4\tb\n', ['{path}:2: not UTF-8', '0xe4']),
  (b'a\tb\t0-1\n', ["{path}:1: link '0-1' is out of range"]),
  (b'\n\n', ['{path}: no pairs, all 2 are blank']),
  (b'a b c d e f\tb\n', ['train: 1 of 1 pair fit no bucket', 'line 1 of {path}', 'config.data.buckets']),
]


def assert_user_error(ran, parts):
  assert ran.code == 2, ran
  assert ran.err.startswith('error: ') and ran.err.count('\n') == 1 and 'Traceback' not in ran.err, ran.err
  for part in parts:
    assert part in ran.err, ran.err


@pytest.mark.parametrize(('args', 'parts'), FLAGS)
def test_flags(args, parts):
  assert_user_error(run('train', *args), parts)


@pytest.mark.parametrize(('field', 'parts'), FIELDS)
def test_config_fields(field, parts, tmp_path):
  assert_user_error(run('train', CONFIG, f'--workdir={tmp_path / "run"}', f'--config.{field}'), parts)
  assert not (tmp_path / 'run').exists()


def test_what_a_decoder_without_attention_cannot_be_selected_by(tmp_path):
  fields = ('--config.model.decoder=plain', '--config.training.select=precision')
  ran = run('train', CONFIG, f'--workdir={tmp_path / "run"}', *fields)
  assert_user_error(ran, ["training.select='precision' is of alignments", 'attends to nothing'])


def test_positions_that_buckets_exceed(task, tmp_path):
  encoder = 'transformer(features=4, heads=2, hidden=4, position="learned(max_positions=3)")'
  ran = run('train', *tiny_arguments(task, tmp_path / 'run', f'--config.model.encoder={encoder}'))
  assert_user_error(ran, ["position 'learned': max_positions=3, got a sequence of 5"])
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('content', 'parts'), TABLES)
def test_tables(task, content, parts, tmp_path):
  path = tmp_path / 'table.tsv'
  path.write_bytes(content)
  ran = run('train', *tiny_arguments(task, tmp_path / 'run', f"--config.data.task=tsv(train='{path}')"))
  assert_user_error(ran, [part.format(path=path) for part in parts])
  assert not (tmp_path / 'run').exists()


def test_files_that_cannot_be_read(task, tmp_path):
  def refused(spec, *parts):
    ran = run('train', *tiny_arguments(task, tmp_path / 'run', f'--config.data.task={spec}'))
    assert_user_error(ran, parts)
    assert not (tmp_path / 'run').exists()

  (tmp_path / 'a.en').write_text('a\nb\n')
  (tmp_path / 'a.de').write_text('a\n')
  (tmp_path / 'x.tsv.gz').write_bytes(b'plain')
  refused("tsv(train='tran.tsv')", f'{task}/tran.tsv: no such file', f"did you mean '{task}/train.tsv'?")
  refused(f"tsv(train='{tmp_path}')", f'{tmp_path}: is a directory')
  refused(f"tsv(train='{tmp_path}/x.tsv.gz')", f'{tmp_path}/x.tsv.gz: not a whole gzip file')
  refused(f"text(train='{tmp_path}/a', source='en', target='de')", 'a.en has 2 lines but', 'a.de has 1')
  refused(f"text(train='{tmp_path}/a', source='en', target='fr')", 'a.fr: no such file')
  refused("tsv(trian='train.tsv')", "unknown option of task 'tsv': 'trian'", "'train'?")
  refused("tfds(name='nosuchset/de-en')", "tfds set 'nosuchset/de-en' is not prepared in")


def test_losses_and_schedules_that_need_what_is_not_there(task, tmp_path):
  def refused(fields, *parts):
    ran = run('train', *tiny_arguments(task, tmp_path / 'run', *(f'--config.{field}' for field in fields)))
    assert_user_error(ran, parts)
    assert not (tmp_path / 'run').exists()

  (tmp_path / 'plain.tsv').write_text('eins\tzwei\n' * 8)
  unlinked = f"data.task=tsv(train='{tmp_path}/plain.tsv')"
  refused([unlinked, 'training.auxiliary=guided'], 'links are asked for, but the 8 pairs come without links')
  refused(['model.dropout=0', 'training.objective=r_drop'], 'r_drop: the model drops nothing', 'set model.dropout')
  for vocabulary, cut in (('subword(dropout=0.1)', 'dropout'), ('unigram(sampling=0.2)', 'sampling')):
    fields = [f'data.vocabulary={vocabulary}', 'training.objective=minimum_risk']
    refused(fields, f"'minimum_risk' holds pieces against those of the target, which {cut} cuts", f'without {cut}')
  learned = ['model.attention.alignment=entmax', 'model.attention.score=cosine']
  annealed = "unknown parameter in training.anneal: 'temperature'"
  refused([*learned, 'training.anneal=temperature: cosine'], annealed, 'possible: alpha, beta')
  refused([*learned, 'training.anneal=alpha: cosin'], "unknown schedule 'cosin'", "'cosine'?")


def test_vocabulary_that_does_not_fit_leaves_no_folder(task, tmp_path):
  vocabulary = '--config.data.vocabulary=subword(size=8000)'
  assert_user_error(run('train', *tiny_arguments(task, tmp_path / 'run', vocabulary)), ['subword(size=8000)', '<='])
  assert not (tmp_path / 'run').exists()


def test_folders_that_cannot_be_used(task, trained, tmp_path):
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
  assert_user_error(other, ['model.embedding is 4 there, 6 given', 'training.seed is 0 there, 2 given'])
  assert read_tree(folder) == before


def test_damaged_checkpoint(trained, task, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(trained[0], folder)
  for path in (folder / 'checkpoints' / '4').rglob('*'):
    if path.is_file() and path.stat().st_size:
      path.write_bytes(b'?' * 10)
  before = read_tree(folder)
  parts = [f'cannot read checkpoint {folder}/checkpoints/4', 'possible: move it away to go on from step 2']
  assert_user_error(run('train', *tiny_arguments(task, folder)), parts)
  assert_user_error(run('translate', f'--workdir={folder}', '--checkpoint=latest', stdin=b'eins'), parts[:1])
  assert read_tree(folder) == before


@pytest.mark.parametrize('program', ['evaluate', 'translate', 'inspect_attention'])
def test_no_run(program, tmp_path):
  assert_user_error(run(program), ['--workdir is missing'])
  assert_user_error(run(program, f'--workdir={tmp_path}/no'), [f'{tmp_path}/no holds no config.json'])
  assert_user_error(run(program, f'--workdir={tmp_path}', '--checkpoint=bst'), ['holds no config.json'])
  assert_user_error(run(program, f'--workdr={tmp_path}'), ['unknown flag --workdr', 'possible: ', 'checkpoint'])
  assert os.listdir(tmp_path) == []


def test_run_of_another_version(trained, tmp_path):
  config = (trained[0] / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(config.replace('"seed": 0', '"sed": 0'))
  ran = run('translate', f'--workdir={tmp_path}', stdin=b'eins')
  assert_user_error(ran, [f'{tmp_path}/config.json has training.sed', 'possible: '])


def test_what_a_run_does_not_have(trained, tmp_path):
  folder, _ = trained
  workdir = f'--workdir={folder}'
  there = tmp_path / 'there.txt'
  there.write_text('mine')
  exists = f'{there} exists and is not overwritten'
  splits = ['unknown split', 'possible: test, train, validation']
  assert_user_error(run('evaluate', workdir, '--split=unseen'), splits)
  assert_user_error(run('evaluate', workdir, f'--output={there}'), [exists])
  assert_user_error(run('evaluate', workdir, f'--output={tmp_path}/no/h.txt'), [f"'{tmp_path}/no' is no folder"])
  assert_user_error(run('evaluate', workdir, '--beams=0'), ['--beams=0'])
  assert_user_error(run('inspect_attention', workdir, '--split=unseen'), splits)
  assert_user_error(run('inspect_attention', workdir, f'--output={there}'), [exists])
  for rows in ('5', 'x', '-1', '', '²'):
    parts = [f"row '{rows}' is not in split 'test'", 'possible: 0 to 4']
    assert_user_error(run('inspect_attention', workdir, f'--rows={rows}'), parts)
  assert_user_error(run('inspect_attention', workdir, '--text= '), ['an empty line attends to nothing'])
  assert there.read_text() == 'mine'


def test_lines_that_cannot_be_translated(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  assert_user_error(run('translate', workdir, stdin=b''), ['stdin: the file is empty'])
  assert_user_error(run('translate', workdir, stdin=b'eins\n\xff\n'), ['stdin:2: not UTF-8', '0xff'])
  assert_user_error(run('translate', workdir, f'--input={tmp_path}/no.txt'), [f'{tmp_path}/no.txt: no such file'])
  assert_user_error(run('translate', workdir, '--nbest=3', stdin=b'eins'), ['--nbest=3 is more than --beams=2'])
  assert_user_error(run('translate', workdir, '--top_p=0.5', stdin=b'eins'), ['--top_p=0.5 is an option of --samples'])
  assert_user_error(run('translate', workdir, '--samples=1', '--beams=2', stdin=b'eins'), ['possible: one of them'])
  assert_user_error(
    run('translate', workdir, '--samples=1', '--min_p=2', stdin=b'eins'), ['min_p=2.0; possible: from 0']
  )
