"""Results as tables for a terminal."""

from attention_jax.inference.metrics import MetricSummary
from experiments.tables import print_results


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
