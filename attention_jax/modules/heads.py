"""`Attention` as pure functions of its parameters, for modules of libraries other than flax.linen.

The parameters have the names of `Attention` and its initial scales, so that parameters can be exchanged with it:

- query_kernel and key_kernel, {'kernel': [N, D, F / N]}, if the score projects or there are several heads;
- value_kernel, {'kernel': [N, D, F / N]}, and join, {'kernel': [F, F]}, if there are several heads;
- score_params and alignment_params, with a leading axis of heads, if the score or the alignment has parameters.

D is the width of queries or of the memory.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import float_array, zero_masked
from attention_jax.functional.rngs import check_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import init_row_params, lookup
from attention_jax.kernels.api import attend

ENTRIES = ('query_kernel', 'key_kernel', 'value_kernel', 'join', 'score_params', 'alignment_params')


def check_heads(owner: str, features: int, heads: int) -> None:
  """Checks that features can be divided among heads.

  Args:
    owner: name of the module, with which the message begins.
    features: width F of all heads together.
    heads: number N of heads.

  Raises:
    UserError: if heads is below 1 or does not divide features.
  """
  if heads < 1 or features % heads:
    raise UserError(f'{owner}: heads must be at least 1 and divide features, got features={features} and heads={heads}')


def init_heads(
  rng: jax.Array, *, query: int, key: int, features: int, heads: int = 1, score='additive', alignment='softmax'
) -> dict[str, dict[str, jax.Array]]:
  """Returns initial parameters for `attend_heads`.

  Args:
    rng: a PRNG key, consumed.
    query, key: the widths of queries and of the memory.
    features: width F of the projections of all heads together.
    heads: number N of heads.
    score, alignment: a spec string, a table row, or a function.

  Raises:
    UserError: for an unknown variant, a wrong option, a width or heads below 1, heads that do not divide features, or
      an invalid rng.
  """
  check_rng('attention', rng, is_required=True)
  if min(query, key, features) < 1:
    raise UserError(f'attention: query, key and features must be at least 1, got {query}, {key} and {features}')
  check_heads('attention', features, heads)
  score_row = lookup(score, SCORES, 'score')
  rows = {'score_params': score_row, 'alignment_params': lookup(alignment, ALIGNMENTS, 'alignment')}
  projects = heads > 1 or score_row.project
  width = features // heads
  score_sizes = {'query': width, 'key': width} if projects else {'query': query, 'key': key}
  score_sizes['value'] = width if heads > 1 else key
  # An alignment takes the query before its projection, and the key after it.
  sizes = {'score_params': score_sizes, 'alignment_params': score_sizes | {'query': query}}
  glorot = jax.nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=1, out_axis=(0, 2))
  kernels = {'query_kernel': query, 'key_kernel': key} if projects else {}
  if heads > 1:
    kernels['value_kernel'] = key
  row_rng, kernel_rng, join_rng = jax.random.split(rng, 3)
  params = {
    name: {'kernel': glorot(rng, (heads, size, width))}
    for rng, (name, size) in zip(jax.random.split(kernel_rng, 3), kernels.items(), strict=False)
  }
  for rng, (name, row) in zip(jax.random.split(row_rng), rows.items(), strict=True):
    if row.params:
      init = functools.partial(init_row_params, row=row, sizes=sizes[name] | {'features': width})
      params[name] = jax.vmap(init)(jax.random.split(rng, heads))
  if heads > 1:
    init = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')
    params['join'] = {'kernel': init(join_rng, (features, features))}
  return params


def attend_heads(
  params: Mapping[str, Mapping[str, jax.Array]],
  query: jax.Array,
  encoded: jax.Array,
  mask: Mask | jax.Array | None = None,
  *,
  score='additive',
  alignment='softmax',
  rng: jax.Array | None = None,
  deterministic: bool = True,
  implementation: str = 'auto',
) -> Attended:
  """Projects and attends as `Attention.remember` and `Attention.parallel` do.

  Args:
    params: as `init_heads` returns them, or those of an `Attention` without biases, positions, `kv_heads`, `gate` and
      `differential`.
    query: [..., T, Dq]; the leading axes of query and encoded broadcast to each other.
    encoded: what is attended to, [..., S, D].
    mask: positions that may be attended to, a Mask or an array that broadcasts to [..., T, S]; one of two axes is
      [T, S], also where B = T.
    score, alignment, rng, deterministic, implementation: as for `attend`.

  Returns:
    The context, [..., T, F] if the parameters contain 'join', else [..., T, D], and the weights, [..., N, T, S] of
    several heads or [..., T, S] of one.

  Raises:
    UserError: as `attend`; if `encoded` does not have the width that the parameters project; if the parameters contain
      biases, positions, a gate, differences of heads or unknown entries; or if the numbers of heads of queries, keys
      and values differ.
  """
  check_rng('attention', rng)
  _check_supported(params)
  encoded = float_array('attention', 'encoded', encoded)
  if encoded.ndim < 2:
    raise UserError(f'attention: encoded must be [..., S, D], got {list(encoded.shape)}')
  kernels = {name: params[f'{name}_kernel']['kernel'] for name in ('query', 'key') if f'{name}_kernel' in params}
  variant_params = {name: params.get(f'{name}_params', {}) for name in ('score', 'alignment')}
  values = encoded[None]
  if 'value_kernel' in params:
    kernel = params['value_kernel']['kernel']
    if encoded.shape[-1] != kernel.shape[1]:
      raise UserError(
        f"attention: params['value_kernel']['kernel'] must be [N, {encoded.shape[-1]}, F / N] to project encoded "
        f'{list(encoded.shape)}, got {list(kernel.shape)}'
      )
    values = jnp.einsum('...sd,ndf->n...sf', _zero_masked(encoded, mask, jnp.shape(query)[-2]), kernel)
  rngs = None if rng is None else jax.random.split(rng, values.shape[0])

  def attend_head(head_params: Any, value: jax.Array, rng: jax.Array | None) -> Attended:
    options = {'score': score, 'alignment': alignment, 'params': head_params, 'implementation': implementation}
    return attend(query, encoded, value, mask, rng=rng, deterministic=deterministic, **options)

  context, weights = jax.vmap(attend_head)(kernels | variant_params, values, rngs)
  if 'join' not in params:
    return Attended(context[0], weights[0])
  joined = jax.lax.collapse(jnp.moveaxis(context, 0, -2), -2) @ params['join']['kernel']
  return Attended(joined, weights[0] if len(weights) == 1 else jnp.moveaxis(weights, 0, -3))


def _check_supported(params: Mapping[str, Mapping[str, jax.Array]]) -> None:
  """Raises UserError for unknown entries, and for biases, positions, a gate, differences, or `kv_heads`."""
  if 'positions' in params:
    raise UserError("attention: expected parameters of Attention with positions=None, got params['positions']")
  for name, field in (('gate_kernel', 'gate'), ('difference', 'differential')):
    if name in params:
      raise UserError(f"attention: expected parameters of Attention with {field}=False, got params['{name}']")
  if unknown := [name for name in params if name not in ENTRIES]:
    raise UserError(
      f"attention: params must have the entries of init_heads, some of {', '.join(ENTRIES)}, got params['{unknown[0]}']"
    )
  if biased := [name for name, entry in params.items() if 'bias' in entry and 'kernel' in entry]:
    raise UserError(f"attention: expected parameters of Attention with bias=False, got params['{biased[0]}']['bias']")
  heads = [len(params[name]['kernel']) for name in ('query_kernel', 'key_kernel', 'value_kernel') if name in params]
  if len(set(heads)) > 1:
    raise UserError(f'attention: expected parameters of Attention with kv_heads=0, got kernels of {heads} heads')
  missing = {'value_kernel', 'join'} - params.keys()
  if missing and (len(missing) == 1 or max(heads, default=1) > 1):
    raise UserError(
      "attention: params must have both 'value_kernel' and 'join' if there are several heads, else both or neither; "
      f'got {", ".join(params)}'
    )


def _zero_masked(encoded: jax.Array, mask: Mask | jax.Array | None, num_queries: int) -> jax.Array:
  """Returns `encoded` [..., S, D] with zeros where the mask is False for every query that reads it.

  The gradient of a projection would otherwise multiply by a NaN in masked positions.
  """
  if mask is None:
    return encoded
  if isinstance(mask, Mask):
    is_read = mask.any_query(num_queries, encoded.shape[-2])
  else:
    mask = jnp.asarray(mask)
    is_read = mask.any(-2) if mask.ndim > 1 else mask
  shared_axes = max(0, is_read.ndim - (encoded.ndim - 1))
  is_read = is_read.any(tuple(range(shared_axes)))
  is_read = is_read.reshape((1,) * (encoded.ndim - 1 - is_read.ndim) + is_read.shape)
  try:
    return zero_masked(encoded, is_read)
  except (TypeError, ValueError):  # `attend` reports a mask whose shape does not match
    return encoded
