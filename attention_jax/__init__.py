"""Attention for sequence-to-sequence models.

This module defines the public names. Those that depend on flax or on other large packages are imported on first use.
"""

import importlib
import sys

from attention_jax.errors import UserError
from attention_jax.functional import alignments, scores
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Carry, Memory
from attention_jax.functional.dropout import with_dropout
from attention_jax.functional.edits import with_edit
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
from attention_jax.missing import TRAIN_SUBPACKAGES, MissingTrainFinder

_LAZY = {
  'Attention': 'attention_jax.modules.attention',
  'analysis': 'attention_jax.analysis',
  'testing': 'attention_jax.testing',
  **{name: f'attention_jax.{name}' for name in TRAIN_SUBPACKAGES},
}
sys.meta_path.append(MissingTrainFinder)


def __getattr__(name: str):
  if name not in _LAZY:
    raise AttributeError(f"module 'attention_jax' has no attribute {name!r}")
  path = _LAZY[name]
  try:
    module = importlib.import_module(path)
  except ModuleNotFoundError as error:
    if str(error.name).startswith('attention_jax'):
      raise
    message = (
      f"attention_jax.{name} needs the package '{error.name.partition('.')[0]}'; pip install 'attention_jax[train]'"
    )
    raise ModuleNotFoundError(message, name=error.name) from error
  is_submodule = path == f'{__name__}.{name}'
  return module if is_submodule else getattr(module, name)


__all__ = [
  'ALIGNMENTS',
  'IMPLEMENTATIONS',
  'SCORES',
  'Attended',
  'Attention',
  'Carry',
  'LocalWindow',
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
  'padding_mask',
  'remember',
  'scores',
  'testing',
  'window_mask',
  'with_dropout',
  'with_edit',
]
