"""Alignments and attention weights: scores against gold links, statistics, explanations and their limits, pictures.

Loads scipy, optax, matplotlib, jinja2 and flax on first use.
"""

from attention_jax.analysis.agreement import (
  Adversarial,
  adversarial_weights,
  jensen_shannon,
  kendall,
  permutation_effect,
  total_variation,
)
from attention_jax.analysis.alignment import (
  AlignmentScores,
  alignment_error_rate,
  alignment_scores,
  entropy,
  format_pharaoh,
  links_from_weights,
  merge_weights,
  monotonicity,
  parse_gold,
  parse_pharaoh,
)
from attention_jax.analysis.attributions import gradient_times_input, integrated_gradients, leave_one_out
from attention_jax.analysis.heads import gate_heads, head_sensitivity, open_gates, prune_heads
from attention_jax.analysis.norms import weighted_norms
from attention_jax.analysis.notebook import Page, show
from attention_jax.analysis.plots import Heatmap, grid, heatmap
from attention_jax.analysis.statistics import average_lagging, coverage, distance
from attention_jax.analysis.symmetrisation import symmetrise
from attention_jax.analysis.through_layers import flow, rollout

__all__ = [
  'Adversarial',
  'AlignmentScores',
  'Heatmap',
  'Page',
  'adversarial_weights',
  'alignment_error_rate',
  'alignment_scores',
  'average_lagging',
  'coverage',
  'distance',
  'entropy',
  'flow',
  'format_pharaoh',
  'gate_heads',
  'gradient_times_input',
  'grid',
  'head_sensitivity',
  'heatmap',
  'integrated_gradients',
  'jensen_shannon',
  'kendall',
  'leave_one_out',
  'links_from_weights',
  'merge_weights',
  'monotonicity',
  'open_gates',
  'parse_gold',
  'parse_pharaoh',
  'permutation_effect',
  'prune_heads',
  'rollout',
  'show',
  'symmetrise',
  'total_variation',
  'weighted_norms',
]
