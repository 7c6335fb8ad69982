"""Checks of the fields of `Attention`, and of positions of queries and keys; a mistake is a UserError with one line."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import Dimension
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import lookup
from attention_jax.kernels.api import get_implementation, supported_implementations
from attention_jax.modules.heads import check_heads
from attention_jax.modules.positions import POSITIONS, Positions


def check_attention(attention: nn.Module) -> None:
  """Raises UserError if the fields of `attention`, an `Attention`, contradict each other or a name is unknown."""
  _check_heads(attention)
  _check_projections(attention)
  _check_implementation(attention)
  _check_positions(attention)


def check_indices(owner: str, positions: Any, size: Dimension) -> jax.Array:
  """Returns positions as an array.

  Args:
    owner: 'the memory' or 'the queries', for error messages.
    positions: the positions.
    size: the number of positions.

  Raises:
    UserError: unless they are whole numbers [size].
  """
  if positions is None:
    raise UserError(f'attention: positions of {owner} are required with a module of positions, got None')
  positions = jnp.asarray(positions)
  if positions.shape != (size,) or not jnp.issubdtype(positions.dtype, jnp.integer):
    got = f'{positions.dtype} {list(positions.shape)}'
    raise UserError(f'attention: positions of {owner} must be whole numbers [{size}], got {got}')
  return positions


def _check_heads(attention: nn.Module) -> None:
  heads = attention.heads
  check_heads('attention', attention.features, heads)
  if attention.kv_heads < 0 or heads % attention.groups:
    raise UserError(f'attention: kv_heads must be 0 or a divisor of heads={heads}, got kv_heads={attention.kv_heads}')
  if heads > 1 and attention.resolved_alignment.latent:
    raise UserError(f'attention: heads must be 1 for a latent alignment, got heads={heads}')
  if attention.differential and (heads % 2 or attention.kv_heads not in (0, heads)):
    raise UserError(
      'attention: differential attention needs pairs of heads, each with its own keys; expected even heads and '
      f'kv_heads=0, got heads={heads} and kv_heads={attention.kv_heads}'
    )


def _check_projections(attention: nn.Module) -> None:
  if attention.bias and not attention.projects:
    raise UserError(
      f'attention: bias must be False for one head and score {attention.score!r}, which projects neither query nor key'
    )
  if attention.projects_values and attention.resolved_alignment.latent:
    raise UserError(
      f'attention: project_values must be False and positions None for the latent alignment {attention.alignment!r}, '
      'with which a decoder reads the value of each position instead of a context'
    )
  if attention.gate and not attention.projects_values:
    raise UserError('attention: gate must be False for one head without project_values=True, got gate=True')


def _check_implementation(attention: nn.Module) -> None:
  score = attention.resolved_score
  name = attention.implementation
  implementation = get_implementation(name, score, lookup(attention.alignment, ALIGNMENTS, 'alignment'))
  if implementation.unsupported_reason(score, attention.resolved_alignment):
    expected = ', '.join(supported_implementations(score, attention.resolved_alignment))
    raise UserError(
      f"attention: implementation '{name}' does not support dropout on weights; expected dropout=0.0 or one of: "
      f'{expected}'
    )


def _check_positions(attention: nn.Module) -> None:
  positions = attention.positions
  if positions is None:
    return
  sizes = {'heads': attention.heads, 'features': attention.features // attention.heads}
  if not isinstance(positions, Positions):
    expected = ', '.join(f'{name}={size}' for name, size in sizes.items())
    raise UserError(
      f"attention: positions must be a module such as modules.positions.POSITIONS['alibi']({expected}), "
      f'got {positions!r}'
    )
  if not positions.in_attention and type(positions).embed is not Positions.embed:
    expected = ', '.join(name for name, cls in POSITIONS.items() if cls.in_attention)
    raise UserError(
      f'attention: positions must be applied by attention, got {type(positions).__name__}, which is added to '
      f'embeddings; expected one of: {expected}'
    )
  for name in positions.depends_on:
    if getattr(positions, name) != sizes[name]:
      raise UserError(
        f'attention: positions must have {name}={sizes[name]}, got {name}={getattr(positions, name)}; the attention '
        f'has {sizes["heads"]} heads of {sizes["features"]} features'
      )
  if attention.has_rotary_positions and not attention.resolved_score.rotation_invariant:
    expected = ', '.join(name for name, row in SCORES.items() if row.rotation_invariant)
    raise UserError(
      f'attention: rotary positions need a score that a rotation of query and key leaves unchanged, '
      f'got {attention.score!r}; expected one of: {expected}'
    )
  if attention.differential and positions.needs_weights:
    raise UserError(
      'attention: differential attention does not support positions that are added to contexts, such as shaw; expected '
      'other positions, or differential=False'
    )
