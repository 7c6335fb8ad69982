"""The flax module that owns the parameters of attention: any score, any alignment, any number of heads."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional import attend as functional
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Carry, Memory, Problem
from attention_jax.functional.dropout import with_dropout
from attention_jax.functional.edits import HEAD_AXES
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.mask import Mask, align_mask
from attention_jax.functional.masking import Dimension, accumulation_dtype, mask_array
from attention_jax.functional.programs import call_as_program
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup, memory_parameter_names, parameter_names
from attention_jax.kernels.api import IMPLEMENTATIONS, align_bias, get_implementation, supported_implementations
from attention_jax.kernels.sharding import batch_mesh_axis, shard_alike
from attention_jax.modules.differential import INITIAL_LAMBDA, HeadDifference
from attention_jax.modules.head_params import HeadKernel, RowParams, append_one, group_heads, project_to_heads
from attention_jax.modules.heads import check_heads
from attention_jax.modules.linear import Dense
from attention_jax.modules.positions import POSITIONS, Positions
from attention_jax.specs import Count, Fraction, Size


class Attention(nn.Module):
  """Attention over a memory, one query at a time or all at once.

  With one head, the query and the key are projected only if the row of the score requires it, and the value is not
  projected, as in the papers before 2017. With several heads, `project_values` or `positions`, the query, the key and
  the value are projected to H = `head_dim`, by default F / N, features in each head. The contexts of the heads are then
  concatenated and projected to `features`.

  Shapes: query [B, D] for one step and [B, T, D] for all; encoded [B, S, D]; mask [B, S], or [B, T, S] for `parallel`,
  see `remember`. Weights are [B, S] and [B, T, S] for one head; with several heads there is an axis N after B.

  Variants that sample, and dropout, take the rng 'attention', or 'dropout' if there is none of that name.

  Attributes:
    score, alignment: a spec string; in Python also a table row, or a function with the arguments of `Row.fn`. With
      rotary positions, `normed_dot` normalises queries and keys before they are rotated, with gains [G, H] of the keys.
    features: width F of the projections.
    heads: number N of heads.
    kv_heads: number G of heads of keys and values, each shared by N / G heads of queries (Ainslie et al. 2023; with
      one, Shazeer 2019); 0 stands for `heads`.
    implementation: a name of `attention_jax.IMPLEMENTATIONS`.
    dropout: dropout rate of the weights during training.
    project_values: whether a single head projects query, key, value and context, as several heads do.
    positions: a module of modules.positions, for self-attention.
    bias: whether projections have biases, as in torch; projected contexts of an all-masked memory are then not zero.
    differential: whether pairs of heads share a value and subtract their contexts, see modules.differential; weights
      are those of the single heads.
    gate: whether contexts of heads are multiplied by σ(W q), q the query (Qiu et al. 2025); requires projected values.
    output_scale: the initial variance of the output projection is output_scale / F.
    head_dim: features H of a head; 0 stands for features / heads.
    initial_lambda: λ₀ of differential attention.
    dtype: dtype of the computation; weights are at least float32 in any case.

  Example:
    All queries at once, with `remember` and `parallel`:

    >>> import jax, jax.numpy as jnp, attention_jax as aj
    >>> attention = aj.Attention(score='coverage', alignment='entmax15', features=16)
    >>> query = jax.random.normal(jax.random.key(0), (2, 3, 8))  # [B, T, D]
    >>> encoded = jax.random.normal(jax.random.key(1), (2, 5, 8))  # [B, S, D]
    >>> mask = aj.padding_mask(jnp.array([5, 4]), size=5)
    >>> def attend(module, query, encoded, mask):
    ...   return module.parallel(query, module.remember(encoded, mask))
    >>> params = attention.init(jax.random.key(2), query, encoded, mask, method=attend)
    >>> context, weights = attention.apply(params, query, encoded, mask, method=attend)
    >>> context.shape, weights.shape, float(weights[1, :, 4].max())
    ((2, 3, 8), (2, 3, 5), 0.0)

    One query at a time, in a decoder of your own: `remember` once per source, `init_carry`, and a call for each step.

    >>> model = attention.bind(params)
    >>> memory = model.remember(encoded, mask)
    >>> carry = model.init_carry(memory)
    >>> for t in range(3):
    ...   carry, step = model(carry, query[:, t], memory)
    ...   assert jnp.allclose(step.weights, weights[:, t], atol=1e-5)
    >>> step.context.shape, model.context_width(memory)
    ((2, 8), 8)

    A latent alignment is updated with log p(token | position), [B, S]. A streaming one can start at the last position:

    >>> latent = aj.Attention(score='dot', alignment='latent_monotonic').bind({})
    >>> memory = latent.remember(encoded, mask)
    >>> carry, step = latent(latent.init_carry(memory), query[:, 0], memory)
    >>> carry = latent.observe(carry, jnp.zeros((2, 5)))
    >>> walk = aj.Attention(score='dot', alignment='monotonic').bind({})
    >>> carry, step = walk(walk.carry_at_last_position(memory), query[:, 0], memory)

    Available without parameters (`check_step_support` raises if the implementation computes all queries at once):

    >>> attention.projects, attention.is_recurrent, attention.check_step_support()
    (True, True, None)
  """

  score: str = 'additive'
  alignment: str = 'softmax'
  features: Size = 128
  heads: Size = 1
  kv_heads: Count = 0
  implementation: str = 'auto'
  dropout: Fraction = 0.0
  project_values: bool = False
  positions: Positions | None = None
  bias: bool = False
  differential: bool = False
  gate: bool = False
  output_scale: float = 1.0
  head_dim: Count = 0
  initial_lambda: Fraction = INITIAL_LAMBDA
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    _check_fields(self)
    self.score_row = self.scoring_row
    self.alignment_row = self.resolved_alignment
    self.score_params = RowParams(self.resolved_score)
    self.alignment_params = RowParams(self.alignment_row)
    self.resolved_implementation = IMPLEMENTATIONS[self.implementation]
    head_features = self.head_features
    if self.projects:
      self.query_kernel = HeadKernel(self.heads, head_features, self.bias)
      self.key_kernel = HeadKernel(self.groups, head_features, self.bias)
    if self.projects_values:
      share = 2 if self.differential else 1  # number of heads with the same value
      self.value_kernel = HeadKernel(self.groups // share, share * head_features, self.bias)
      self.gate_kernel = HeadKernel(self.heads // share, share * head_features, self.bias) if self.gate else None
      lambdas = HeadDifference(head_features, self.groups, self.initial_lambda, self.dtype)
      self.difference = lambdas if self.differential else None
      init = nn.initializers.variance_scaling(self.output_scale, 'fan_in', 'truncated_normal')
      self.join = Dense(self.features, use_bias=self.bias, dtype=self.dtype, kernel_init=init)

  @property
  def groups(self) -> int:
    """Number of heads of keys and values."""
    return self.kv_heads or self.heads

  @property
  def head_features(self) -> int:
    """Number H of features of a head."""
    return self.head_dim or self.features // self.heads

  @property
  def has_rotary_positions(self) -> bool:
    """Whether positions rotate the projected query and key."""
    return self.positions is not None and self.positions.requires_rotation_invariance

  @property
  def rotates_factors(self) -> bool:
    """Whether positions rotate the factors of the score instead of the projected query and key, see Product."""
    return self.has_rotary_positions and not self.resolved_score.rotation_invariant

  @property
  def scoring_row(self) -> Row:
    """Row of the score of the query and the keys as the memory has them."""
    return SCORES['dot'] if self.rotates_factors else self.resolved_score

  @property
  def resolved_score(self) -> Row:
    """Row of the score, available without parameters."""
    return lookup(self.score, SCORES, 'score')

  @property
  def projects(self) -> bool:
    """Whether query and key are projected."""
    return self.projects_values or self.resolved_score.project

  @property
  def projects_queries_first(self) -> bool:
    """Whether one product projects the queries of all heads.

    Otherwise each head projects its query itself, if at all: an alignment that takes the query gets it unprojected.
    """
    return self.projects and (self.positions is not None or 'query' not in self.alignment_row.required_inputs)

  @property
  def projects_values(self) -> bool:
    """Whether values and contexts are projected."""
    return self.heads > 1 or self.project_values or self.positions is not None

  @property
  def is_recurrent(self) -> bool:
    """Whether queries must be processed in order."""
    return self.resolved_score.is_recurrent or self.resolved_alignment.is_recurrent

  @property
  def needs_carry(self) -> bool:
    """Whether a step depends on the carry: on earlier queries, or on their number as the position of its query."""
    inputs = self.resolved_score.required_inputs | self.resolved_alignment.required_inputs
    return self.is_recurrent or 'query_position' in inputs

  @property
  def supports_segments(self) -> bool:
    """Whether attention within a segment of a row does not depend on where in the row the segment is."""
    return not self.is_recurrent and self.resolved_score.is_pointwise

  def check_step_support(self) -> None:
    """Raises UserError if the implementation is unknown or cannot compute one query at a time."""
    if IMPLEMENTATIONS[choose(self.implementation, IMPLEMENTATIONS, 'implementation')].attend_step is None:
      supported = supported_implementations(self.scoring_row, self.resolved_alignment)
      expected = [name for name in supported if IMPLEMENTATIONS[name].attend_step]
      raise UserError(
        f"attention: implementation '{self.implementation}' computes all queries at once, but this decoder has one "
        f'query at a time; expected one of: {", ".join(expected)}'
      )

  @property
  def resolved_alignment(self) -> Row:
    """Row of the alignment with dropout on its weights, available without parameters."""
    return with_dropout(lookup(self.alignment, ALIGNMENTS, 'alignment'), self.dropout)

  def remember(
    self,
    encoded: jax.Array,
    mask: jax.Array | Mask | None = None,
    positions: jax.Array | None = None,
    value: jax.Array | None = None,
  ) -> Memory:
    """Prepares the memory once per source: sets masked positions to zero, and projects keys and values.

    Args:
      encoded: encoded source, [B, S, D].
      mask: positions that may be attended to: a Mask, whose leaves have an axis B, or an array [B, S], or [B, T, S]
        for `parallel`; by default all. B may be 1, and [B, 1, T, S], as in flax, is [B, T, S]. An array of two axes is
        [B, S], also where B = T; pass a mask [T, S] that all rows share as mask[None].
      positions: positions of the vectors of `encoded`, [S], or [B, S] if sequences have different ones; required if
        there is a module of positions. `forgetting` and `contextual` take them to be 0 ... S - 1.
      value: values that contexts are made of, [B, S, V]; by default `encoded`.

    Returns:
      Memory with key [B, G, S, H], or [B, 1, S, D] if not projected; value [B, G, S, H] (2 H features if
      `differential`), or [B, 1, S, V] if not projected; mask [B, 1, S] or [B, 1, T, S], or the Mask; for some
      alignments, `remembered` [B, G, N / G, S, H]; and the positions, if there is a module of positions.

    Raises:
      UserError: if shapes do not match, and for a mask that is not bool.
    """
    encoded = jnp.asarray(encoded)
    value = encoded if value is None else jnp.asarray(value)
    if encoded.ndim != 3 or value.ndim != 3 or encoded.shape[:2] != value.shape[:2]:
      raise UserError(
        f'attention: encoded must be [B, S, D] and value [B, S, V], got {_shape(encoded)} and {_shape(value)}; '
        'add a batch axis to a single sequence'
      )
    mask = _mask_of_memory(mask, *encoded.shape[:2])
    positions = self._check_positions('the memory', positions, encoded.shape[:2])
    mask = mask if isinstance(mask, Mask) else mask[:, None]
    unprojected = functional.zero_masked_memory(Memory(encoded, value, _structure(mask)))
    key = self._split_heads(unprojected.key, self.key_kernel if self.projects else None)
    value = self._split_heads(unprojected.value, self.value_kernel if self.projects_values else None)
    value = jnp.repeat(value, 2, axis=1) if self.differential else value
    key = key if self.positions is None else self._apply_positions(key, unprojected.key, positions)
    return Memory(key, value, mask, self._remember_for_alignment(value), positions)

  def _check_positions(self, owner: str, positions: Any, shape: tuple[int, int]) -> jax.Array | None:
    """Returns positions of the memory or of queries as an array; None without a module of positions.

    Args:
      owner: 'the memory' or 'the queries', for error messages.
      positions: whole numbers [n], or [B, n] if sequences have different ones.
      shape: B and n.

    Raises:
      UserError: for anything else.
    """
    if self.positions is None:
      return None
    if positions is None:
      raise UserError(f'attention: positions of {owner} are required with a module of positions, got None')
    positions = jnp.asarray(positions)
    batch, size = shape
    if positions.shape not in ((size,), shape) or not jnp.issubdtype(positions.dtype, jnp.integer):
      got = f'{positions.dtype} {_shape(positions)}'
      raise UserError(
        f'attention: positions of {owner} must be whole numbers [{size}], got {got}; sequences with different '
        f'positions have [{batch}, {size}]'
      )
    if owner == 'the memory' and positions.ndim == 2 and self.positions.keys_in_order:
      raise UserError(
        f'attention: positions of {owner} must be 0 ... S - 1 for every sequence with {type(self.positions).__name__}, '
        f'got {_shape(positions)}'
      )
    return positions

  def _rotate(self, name: str, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates projected queries or keys x [B, N, T, H], or the factors of the score made of them.

    Args:
      name: 'query' or 'key'.
      x: the projected vectors.
      positions: their positions, [T] or [B, T].
    """
    if not self.rotates_factors:
      return self.positions.rotate(x, positions)
    fn = getattr(self.resolved_score.form, f'{name}_factor')
    sizes = dict.fromkeys(('query', 'key', 'features'), self.head_features)
    params = self.score_params(parameter_names(Row(fn)), x.shape[1], **sizes)
    over_heads = jax.vmap(lambda params, x: jax.vmap(lambda x: fn(x, **params))(x))
    return self.positions.rotate(jax.vmap(over_heads, (None, 0))(params, x), positions).astype(self.dtype)

  def _apply_positions(self, key: jax.Array, encoded: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates projected keys [B, G, S, H], and appends annotations made of `encoded` [B, S, D]."""
    key = self._rotate('key', key, positions)
    if not self.positions.annotations:
      return key
    return jnp.concatenate([key, self.positions.annotate(encoded, self.groups).astype(key.dtype)], axis=-1)

  def _split_heads(self, x: jax.Array, head_kernel: HeadKernel | None) -> jax.Array:
    """Projects x [B, S, D] to [B, G, S, H]; without a kernel, returns it as one head, [B, 1, S, D]."""
    x = x.astype(self.dtype)
    if head_kernel is None:
      return x[:, None]
    x = append_one(x) if self.bias else x
    return project_to_heads(x, head_kernel(x.shape[-1]).astype(self.dtype))

  def _remember_for_alignment(self, value: jax.Array) -> jax.Array | None:
    """Result of the alignment's `Row.remember` for values [B, G, S, V] of each head, [B, G, N / G, S, ...], or None."""
    if self.alignment_row.remember is None:
      return None
    names = memory_parameter_names(self.alignment_row)
    params = self.alignment_params(names, self.heads, value=value.shape[-1], features=self.head_features)
    over_heads_of_group = jax.vmap(lambda params, value: self.alignment_row.remember(value, **params), (0, None))
    over_batch = jax.vmap(jax.vmap(over_heads_of_group), (None, 0))
    return over_batch(group_heads(params, self.groups, 0), value).astype(self.dtype)

  def context_width(self, memory: Memory) -> int:
    """Returns the width of contexts over `memory`."""
    return self.features if self.projects_values else memory.value.shape[-1]

  def init_carry(self, memory: Memory) -> Carry:
    """Returns the carry before the first query; every leaf is [B, N, ...]. Its floats have the dtype of weights."""
    dtype = accumulation_dtype(memory.key)
    carry = functional.init_carry(self.score_row, self.alignment_row, memory.key.shape[-2], dtype)
    shape = (memory.key.shape[0], self.heads)
    carry = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*shape, *leaf.shape)), carry)
    return shard_alike((carry, memory.key), 1)[0]

  def carry_at_last_position(self, memory: Memory) -> Carry:
    """Returns an initial carry at the last instead of the first position, for an alignment with a lookback."""
    carry = self.init_carry(memory)
    score_state, state = carry.state
    return carry._replace(state=(score_state, jax.tree.map(lambda leaf: jnp.flip(leaf, -1), state)))

  def observe(self, carry: Carry, log_likelihood: jax.Array) -> Carry:
    """Updates the carry of a latent alignment after a step: log_likelihood [B, S] is log p(token | position).

    Raises:
      UserError: if the alignment is not latent.
    """
    latent = self.alignment_row.latent
    if not latent:
      raise UserError(f'attention: observe needs a latent alignment, such as latent_monotonic, got {self.alignment!r}')
    score_state, state = carry.state
    if latent.observe:
      state = jax.vmap(jax.vmap(latent.observe))(state, log_likelihood[:, None])
    return carry._replace(state=(score_state, state))

  def __call__(
    self, carry: Carry, query: jax.Array, memory: Memory, deterministic: bool = True, position: jax.Array | None = None
  ) -> tuple[Carry, Attended]:
    """Attends with one query per row.

    Args:
      carry: carry of the previous step, as `init_carry` returns it.
      query: queries, [B, D].
      memory: memory, as `remember` returns it.
      deterministic: whether to use test-time behaviour.
      position: position of the query, [], or [B] if sequences have different ones; required if there is a module of
        positions. Scores and alignments that take `query_position` get it; without it, the number of previous queries.

    Returns:
      The next carry, and Attended with context [B, `context_width`] and weights: [B, S] for one head, else [B, N, S].

    Raises:
      UserError: for arguments of another type, such as the query, key and value of flax's modules, or another shape.
    """
    if not isinstance(carry, Carry) or not isinstance(memory, Memory):
      raise UserError(
        'attention: a call takes (carry, query [B, D], memory), one query per row, got '
        f'{", ".join(map(_describe, (carry, query, memory)))}; '
        'for all queries use parallel(query, remember(key, mask, value=value))'
      )
    query = _check_query(query, memory, 'BD')
    attend_step = self.resolved_implementation.attend_step or functional.attend_step
    fn = (_attend_one, attend_step, self.score_row, self.alignment_row, deterministic)
    if (
      position is not None and jnp.ndim(position) and (self.positions is None or jnp.shape(position) != query.shape[:1])
    ):
      raise UserError(
        f'attention: position must be one number [] for all rows, or [B] = [{query.shape[0]}] with a module of '
        f'positions, got {_describe(position)}'
      )
    query = query[:, None]
    positions = None if position is None else jnp.asarray(position)[..., None]
    positions = self._check_positions('the queries', positions, query.shape[:2])
    carry, attended = self._over_heads(fn, carry, query, memory, deterministic, positions, position=position)
    attended = self._join_heads(attended, query, positions, memory.positions)
    return carry, jax.tree.map(lambda x: jnp.squeeze(x, -2), attended)

  def parallel(
    self,
    query: jax.Array,
    memory: Memory,
    deterministic: bool = True,
    positions: jax.Array | None = None,
    return_weights: bool = True,
    bias: jax.Array | None = None,
  ) -> Attended:
    """Attends with all queries, scanned in order if the attention is recurrent and the implementation not 'window'.

    Args:
      query: queries, [B, T, D].
      memory: memory, as `remember` returns it.
      deterministic: whether to use test-time behaviour.
      positions: positions of the queries, [T], or [B, T] if sequences have different ones; required if there is a
        module of positions.
      return_weights: whether to return the weights; they are always returned if the module of positions has
        `needs_weights`.
      bias: float, broadcastable to [B, N, T, S], added to the scores before masking; -inf masks.

    Returns:
      Attended with context [B, T, `context_width`], and weights: [B, T, S] for one head, else [B, N, T, S]; or None.

    Raises:
      UserError: if shapes do not match, and for a memory that is not from `remember`.
    """
    if not isinstance(memory, Memory):
      raise UserError(f'attention: memory must be a Memory, as remember returns it, got {_describe(memory)}')
    query = _check_query(query, memory, 'BTD')
    return_weights = return_weights or (self.positions is not None and self.positions.needs_weights)

    attend_batch = self.resolved_implementation.attend_batch
    fn = (_attend_all, attend_batch, self.score_row, self.alignment_row, deterministic, return_weights)
    positions = self._check_positions('the queries', positions, query.shape[:2])
    if bias is not None:
      bias = align_bias('attention', bias, (query.shape[0], self.heads, query.shape[1], memory.key.shape[-2]))
    attended = self._over_heads(fn, (), query, memory, deterministic, positions, bias)
    return self._join_heads(attended, query, positions, memory.positions)

  def _over_heads(
    self,
    fn: tuple,
    carry: Any,
    query: jax.Array,
    memory: Memory,
    deterministic: bool,
    positions: jax.Array | None,
    bias: jax.Array | None = None,
    position: jax.Array | None = None,
  ):
    """Maps a function of one head over the batch and the heads; `fn` is the function and its first arguments."""
    query = query.astype(self.dtype)
    if self.projects and self.bias:
      query = append_one(query)
    annotated_key = memory.key
    batch = query.shape[0]
    mask = _structure(memory.mask)
    if self.positions is not None:
      memory = memory._replace(key=memory.key[..., : self.head_features])  # without annotations
    params = self._cast_params(query.shape[-1], memory)
    if self.projects_queries_first:
      query = project_to_heads(query, params.pop('query'))
      if self.positions is not None:
        query = self._rotate('query', query, positions)
        dense = mask.dense(1 if mask.is_shared else query.shape[2], memory.key.shape[-2])
        dense = jnp.broadcast_to(dense, (batch, *dense.shape[-2:]))
        of_positions = self.positions.bias(query, annotated_key, positions, dense, memory.positions)
        if of_positions is not None:
          of_positions = of_positions if of_positions.ndim == 4 else of_positions[None]
          bias = of_positions if bias is None else of_positions + bias
      query = group_heads(query, self.groups, 1)
    else:
      query = query[:, None, None]
    if bias is not None:
      bias = bias[:, None] if bias.shape[1] == 1 else group_heads(bias, self.groups, 1)
    params = jax.tree.map(lambda x: x[None], group_heads(params, self.groups, 0))
    carry, rngs = group_heads((carry, self._rngs((batch, self.heads), deterministic)), self.groups, 1)
    mask = jax.tree.map(lambda x: x[:, None, None], mask)
    memory = Memory(memory.key[:, :, None], memory.value[:, :, None], mask, memory.remembered)
    carry, query, memory, rngs = shard_alike((carry, query, memory, rngs), 1)  # a bias is split like its query
    position = None if position is None else jnp.asarray(position).reshape(-1, 1, 1)
    return call_as_program(fn[0], fn[1:], params, carry, query, memory, bias, rngs, position)

  def _cast_params(self, query_size: int, memory: Memory):
    """Parameters of all heads for queries of `query_size` features; scalars and those of alignments are not cast."""
    head_features = self.head_features
    sizes = {'key': memory.key.shape[-1], 'value': memory.value.shape[-1], 'features': head_features}
    # The parameters of `Row.remember` are not needed again for a memory that contains its result.
    unused = () if memory.remembered is None else memory_parameter_names(self.alignment_row)
    alignment_names = [name for name in self.alignment_row.params if name not in unused]
    score_query_size = head_features if self.projects else query_size
    alignment_query_size = head_features if self.projects_queries_first else query_size
    params = {
      'score': self.score_params(self.score_row.params, self.heads, query=score_query_size, **sizes),
      'alignment': self.alignment_params(alignment_names, self.heads, query=alignment_query_size, **sizes),
    }
    if self.projects:
      params['query'] = self.query_kernel(query_size)

    def cast(param):
      # Scalars stay float32, as do the parameters of alignments: rounding them to bfloat16 changes results visibly.
      return param if param.ndim == 1 else param.astype(self.dtype)

    return {name: p if name == 'alignment' else jax.tree.map(cast, p) for name, p in params.items()}

  def _rngs(self, shape: tuple[int, int], deterministic: bool):
    """PRNG keys of this shape, or None if neither the score nor the alignment samples."""
    alignment_samples = 'rng' in self.alignment_row.required_inputs and not (
      deterministic and self.alignment_row.at_test
    )
    if alignment_samples or 'rng' in self.score_row.required_inputs:
      name = 'dropout' if self.has_rng('dropout') and not self.has_rng('attention') else 'attention'
      return jax.random.split(self.make_rng(name), shape)
    return None

  def _join_heads(
    self, attended: Attended, query: jax.Array, positions: jax.Array | None, key_positions: jax.Array | None
  ) -> Attended:
    """Joins contexts [B, N, T, ...] of queries [B, T, D] if `projects_values`; removes the axis N of a single head."""
    context, weights = attended
    if not self.projects_values:
      return Attended(context[:, 0], None if weights is None else weights[:, 0])
    shift = None if self.positions is None else self.positions.shift(weights, positions, key_positions)
    if shift is not None:
      context = context + shift.astype(context.dtype)
    if self.differential:
      context = self.difference(context)
    if self.gate:
      context = context * jax.nn.sigmoid(self._split_heads(query, self.gate_kernel))
    joined = self.join(jax.lax.collapse(jnp.moveaxis(context, 1, -2), -2))
    return Attended(joined, weights if weights is None or self.heads > 1 else weights[:, 0])


def _attend_one(attend_step: Callable, score: Row, alignment: Row, deterministic: bool, *operands):
  """Attends with one query, [B, G, N / G, 1, D]. Returns the new carry and Attended, with leading axes B and N."""

  def attend(params, carry, query, memory, bias, rng, position):
    memory = memory._replace(mask=memory.mask.dense(1, memory.key.shape[0])[0])
    bias = None if bias is None else bias[0]
    options = {'bias': bias, 'rng': rng, 'deterministic': deterministic, 'query_position': position}
    carry, attended = attend_step(score, alignment, params, carry, query[0], memory, **options)
    return carry, jax.tree.map(lambda x: x[None], attended)

  return _merge_heads(lift(attend, _axes(operands), *operands))


def _attend_all(
  attend_batch: Callable, score: Row, alignment: Row, deterministic: bool, return_weights: bool, *operands
) -> Attended:
  """Attends with all queries, [B, G, N / G, T, D]. Returns Attended with leading axes B and N."""
  params, _, query, memory, bias, rngs, _ = operands
  problem = Problem(score, alignment, params, query, memory, bias, rngs, deterministic, return_weights)
  return _merge_heads(attend_batch(problem, _axes(operands)))


def _axes(operands: tuple) -> Axes:
  """The leading axes B, G and N / G of operands: of the parameters, the carry, the query and so on."""
  query = operands[2]
  mesh_axis = batch_mesh_axis(query.shape[0])
  rows = {'spmd_axis_name': mesh_axis} if mesh_axis else {}
  return (rows, *({'axis_name': name} for name in HEAD_AXES))


def _merge_heads(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]), tree)


def _shape(x: jax.Array) -> str:
  return str(list(x.shape))


def _describe(x: Any) -> str:
  """The shape of an array, or the type of anything else."""
  return f'{x.dtype} {_shape(x)}' if hasattr(x, 'dtype') else type(x).__name__


def _mask_of_memory(mask: Any, batch: Dimension, size: Dimension) -> jax.Array | Mask:
  """Returns an array as [B, S], or as [B, T, S] if it depends on the query; a Mask with axes B.

  Args:
    mask: a Mask, or [B, S], [B, T, S] or [B, 1, T, S], where B may be 1; None for all positions.
    batch: B.
    size: S.

  Raises:
    UserError: for another shape or dtype.
  """
  if isinstance(mask, Mask):
    return align_mask('attention', mask, (batch,), None, size)
  if mask is None:
    return jnp.ones((batch, size), bool)
  array = mask_array('attention', mask)
  mask = array[:, 0] if array.ndim == 4 and array.shape[1] == 1 else array
  mask = mask[:, 0] if mask.ndim == 3 and mask.shape[1] == 1 else mask
  if mask.ndim not in (2, 3) or mask.shape[0] not in (1, batch) or mask.shape[-1] != size:
    raise UserError(
      f'attention: mask must be [B, S] = [{batch}, {size}], [B, T, S] or [B, 1, T, S], got {_shape(array)}; '
      'pass a mask [T, S] that all rows share as mask[None]'
    )
  return jnp.broadcast_to(mask, (batch, *mask.shape[1:]))


def _structure(mask: jax.Array | Mask) -> Mask:
  """The mask of a memory, [B, 1, S], [B, 1, T, S] or a Mask, as a Mask with an axis B."""
  if isinstance(mask, Mask):
    return mask
  return Mask.array(mask if mask.ndim == 3 else mask[:, 0])


def _check_query(query: Any, memory: Memory, axes: str) -> jax.Array:
  """Returns a query as an array.

  Args:
    query: the query.
    memory: the memory, as `Attention.remember` returns it.
    axes: letters of the axes of the query: BD of one step, BTD of all.

  Raises:
    UserError: if the query does not have these axes, or does not match the memory.
  """
  query = jnp.asarray(query)
  batch = memory.key.shape[0]
  if query.ndim != len(axes) or query.shape[0] != batch:
    raise UserError(
      f'attention: query must be [{", ".join(axes)}] with B = {batch}, as the memory, got {_shape(query)}; add a batch '
      'axis to a single sequence'
    )
  if isinstance(memory.mask, Mask):
    align_mask('attention', memory.mask, (batch,), query.shape[1] if axes == 'BTD' else 1, memory.key.shape[-2])
  elif memory.mask.ndim > 3 and memory.mask.shape[2:-1] != query.shape[1:-1]:
    raise UserError(
      f'attention: the mask of the memory must be [B, S] or [B, T, S] with the T of the queries, got mask '
      f'{_shape(memory.mask[:, 0])} and query {_shape(query)}'
    )
  return query


def _check_fields(attention: Attention) -> None:
  """Raises UserError if the fields of `attention`, an `Attention`, contradict each other or a name is unknown."""
  _check_heads(attention)
  _check_projections(attention)
  _check_positions(attention)
  _check_implementation(attention)


def _check_heads(attention: Attention) -> None:
  heads = attention.heads
  check_heads('attention', attention.head_dim * heads or attention.features, heads)
  if attention.kv_heads < 0 or heads % attention.groups:
    raise UserError(f'attention: kv_heads must be 0 or a divisor of heads={heads}, got kv_heads={attention.kv_heads}')
  if heads > 1 and attention.resolved_alignment.latent:
    raise UserError(f'attention: heads must be 1 for a latent alignment, got heads={heads}')
  if attention.differential and attention.groups % 2:
    raise UserError(
      'attention: differential attention needs pairs of heads, each with its own keys: kv_heads must be even, or '
      f'expected even heads and kv_heads=0, got heads={heads} and kv_heads={attention.kv_heads}'
    )


def _check_projections(attention: Attention) -> None:
  if attention.head_dim and not attention.projects:
    raise UserError(
      f'attention: head_dim must be 0 for one head and score {attention.score!r}, which projects neither query nor '
      f'key, got head_dim={attention.head_dim}'
    )
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


def _check_implementation(attention: Attention) -> None:
  score = attention.scoring_row
  name = attention.implementation
  implementation = get_implementation(name, score, lookup(attention.alignment, ALIGNMENTS, 'alignment'))
  if implementation.unsupported_reason(score, attention.resolved_alignment):
    expected = ', '.join(supported_implementations(score, attention.resolved_alignment))
    raise UserError(
      f"attention: implementation '{name}' does not support dropout on weights; expected dropout=0.0 or one of: "
      f'{expected}'
    )


def _check_positions(attention: Attention) -> None:
  positions = attention.positions
  if positions is None:
    return
  sizes = {'heads': attention.heads, 'features': attention.head_features}
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
  if attention.has_rotary_positions and not attention.resolved_score.supports_rotation:
    expected = ', '.join(name for name, row in SCORES.items() if row.supports_rotation)
    raise UserError(
      f'attention: rotary positions need a score that a rotation of query and key leaves unchanged, '
      f'got {attention.score!r}; expected one of: {expected}'
    )
  if attention.differential and positions.needs_weights:
    raise UserError(
      'attention: differential attention does not support positions that are added to contexts, such as shaw; expected '
      'other positions, or differential=False'
    )
