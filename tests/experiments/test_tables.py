"""Results as tables for a terminal."""

import math

import numpy as np

from attention_jax.decoding.metrics import MetricSummary
from attention_jax.sweeps.bins import Bin, BinnedMetrics
from attention_jax.sweeps.statistics import Interval
from experiments.tables import print_bins, print_results


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
