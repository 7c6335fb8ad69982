"""Alignments and attention weights: scores against gold links, statistics, pictures. Loads matplotlib on first use."""

from attention_jax.analysis.alignment import (
  AlignmentScores,
  alignment_error_rate,
  alignment_scores,
  entropy,
  format_pharaoh,
  links_from_weights,
  merge_weights,
  monotonicity,
  parse_pharaoh,
)
from attention_jax.analysis.plots import Heatmap, grid, heatmap

__all__ = [
  'AlignmentScores',
  'Heatmap',
  'alignment_error_rate',
  'alignment_scores',
  'entropy',
  'format_pharaoh',
  'grid',
  'heatmap',
  'links_from_weights',
  'merge_weights',
  'monotonicity',
  'parse_pharaoh',
]
