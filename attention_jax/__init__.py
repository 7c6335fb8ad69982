"""attention_jax: attention for sequence-to-sequence models. The public names; what is heavy is loaded on first use."""

import importlib

from attention_jax.errors import UserError
from attention_jax.functional import alignments, scores
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Carry, Memory, attend_step, init_params
from attention_jax.functional.dropout import with_dropout
from attention_jax.functional.masking import causal_mask, combine_masks, padding_mask, window_mask
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import LocalWindow, Param, Pointwise, Product, RequiredLoss, Row, TanhSum
from attention_jax.kernels.api import IMPLEMENTATIONS, attend

_LAZY = {'Attention': 'attention_jax.modules.attention', 'analysis': 'attention_jax.analysis'}


def __getattr__(name: str):
  if name not in _LAZY:
    raise AttributeError(f"module 'attention_jax' has no attribute {name!r}")
  module = importlib.import_module(_LAZY[name])
  return module if _LAZY[name].endswith('.' + name) else getattr(module, name)


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
  'TanhSum',
  'UserError',
  'alignments',
  'analysis',
  'attend',
  'attend_step',
  'causal_mask',
  'combine_masks',
  'init_params',
  'padding_mask',
  'scores',
  'window_mask',
  'with_dropout',
]
