"""The flax module that owns the parameters of one attention: any score, any alignment, any number of heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional import attend as functional
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Carry, Memory
from attention_jax.functional.dropout import with_dropout
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row_params, lookup
from attention_jax.kernels.api import IMPLEMENTATIONS, get_implementation
from attention_jax.kernels.sharding import batch_mesh_axis
from attention_jax.modules.linear import Dense, product
from attention_jax.modules.positions import Positions
from attention_jax.specs import Count, Fraction, Size


class RowParams(nn.Module):
  """The learned parameters of a table row, each with a leading axis of heads."""

  row: Row
  heads: int

  @nn.compact
  def __call__(self, query: int, key: int, features: int) -> dict[str, jax.Array]:
    sizes = {'query': query, 'key': key, 'features': features}

    def initial(rng, name):
      return jax.vmap(lambda rng: init_row_params(rng, self.row, sizes)[name])(jax.random.split(rng, self.heads))

    return {name: self.param(name, initial, name) for name in self.row.params}


def into_heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [B, T, D], kernel [N, D, F] -> [B, N, T, F]."""
  heads, size, features = kernel.shape
  y = product(x, jnp.moveaxis(kernel, 0, 1).reshape(size, heads * features))
  return jnp.moveaxis(y.reshape(*x.shape[:-1], heads, features), -2, 1)


class HeadKernel(nn.Module):
  """A linear projection [D] -> [N, F] without bias; returns its kernel [N, D, F] for an input of D features.

  It starts as one layer of D -> N F does (Glorot & Bengio 2010), however many heads share its output.
  """

  heads: int
  features: int

  @nn.compact
  def __call__(self, size: int) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=1, out_axis=(0, 2))
    return self.param('kernel', init, (self.heads, size, self.features))


class Attention(nn.Module):
  """Attention over a memory, one query at a time or all at once.

  One head is the form of the papers before 2017: the query and the key are projected only if the score's row says so,
  and the value never is. With more heads, or where `project_values` asks for it, the query, the key and the value are
  projected to `features / heads` each, and the contexts are joined and projected to `features`.

  Shapes: query [B, D] for one step and [B, T, D] for all; encoded [B, S, D]; mask [B, S], or [B, T, S] for `parallel`.
  Weights are [B, S] and [B, T, S] for one head; with more, an axis N stands after B.

  Attributes:
    score, alignment: a spec string, a table row, or a function of the same signature.
    features: the width F of the projections.
    heads: N.
    kv_heads: G, heads of keys and values, each shared by N / G heads of queries (Ainslie et al. 2023; with one,
      Shazeer 2019); 0 means as many as heads.
    implementation: a name of `attention_jax.IMPLEMENTATIONS`.
    dropout: on weights, while training.
    project_values: whether one head projects as several do.
    positions: a module of modules.positions, for attention of a sequence to itself.
    joined: how large joined contexts are at first: the variance of their kernel, times D.
    dtype: of the computation; weights are float32 in any case.
  """

  score: str = 'additive'
  alignment: str = 'softmax'
  features: Size = 128
  heads: Size = 1
  kv_heads: Count = 0
  implementation: str = 'xla'
  dropout: Fraction = 0.0
  project_values: bool = False
  positions: Positions | None = None
  joined: float = 1.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    if self.heads < 1 or self.features % self.heads:
      raise UserError(f'attention: features={self.features} cannot be divided among heads={self.heads}')
    if self.kv_heads < 0 or self.heads % self.groups:
      raise UserError(f'attention: heads={self.heads} cannot share kv_heads={self.kv_heads}; possible: a divisor, or 0')
    self.score_row = self.resolved_score
    self.alignment_row = self.resolved_alignment
    self.score_params = RowParams(self.score_row, self.heads)
    self.alignment_params = RowParams(self.alignment_row, self.heads)
    self.run = get_implementation(self.implementation, self.score_row, lookup(self.alignment, ALIGNMENTS, 'alignment'))
    if self.run.unsupported_reason(self.score_row, self.alignment_row):
      able = [
        name for name, way in IMPLEMENTATIONS.items() if not way.unsupported_reason(self.score_row, self.alignment_row)
      ]
      possible = f"'{self.implementation}' has no dropout on weights; possible: dropout=0.0, or {', '.join(able)}"
      raise UserError(f'attention: implementation {possible}')
    if self.heads > 1 and self.alignment_row.latent:
      raise UserError(f'attention: a latent alignment is over one position, got heads={self.heads}; possible: heads=1')
    own = self.features // self.heads
    if self.projects:
      self.query_kernel = HeadKernel(self.heads, own)
      self.key_kernel = HeadKernel(self.groups, own)
    if self.projects_values:
      self.value_kernel = HeadKernel(self.groups, own)
      init = nn.initializers.variance_scaling(self.joined, 'fan_in', 'truncated_normal')
      self.join = Dense(self.features, use_bias=False, dtype=self.dtype, kernel_init=init)
    if self.rotates_products and not self.score_row.rotation_invariant:
      possible = ', '.join(name for name, row in SCORES.items() if row.rotation_invariant)
      raise UserError(f'attention: these positions turn q and k of a product, not {self.score!r}; possible: {possible}')

  @property
  def groups(self) -> int:
    """Heads of keys and values."""
    return self.kv_heads or self.heads

  @property
  def rotates_products(self) -> bool:
    return self.positions is not None and self.positions.requires_product

  @property
  def resolved_score(self) -> Row:
    """The row of the score; known without parameters."""
    return lookup(self.score, SCORES, 'score')

  @property
  def projects(self) -> bool:
    return self.projects_values or self.resolved_score.project

  @property
  def projects_values(self) -> bool:
    return self.heads > 1 or self.project_values or self.positions is not None

  @property
  def is_recurrent(self) -> bool:
    """Whether its queries must come in order."""
    return self.resolved_score.is_recurrent or self.resolved_alignment.is_recurrent

  def check_step_support(self) -> None:
    """Raises: UserError where queries that come one at a time are not computed by the implementation asked for."""
    if IMPLEMENTATIONS[self.implementation].attend_step is None:
      able = [name for name, way in IMPLEMENTATIONS.items() if way.attend_step]
      able = [
        name
        for name in able
        if not IMPLEMENTATIONS[name].unsupported_reason(self.resolved_score, self.resolved_alignment)
      ]
      mistake = f"implementation '{self.implementation}' computes many queries at once, this decoder asks for one"
      raise UserError(f'attention: {mistake}; possible: {", ".join(able)}')

  @property
  def resolved_alignment(self) -> Row:
    """The row of the alignment; known without parameters."""
    return with_dropout(lookup(self.alignment, ALIGNMENTS, 'alignment'), self.dropout)

  def remember(
    self, encoded: jax.Array, mask: jax.Array, at: jax.Array | None = None, value: jax.Array | None = None
  ) -> Memory:
    """The memory of a source, prepared once: key [B, G, S, F] projected, value [B, G, S, V], mask [B, 1, S].

    Args:
      at: [S], where they stand, for attention that knows of positions.
      value: [B, S, V], what contexts are made of if not of `encoded`.
    """
    seen = functional.zero_masked_memory(Memory(encoded, encoded if value is None else value, mask))

    def heads(x, kernel_of):
      x = x.astype(self.dtype)
      return into_heads(x, kernel_of(x.shape[-1]).astype(self.dtype)) if kernel_of else x[:, None]

    key = heads(seen.key, self.key_kernel if self.projects else None)
    value = heads(seen.value, self.value_kernel if self.projects_values else None)
    return Memory(key if self.positions is None else self.positions.rotate(key, at), value, mask[:, None])

  def context_width(self, memory: Memory) -> int:
    """How wide contexts are."""
    return self.features if self.projects_values else memory.value.shape[-1]

  def init_carry(self, memory: Memory) -> Carry:
    """The carry before the first query: every leaf [B, N, ...]."""
    carry = functional.init_carry(self.score_row, self.alignment_row, memory.key.shape[-2])
    shape = (memory.key.shape[0], self.heads)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*shape, *leaf.shape)), carry)

  def carry_at_last_position(self, memory: Memory) -> Carry:
    """The carry of an alignment with a lookback that stands at the last position of the memory."""
    carry = self.init_carry(memory)
    score_state, state = carry.state
    return carry._replace(state=(score_state, jax.tree.map(lambda leaf: jnp.flip(leaf, -1), state)))

  def observe(self, carry: Carry, log_likelihood: jax.Array) -> Carry:
    """The carry of a latent alignment once the output of its step is known: log_likelihood [B, S] of each position."""
    observe = jax.vmap(jax.vmap(self.alignment_row.latent.observe))
    score_state, state = carry.state
    return carry._replace(state=(score_state, observe(state, log_likelihood[:, None])))

  def __call__(
    self, carry: Carry, query: jax.Array, memory: Memory, deterministic: bool = True, at: jax.Array | None = None
  ) -> tuple[Carry, Attended]:
    """One step: query [B, D] -> context [B, V], weights [B, S]. at []: where the query stands."""

    def step(params, carry, query, memory, bias, rng):
      carry, attended = (self.run.attend_step or functional.attend_step)(
        self.score_row,
        self.alignment_row,
        params,
        carry,
        query[0],
        memory,
        bias=None if bias is None else bias[0],
        rng=rng,
        deterministic=deterministic,
      )
      return carry, jax.tree.map(lambda x: x[None], attended)

    at = None if at is None else at[None]
    carry, attended = self._over_heads(step, carry, query[:, None], memory, deterministic, at)
    return carry, jax.tree.map(lambda x: jnp.squeeze(x, -2), self._joined(attended, at))

  def parallel(
    self,
    query: jax.Array,
    memory: Memory,
    deterministic: bool = True,
    at: jax.Array | None = None,
    return_weights: bool = True,
  ) -> Attended:
    """All steps: query [B, T, D] -> context [B, T, V], weights [B, T, S]. Scanned where the law wants it.

    Args:
      at: [T], where the queries stand.
      return_weights: whether they are wanted, which implementations without any refuse.
    """
    return_weights = return_weights or (self.positions is not None and self.positions.needs_weights)

    def steps(params, _, query, memory, bias, rng):
      return self.run.attend(
        self.score_row,
        self.alignment_row,
        params,
        query,
        memory,
        bias=bias,
        rng=rng,
        deterministic=deterministic,
        return_weights=return_weights,
      )

    return self._joined(self._over_heads(steps, (), query, memory, deterministic, at), at)

  def _over_heads(self, fn, carry, query, memory: Memory, deterministic: bool, at: jax.Array | None):
    """fn(params, carry, query [T, D], memory, bias, rng) lifted over the batch, over heads of keys and over those that
    share one; what it gives has axes B, N."""
    query = query.astype(self.dtype)
    size, own, key = query.shape[-1], self.features // self.heads, memory.key.shape[-1]
    # With positions inside, queries are projected and turned here, and nothing sees them before that.
    inside = self.positions is not None
    params = {
      'score': self.score_params(own if self.projects else size, key, own),
      'alignment': self.alignment_params(own if inside else size, key, own),
    }
    if self.projects:
      params['query'] = self.query_kernel(size)
    # Single numbers and what alignments learn stay float32: bfloat16 would move them in steps that matter.
    cast = lambda p: p if p.ndim == 1 else p.astype(self.dtype)
    params = {name: p if name == 'alignment' else jax.tree.map(cast, p) for name, p in params.items()}
    bias, each, over_batch = None, None, 0  # heads share a query that each of them projects itself
    if inside and at is None:
      raise UserError('attention: with positions it must be told where queries stand, by at')
    if inside:
      query = self.positions.rotate(into_heads(query, params.pop('query')), at)
      bias, each = self.positions.bias(query, at, memory.key.shape[-2]), 0
      query = self._grouped(query, 1)
    if bias is not None:
      over_batch = 0 if bias.ndim == 4 else None
      bias = self._grouped(bias, bias.ndim - 3)
    params = self._grouped(params, 0)
    carry, rngs = self._grouped((carry, self._rngs((query.shape[0], self.heads), deterministic)), 1)
    run = jax.vmap(fn, in_axes=(0, 0, each, None, 0, 0), axis_size=self.heads // self.groups)
    run = jax.vmap(run, in_axes=(0, 0, each, Memory(0, 0, None), 0, 0))
    run = jax.vmap(run, in_axes=(None, 0, 0, 0, over_batch, 0), spmd_axis_name=batch_mesh_axis(query.shape[0]))
    given = run(params, carry, query, memory._replace(mask=memory.mask[:, 0]), bias, rngs)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], self.heads, *x.shape[3:]), given)

  def _grouped(self, tree, axis: int):
    """Leaves with N on this axis -> G, N / G."""
    shape = (self.groups, self.heads // self.groups)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :]), tree)

  def _rngs(self, shape: tuple[int, int], deterministic: bool):
    row = self.alignment_row
    draws = 'rng' in self.score_row.required_inputs or (
      'rng' in row.required_inputs and not (deterministic and row.at_test)
    )
    return jax.random.split(self.make_rng('attention'), shape) if draws else None

  def _joined(self, attended: Attended, at: jax.Array | None) -> Attended:
    """Heads [B, N, T, ...] side by side."""
    context, weights = attended
    if not self.projects_values:
      return Attended(context[:, 0], None if weights is None else weights[:, 0])
    if self.positions is not None and (shift := self.positions.shift(weights, at)) is not None:
      context = context + shift.astype(context.dtype)
    joined = jnp.moveaxis(context, 1, -2)
    joined = self.join(joined.reshape(*joined.shape[:-2], -1))
    return Attended(joined, weights if weights is None or self.heads > 1 else weights[:, 0])
