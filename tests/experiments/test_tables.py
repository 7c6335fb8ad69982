"""Results as tables for a terminal."""

import math
import re

import numpy as np

from attention_jax.inference.metrics import MetricSummary
from attention_jax.sweeps.bins import Bin, BinnedMetrics
from attention_jax.sweeps.statistics import Interval
from attention_jax.systems.profiling import Operation, UpdateProfile
from experiments.tables import print_bins, print_profile, print_results


def test_names_and_values_of_a_wide_table_are_whole(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  results = {
    'alignment_error_rate': MetricSummary(33.0, '%', 'a signature', 0.5, (32.5, 33.5)),
    'perplexity': MetricSummary(12345.678, '', '', 0.25, (12345.0, 12346.0)),
  }
  print_results({split: results for split in ('validation', 'test', 'unseen')})
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert ['alignment_error_rate', *['33.00', '±', '0.50'] * 3, '%'] in lines
  assert ['perplexity', *['12345.6780', '±', '0.2500'] * 3] in lines


def test_a_bin_has_no_ends_or_no_value_that_cannot_be_computed(capsys):
  bins = [Bin(1, 1, np.arange(2)), Bin(2, 2, np.arange(1)), Bin(3, 3, np.arange(1))]
  intervals = [Interval(50.0, 0.0, 100.0), Interval(50.0, math.nan, math.nan), Interval(*[math.nan] * 3)]
  print_bins(BinnedMetrics('source_length', bins, {'exact_match': intervals}, {'exact_match': '%'}))
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert [line for line in lines if line and line[0] in '123'] == [
    ['1', '2', '50.00', '[0.00,', '100.00]'],
    ['2', '1', '50.00'],
    ['3', '1'],
  ]


def test_a_profile_is_printed_by_module_and_by_operation(capsys):
  times = {
    Operation(('encoder', 'layers_0'), 'forward', 'dot_general'): 0.003,
    Operation(('encoder', 'layers_0'), 'backward', 'exp'): 0.001,
    Operation((), 'optimiser', 'add'): 0.0005,
  }
  print_profile(UpdateProfile((2, 3), 'rows, length', 1.35, 4e12, {}), depth=1, rows=1)
  assert ': 1,350 ms an update, 4,000 GFLOP in products, 2,963 GFLOP/s' in capsys.readouterr().out
  print_profile(UpdateProfile((2, 3), 'rows, length', 0.01, 4e7, times), depth=1, rows=1)
  text = capsys.readouterr().out
  assert 'batch of shape (rows, length) (2, 3): 10 ms an update, 0.04 GFLOP in products, 4 GFLOP/s' in text
  assert '4.5 ms of operations' in text and 'optimiser' not in text
  assert re.search(r'encoder +3\.00 +1\.00 +4\.00 +88\.9%', text) and re.search(r'dot_general +3\.00 +66\.7%', text)
