"""The parts of the benchmark: turns, limits, report. No test asserts a speed."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.systems.config import parse_config
from attention_jax.systems.costs import count_matmuls
from lab.benchmarks import agreement, decoding, kernels, limits, memory, prepared, report, seeds, systems
from lab.benchmarks.joey import Joey
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare, compile_sides, fit_exponent, jit_side
from tests.lab.helpers import run
from tests.modules.helpers import variables


def test_sides_are_run_in_turns_and_compared_with_the_first():
  order = []
  sides = {name: Side(lambda name=name: order.append(name)) for name in 'ab'}
  first, second = compare('suite', 'case', sides, repeats=3, amount=5, unit='things')
  assert order == list('ab') + list('aabb') * 3
  assert first.speed == 1 and second.speed == first.median / second.median
  assert second.low <= second.median <= second.high and second.rate == 5 / second.median


def test_a_case_of_which_every_side_fails_has_no_timings(monkeypatch):
  failures = []
  monkeypatch.setattr(seeds, 'SIDES', {'a': lambda *_: 1 / 0, 'b': lambda *_: 1 / 0})
  bench = BenchmarkContext(print, 2, report_failure=lambda name, error: failures.append(name))
  assert seeds.side_by_side(bench) == []
  assert failures == [f'{case}, {side}' for case in seeds.CASES for side in 'ab']


def test_the_exponent_of_growth_is_fitted():
  assert fit_exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


@pytest.mark.parametrize(('left', 'right', 'flop'), [((4, 3), (3, 5), 2 * 4 * 3 * 5), ((4, 3), (3,), 2 * 4 * 3)])
def test_products_are_timed_with_their_gradients(left, right, flop):
  counts = count_matmuls(lambda x, w: x @ w, jnp.ones(left), jnp.ones(right))
  seconds, total = limits.time_matmuls(counts, gradients=True)
  assert total == 3 * flop and seconds > 0


def test_the_limit_of_a_kernel_is_the_time_of_its_bounding_operation():
  first = Timing('kernels', 'a case', 'xla', 2.0, 1.9, 2.1, 1.0, memory=3)
  rates = {'tanh': 8.0, 'matrix product': 64.0}
  sizes = [1, 1, 2, 2, 2]  # batch, heads, T, S, features: 8 entries
  limit = kernels._limit(first, rates, 'additive', causal=False, sizes=sizes, includes_backward=False)
  assert (limit.side, limit.median, limit.speed, limit.memory) == ('limit: tanh', 1.0, 2.0, None)
  causal = kernels._limit(first, rates, 'scaled_dot', causal=True, sizes=sizes, includes_backward=True)
  # 14 FLOP for each of 8 entries, of which a causal mask is taken to leave half.
  assert (causal.side, causal.median) == ('limit: matrix product', 14 * 8 / 2 / 64)


@pytest.mark.long
@pytest.mark.parametrize('memory', [64, None])
def test_the_report_has_table_json_markdown_and_pictures(memory, tmp_path, monkeypatch, capsys):
  def suite(bench):
    growth = [Timing('growth', f'additive T=S={n}', 'factored', n / 1e3, 0, 1, 1.0, memory=memory) for n in (64, 128)]
    return [Timing('kernels', 'a case', 'xla', 0.5, 0.4, 0.6, 1.0, 10, 'things', 2**20, 'a note'), *growth]

  monkeypatch.setattr(report, 'SUITES', {'kernels': suite})
  monkeypatch.setenv('HOME', str(tmp_path))
  report.run_suites(['kernels'], '~/a', BenchmarkContext(print, 2))
  printed = capsys.readouterr().out
  assert 'a case' in printed and '20 things/s' in printed and 'a note' in printed
  record = json.loads((tmp_path / 'a' / 'benchmark.json').read_text())
  assert record['timings'][0]['rate'] == 20 and record['environment']['jax'] == jax.__version__
  files = {'benchmark.json', 'benchmark.md', 'times.png', 'growth.png'}
  assert {path.name for path in (tmp_path / 'a').iterdir()} == files
  row = '| a case | xla | 500.00 | 400.0-600.0 | 1.00 | 20 things/s | 1.0 | a note |'
  assert row in (tmp_path / 'a' / 'benchmark.md').read_text().splitlines()


def test_mistakes_in_the_arguments_of_a_report_are_errors(tmp_path, monkeypatch):
  (tmp_path / 'benchmark.json').touch()
  for suite, out, fields, message in (
    ('kernels', tmp_path, {}, f'{tmp_path}/benchmark.json exists; choose another --out'),
    ('kernel', tmp_path / 'a', {}, 'unknown suite'),
    ('kernels', '/dev/null/here', {}, 'cannot be written to'),
    ('prepared', tmp_path / 'b', {}, "the suite 'prepared' needs --pairs=NUMBER"),
    ('startup', tmp_path / 'c', {'checkout': str(tmp_path)}, f'--checkout={tmp_path}: has no experiments/train.py'),
  ):
    with pytest.raises(aj.UserError, match=message):
      report.run_suites([suite], str(out), BenchmarkContext(print, 2, **fields))


def test_a_report_without_a_folder_gets_a_new_one(tmp_path, monkeypatch):
  monkeypatch.setattr(report, 'SUITES', {'kernels': lambda bench: []})
  monkeypatch.chdir(tmp_path)
  report.run_suites(['kernels'], '', BenchmarkContext(print, 2))
  (folder,) = (tmp_path / 'runs').iterdir()
  assert re.fullmatch(r'benchmark-\d{8}-\d{6}', folder.name) and (folder / 'benchmark.json').exists()


def test_a_setting_without_its_suite_is_an_error(tmp_path):
  for setting, suites in report.SUITES_OF_SETTINGS.items():
    bench = BenchmarkContext(print, 2)._replace(**{setting: 3})
    other = next(name for name in report.SUITES if name not in suites)
    with pytest.raises(aj.UserError, match=f'--{setting}=3 has no effect on the suites {other}; only on: {suites[0]}'):
      report.run_suites([other], str(tmp_path / 'new'), bench)
  settings = {*BenchmarkContext._fields} - {'log', 'repeats', 'report_failure'}  # some suites limit or fix `repeats`
  assert settings == {*report.SUITES_OF_SETTINGS} and not (tmp_path / 'new').exists()


@pytest.mark.parametrize('memory', [None, 0])
def test_growth_is_fitted_without_memory(monkeypatch, memory):
  monkeypatch.setattr(kernels, 'GROWTH', {'B': ([1, 2, 3, 4], lambda size: (size, 1, 4, 4))})
  monkeypatch.setattr(kernels, 'jit_side', lambda fn, *inputs: Side(lambda: None, memory))
  bench = BenchmarkContext(lambda line: None, 2)
  *_, last = kernels._growth_along(bench, 'scaled_dot', 'flash', 'B')
  assert re.fullmatch(r'with B, time grows to the power -?[\d.]+, fitted to the last 4', last.note)


def test_other_suites_run_after_a_failure(tmp_path, monkeypatch, capsys):
  def broken(bench):
    yield Timing('first', 'before', 'xla', 0.5, 0.4, 0.6, 1.0)
    bench.report_failure('one side', ValueError('of another size'))
    raise RuntimeError('out of memory\nof the device')

  def working(bench):
    return [Timing('second', 'after', 'xla', 0.5, 0.4, 0.6, 1.0)]

  monkeypatch.setattr(report, 'SUITES', {'first': broken, 'second': working})
  with pytest.raises(aj.UserError, match=r'failed: one side, suite first; the errors are in .*benchmark\.json'):
    report.run_suites([], str(tmp_path), BenchmarkContext(print, 2))
  assert 'failed: suite first: RuntimeError: out of memory' in capsys.readouterr().out
  record = json.loads((tmp_path / 'benchmark.json').read_text())
  assert [timing['case'] for timing in record['timings']] == ['before', 'after']
  assert record['failures']['one side'] == 'ValueError: of another size'
  assert '| after |' in (tmp_path / 'benchmark.md').read_text()


def test_sides_are_compiled_together_and_one_that_fails_is_reported():
  failures = []
  makers = {
    'right': lambda: jit_side(lambda x: jnp.sort(x @ x.mT).sum(), jnp.ones((64, 3))),
    ('a product', 'flash'): lambda: jit_side(lambda x: x @ x, jnp.ones((2, 3))),
  }
  sides = compile_sides(makers, lambda *failure: failures.append(failure))
  assert list(sides) == ['right'] and sides['right'].memory >= 64 * 64 * 4  # temporary arrays
  ((name, error),) = failures
  assert name == 'a product, flash' and 'contracting' in str(error)
  with pytest.raises(TypeError, match='contracting'):
    compile_sides(makers)


@pytest.mark.long
def test_implementations_agree_with_the_definition(monkeypatch):
  masks = agreement.make_masks()
  monkeypatch.setattr(agreement, 'PAIRS', (('scaled_dot', 'softmax'),))
  monkeypatch.setattr(agreement, 'make_masks', lambda: {'causal': masks['causal']})
  lines = []
  bench = BenchmarkContext(lines.append, 2)
  assert list(agreement.kernel_agreement(bench)) == []
  assert lines[0].startswith('scaled_dot, softmax, causal, by auto:')
  assert {line.split()[-2] for line in lines} >= {'auto:', 'chunked:', 'flash:', 'xla:'}
  monkeypatch.setattr(agreement, 'TOLERANCES', {'float32': 1e-12})
  with pytest.raises(aj.UserError, match='differs from the definition by more than 1e-12: scaled_dot, softmax, causal'):
    list(agreement.kernel_agreement(bench))


def test_batches_have_lengths_of_their_bucket():
  batch = systems.make_batch(14)
  assert batch.source.shape == (systems.BATCH_SIZE, 14) and set(batch.source_mask.sum(1)) <= {11, 12, 13, 14}
  assert (batch.target > 0).sum() == batch.target_mask.sum()


@pytest.mark.long
def test_the_products_of_all_search_steps_are_counted():
  config = systems.multi30k.get_config('bahdanau2015_deep_tanh')
  config.model.update({'encoder': 'birnn(features=4)', 'decoder': 'bahdanau(features=4, readout=6)', 'embedding': 4})
  model = systems.build(parse_config(config).model, 30, 50)
  batch = systems.make_batch(14)
  params = variables(model, batch.source, batch.source_mask, batch.target)['params']
  counts = decoding.count_search_matmuls(model, params, batch, beams=3)
  ((left, count),) = ((left, count) for (left, right, *_), count in counts.items() if right == (6, 50))
  assert sorted(left) == sorted((systems.BATCH_SIZE, 3, 6)) and count == decoding.STEPS
  assert any(count < decoding.STEPS for count in counts.values())  # those of the encoder


@pytest.mark.long
def test_peak_memory_excludes_the_parent_process():
  array = np.ones(2**30, np.uint8)  # larger than a process that only imports
  code = 'from lab.benchmarks import memory; print(memory.peak_resident_bytes())'
  result = subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True)
  assert 0 < int(result.stdout) < array.nbytes < memory.peak_resident_bytes()


@pytest.fixture
def pairs_folder(tmp_path):
  """A folder with a tiny Multi30k."""
  (tmp_path / 'multi30k').mkdir()
  (tmp_path / 'multi30k' / 'train.en').write_text('a b c\nd e\nf\n')
  (tmp_path / 'multi30k' / 'train.de').write_text('A B C\nD E\nF\n')
  return tmp_path


def test_pairs_repeat_those_of_multi30k_with_one_other_word(pairs_folder):
  prepared.write_pairs(pairs_folder / 'multi30k', pairs_folder, 90)
  source, target = ((pairs_folder / f'train.{language}').read_text().splitlines() for language in ('en', 'de'))
  assert len(source) == len(target) == 90 and len({*zip(source, target, strict=True)}) > 20
  assert [len(line.split()) for line in source] == [len(line.split()) for line in target]
  assert {len(line.split()) for line in source[::3]} == {3, 4, 5, 6}  # the first pair, joined to another one or not
  for line in source[::3]:
    assert sum(a != b for a, b in zip(line.split(), ['a', 'b', 'c'], strict=False)) <= 1
  (pairs_folder / 'multi30k' / 'train.de').write_text('A B C\n')
  with pytest.raises(aj.UserError, match=r'train\.en has 3 lines but .*train\.de has 1; parallel files'):
    prepared.write_pairs(pairs_folder / 'multi30k', pairs_folder, 9)


def test_folders_of_the_benchmark_may_be_in_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  contexts = []
  monkeypatch.setattr(report, 'run_suites', lambda names, out, bench: contexts.append(bench))
  result = run('benchmark', '--data_root=~/data', '--checkout=~/other', '--joey=~/joey/bin/python')
  assert (result.code, result.err) == (0, '')
  (bench,) = contexts
  folders = (f'{tmp_path}/data', f'{tmp_path}/other', f'{tmp_path}/joey/bin/python')
  assert (bench.data_root, bench.checkout, bench.joey) == folders


@pytest.mark.long
def test_the_suite_of_prepared_data_measures_every_step(pairs_folder, monkeypatch):
  monkeypatch.setattr(prepared, 'VOCABULARY', 'char')
  monkeypatch.setattr(prepared, 'BATCHES', 3)
  bench = BenchmarkContext(print, 2, data_root=str(pairs_folder), pairs=2000)
  preparation, first, batches = prepared.prepared(bench)
  assert preparation.rate > 0 and preparation.unit == 'pairs' and 'MB on disk, peak resident size' in preparation.note
  assert first.median > 0 and batches.amount == 3 and 'target tokens/s' in batches.note


@pytest.mark.long
def test_both_sides_of_the_suite_seeds_run():
  config, vocab_sizes, bucket = seeds.CASES['cmudict:luong2015_birnn']
  config = config.copy_and_resolve_references()
  config.model.update({'encoder': 'rnn(features=4)', 'decoder': 'luong(features=4)', 'embedding': 4})
  config.model.attention.score = 'general'
  batch = seeds.make_batch(8, vocab_sizes, bucket)
  assert batch.source.shape == (8, 9)
  for make_side in seeds.SIDES.values():
    make_side(config, vocab_sizes, batch, 2).run_and_wait()


def test_mistakes_of_the_interpreter_of_joey_nmt_are_errors(tmp_path):
  batch = systems.make_batch(14)
  for python in ('/no/such/python', sys.executable):
    with pytest.raises(aj.UserError, match=f'--joey={python}: (cannot be run|cannot start Joey NMT)'):
      Joey(python, *systems.MODELS['bahdanau2015_deep_tanh'][2], batch.source, batch.target)
  python = tmp_path / 'python'
  python.write_text('#!/bin/sh\necho ready 12\n')
  python.chmod(0o755)
  joey = Joey(str(python), 'a model', {}, batch.source, batch.target)
  joey._child.wait()
  assert joey.parameters == '12'
  with pytest.raises(aj.UserError, match="Joey NMT failed at 'train'"):
    joey.side('train').run()
