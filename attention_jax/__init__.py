"""Attention for sequence-to-sequence models.

This module defines the public names. Those that depend on flax or on other large packages are imported on first use.
"""

import importlib

from attention_jax.errors import UserError
from attention_jax.functional import alignments, scores
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, AttendedWithLogSum, Carry, Memory
from attention_jax.functional.dropout import with_dropout
from attention_jax.functional.edits import with_edit
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import causal_mask, combine_masks, padding_mask, window_mask
from attention_jax.functional.params import init_params
from attention_jax.functional.scores import SCORES
from attention_jax.functional.steps import attend_step, init_carry, remember
from attention_jax.functional.table import (
  LocalWindow,
  Param,
  Pointwise,
  Product,
  RequiredLoss,
  Row,
  SoftmaxForm,
  SoftmaxTerms,
  TanhSum,
)
from attention_jax.kernels.api import IMPLEMENTATIONS, attend

_SUBPACKAGES = (
  'analysis',
  'data',
  'decoding',
  'losses',
  'models',
  'sweeps',
  'systems',
  'testing',
  'training',
)


# Names that are imported on first use, and the modules that define them.
_LAZY_NAMES = {'Attention': 'modules.attention', 'open_run': 'systems.runs', 'train': 'systems.experiment'}


def __getattr__(name: str):
  if name not in _LAZY_NAMES and name not in _SUBPACKAGES:
    raise AttributeError(f"module 'attention_jax' has no attribute {name!r}")
  try:
    module = importlib.import_module(f'attention_jax.{_LAZY_NAMES.get(name, name)}')
  except ModuleNotFoundError as error:
    error.add_note(f"attention_jax.{name} needs pip install 'attention_jax[train]'")
    raise
  return getattr(module, name) if name in _LAZY_NAMES else module


__all__ = [
  'ALIGNMENTS',
  'IMPLEMENTATIONS',
  'SCORES',
  'Attended',
  'AttendedWithLogSum',
  'Attention',
  'Carry',
  'LocalWindow',
  'Mask',
  'Memory',
  'Param',
  'Pointwise',
  'Product',
  'RequiredLoss',
  'Row',
  'SoftmaxForm',
  'SoftmaxTerms',
  'TanhSum',
  'UserError',
  'alignments',
  'analysis',
  'attend',
  'attend_step',
  'causal_mask',
  'combine_masks',
  'init_carry',
  'init_params',
  'open_run',
  'padding_mask',
  'remember',
  'scores',
  'testing',
  'train',
  'window_mask',
  'with_dropout',
  'with_edit',
]
