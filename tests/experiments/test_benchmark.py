"""What the benchmark is made of: turns, limits, its report. That it is quick is nobody's to assert here."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from experiments.benchmarks import kernels, limits, memory, report, seeds, systems
from experiments.benchmarks.joey import Joey
from experiments.benchmarks.measure import BenchmarkContext, Side, Timing, compare, fit_exponent, jit_side


def test_sides_are_run_in_turns_and_compared_with_the_first():
  order = []
  sides = {name: Side(lambda name=name: order.append(name)) for name in 'ab'}
  first, second = compare('suite', 'case', sides, repeats=3, amount=5, unit='things')
  assert order == list('ab') + list('aabb') * 3
  assert first.speed == 1 and second.speed == first.median / second.median
  assert second.low <= second.median <= second.high and second.rate == 5 / second.median


def test_growth_has_an_exponent():
  assert fit_exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_products_are_counted_with_their_repetitions_and_without_what_nobody_uses():
  w, x = jnp.ones((3, 5)), jnp.ones((7, 4, 3))

  def fn(w, x):
    unused = x @ w @ jnp.ones((5, 9))
    del unused
    return jax.lax.scan(lambda total, row: (total + (row @ w).sum(), None), 0.0, x)[0]

  (((left, right, _, _), times),) = limits.count_matmuls(fn, w, x).items()
  assert (left, right, times) == ((4, 3), (3, 5), 7)
  seconds, flop = limits.time_matmuls(limits.count_matmuls(fn, w, x), gradients=True)
  assert flop == 3 * 7 * 2 * 4 * 3 * 5 and seconds > 0


def test_kernels_are_held_against_the_rates_of_the_machine():
  first = Timing('kernels', 'a case', 'xla', 2.0, 1.9, 2.1, 1.0, memory=3)
  rates = {'tanh': 8.0, 'matrix product': 64.0}
  limit = kernels._limit(first, rates, 'additive', False, [1, 1, 2, 2, 2], False)
  assert (limit.side, limit.median, limit.speed, limit.memory) == ('limit: tanh', 1.0, 2.0, None)
  causal = kernels._limit(first, rates, 'scaled_dot', True, [1, 1, 2, 2, 2], True)  # 14 of 8 entries, of which half
  assert (causal.side, causal.median) == ('limit: matrix product', 14 * 8 / 2 / 64)


def test_what_this_machine_cannot_run_is_not_measured():
  bench = BenchmarkContext(print, 2)
  assert 'needs a GPU or a TPU' in kernels.unsupported_reason(bench, 'additive', 'pallas_additive')
  assert kernels.unsupported_reason(bench, 'scaled_dot', 'flash') == ''


def test_temporary_memory_is_told():
  assert jit_side(lambda x: jnp.sort(x @ x).sum(), jnp.ones((64, 64))).memory >= 64 * 64 * 4


def test_a_suite_is_reported_and_drawn(tmp_path, monkeypatch, capsys):
  def suite(bench):
    bench.log('something')
    growth = [Timing('growth', f'additive T=S={n}', 'factored', n / 1e3, 0, 1, 1.0, memory=n) for n in (64, 128)]
    return [Timing('kernels', 'a case', 'xla', 0.5, 0.4, 0.6, 1.0, 10, 'things', 2**20, 'a note'), *growth]

  monkeypatch.setattr(report, 'SUITES', {'kernels': suite})
  report.run_suites(['kernels'], str(tmp_path), BenchmarkContext(print, 2))
  said = capsys.readouterr().out
  assert 'a case' in said and '20 things/s' in said and 'a note' in said
  found = json.loads((tmp_path / 'benchmark.json').read_text())
  assert found['timings'][0]['rate'] == 20 and found['about']['jax'] == jax.__version__
  files = {'benchmark.json', 'benchmark.md', 'times.png', 'growth.png'}
  assert {path.name for path in tmp_path.iterdir()} == files
  table = (tmp_path / 'benchmark.md').read_text()
  row = '| a case | xla | 500.00 | 400.0-600.0 | 1.00 | 20 things/s | 1.0 | a note |'
  assert table.startswith('device ') and row in table.splitlines()
  with pytest.raises(aj.UserError, match='unknown suite'):
    report.run_suites(['kernel'], str(tmp_path), BenchmarkContext(print, 2))
  with pytest.raises(aj.UserError, match='cannot be written to'):
    report.run_suites(['kernels'], '/dev/null/here', BenchmarkContext(print, 2))


def test_what_fails_does_not_cost_the_rest(tmp_path, monkeypatch, capsys):
  def broken(bench):
    yield Timing('first', 'before', 'xla', 0.5, 0.4, 0.6, 1.0)
    bench.report_failure('one side', ValueError('of another size'))
    raise RuntimeError('out of memory\nof the device')

  whole = lambda bench: [Timing('second', 'after', 'xla', 0.5, 0.4, 0.6, 1.0)]
  monkeypatch.setattr(report, 'SUITES', {'first': broken, 'second': whole})
  with pytest.raises(aj.UserError, match=r'failed: one side, suite first; why stands in .*benchmark\.json'):
    report.run_suites([], str(tmp_path), BenchmarkContext(print, 2))
  assert 'failed: suite first: RuntimeError: out of memory' in capsys.readouterr().out
  found = json.loads((tmp_path / 'benchmark.json').read_text())
  assert [timing['case'] for timing in found['timings']] == ['before', 'after']
  assert found['failures']['one side'] == 'ValueError: of another size'
  assert '| after |' in (tmp_path / 'benchmark.md').read_text()


def test_an_implementation_that_cannot_run_is_told():
  told = []
  bench = BenchmarkContext(print, 2, report_failure=lambda what, error: told.append((what, str(error))))
  assert kernels._tried(bench, 'a product', 'flash', lambda x, y: x @ y, (jnp.ones((2, 3)), jnp.ones((2, 3)))) == {}
  assert told[0][0] == 'a product' and 'contracting' in told[0][1]


def test_batches_have_the_lengths_of_their_bucket():
  batch = systems.make_batch(14)
  assert batch.source.shape == (systems.BATCH_SIZE, 14) and set(batch.source_mask.sum(1)) <= {11, 12, 13, 14}
  assert (batch.target > 0).sum() == batch.target_mask.sum()


def test_the_products_of_a_search_are_those_of_all_its_steps():
  config = systems.multi30k.get_config('bahdanau2015').model
  config.update({'encoder': 'birnn(features=4)', 'decoder': 'bahdanau(features=4, readout=6)', 'embedding': 4})
  model = systems.build(config.to_dict(), 30, 50)
  batch = systems.make_batch(14)
  found = systems.count_search_matmuls(model, systems.initial_params(model, 0), batch, beams=3)
  ((left, times),) = ((key[0], times) for key, times in found.items() if key[1] == (6, 50))
  assert sorted(left) == sorted((systems.BATCH_SIZE, 3, 6)) and times == systems.STEPS
  assert any(times < systems.STEPS for times in found.values())  # the encoder's, once


def test_memory_is_that_of_the_process_alone():
  held = np.ones(2**30, np.uint8)  # more than a process needs that only imports
  code = 'from experiments.benchmarks import memory; print(memory.peak_resident_bytes())'
  child = int(subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True).stdout)
  assert 0 < child < held.nbytes < memory.peak_resident_bytes()


def test_seeds_are_compared_on_the_same_work():
  config, words, bucket = seeds.CASES['cmudict:luong2015']
  config = config.copy_and_resolve_references()
  config.model.update({'encoder': 'rnn(features=4)', 'decoder': 'luong(features=4)', 'embedding': 4})
  config.model.attention.score = 'general'
  batch = seeds.make_batch(8, words, bucket)
  assert batch.source.shape == (8, 9) and 6 <= batch.target_mask.sum(1).min() <= batch.target_mask.sum(1).max() <= 9
  for side in seeds.update_sides(config, words, batch, 2).values():
    side.run()


@pytest.mark.parametrize('python', ['/no/such/python', sys.executable])
def test_an_interpreter_without_joey_nmt_is_told_in_one_line(python):
  batch = systems.make_batch(14)
  with pytest.raises(aj.UserError, match=f'--joey={python}: (cannot be run|has no Joey NMT)'):
    Joey(python, *systems.MODELS['bahdanau2015'][2], batch.source, batch.target)
