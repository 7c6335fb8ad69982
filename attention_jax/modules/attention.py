"""The flax module that owns the parameters of one attention: any score, any alignment, any number of heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional import attend as functional
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Carry, Memory
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row, lookup
from attention_jax.kernels import implementation_of


class RowParams(nn.Module):
  """The learned parameters of a table row, each with a leading axis of heads."""

  row: Row
  heads: int

  @nn.compact
  def __call__(self, query: int, key: int, features: int) -> dict[str, jax.Array]:
    sizes = {'query': query, 'key': key, 'features': features}

    def initial(rng, name):
      return jax.vmap(lambda rng: init_row(rng, self.row, sizes)[name])(jax.random.split(rng, self.heads))

    return {name: self.param(name, initial, name) for name in self.row.params}


class HeadKernel(nn.Module):
  """A linear projection [D] -> [N, F] without bias; returns its kernel [N, D, F] for an input of D features."""

  heads: int
  features: int

  @nn.compact
  def __call__(self, size: int) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=1, out_axis=2, batch_axis=(0,))
    return self.param('kernel', init, (self.heads, size, self.features))


class Attention(nn.Module):
  """Attention over a memory, one query at a time or all at once.

  One head is the form of the papers before 2017: the query and the key are projected only if the score's row says so,
  and the value never is. With more heads the query, the key and the value are projected to `features / heads` each,
  and the contexts are joined and projected to `features`.

  Shapes: query [B, D] for one step and [B, T, D] for all; encoded [B, S, D]; mask [B, S], or [B, T, S] for `parallel`.
  Weights are [B, S] and [B, T, S] for one head; with more, an axis N stands after B.

  Attributes:
    score, alignment: a spec string, a table row, or a function of the same signature.
    features: the width F of the projections.
    heads: N.
    implementation: a name of `attention_jax.IMPLEMENTATIONS`.
    dtype: of the computation; weights are float32 in any case.
  """

  score: str = 'additive'
  alignment: str = 'softmax'
  features: int = 128
  heads: int = 1
  implementation: str = 'xla'
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    if self.heads < 1 or self.features % self.heads:
      raise UserError(f'attention: features={self.features} cannot be divided among heads={self.heads}')
    self.score_row = self.score_of
    self.alignment_row = self.alignment_of
    self.score_params = RowParams(self.score_row, self.heads)
    self.alignment_params = RowParams(self.alignment_row, self.heads)
    self.run = implementation_of(self.implementation, self.score_row, self.alignment_row)
    if self.heads > 1 and self.alignment_row.latent:
      raise UserError(f'attention: a latent alignment is over one position, got heads={self.heads}; possible: heads=1')
    if self.projects:
      self.query_kernel = HeadKernel(self.heads, self.features // self.heads)
      self.key_kernel = HeadKernel(self.heads, self.features // self.heads)
    if self.heads > 1:
      self.value_kernel = HeadKernel(self.heads, self.features // self.heads)
      self.join = nn.Dense(self.features, use_bias=False, dtype=self.dtype)

  @property
  def score_of(self) -> Row:
    """The row of the score; known without parameters."""
    return lookup(self.score, SCORES, 'score')

  @property
  def projects(self) -> bool:
    return self.heads > 1 or self.score_of.project

  @property
  def recurrent(self) -> bool:
    """Whether its queries must come in order."""
    return self.score_of.recurrent or self.alignment_of.recurrent

  @property
  def alignment_of(self) -> Row:
    """The row of the alignment; known without parameters."""
    return lookup(self.alignment, ALIGNMENTS, 'alignment')

  def remember(self, encoded: jax.Array, mask: jax.Array) -> Memory:
    """The memory of a source, prepared once: key [B, N, S, F] projected, value [B, N, S, V], mask [B, 1, S]."""
    seen = functional.hide(Memory(encoded, encoded, mask)).key.astype(self.dtype)

    def heads(kernel_of):
      return jnp.einsum('bsd,ndf->bnsf', seen, kernel_of(seen.shape[-1]).astype(self.dtype))

    key = heads(self.key_kernel) if self.projects else seen[:, None]
    value = heads(self.value_kernel) if self.heads > 1 else seen[:, None]
    return Memory(key, value, mask[:, None])

  def init_carry(self, memory: Memory) -> Carry:
    """The carry before the first query: every leaf [B, N, ...]."""
    carry = functional.init_carry(self.score_row, self.alignment_row, memory.key.shape[-2])
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*memory.key.shape[:2], *leaf.shape)), carry)

  def carry_at_end(self, memory: Memory) -> Carry:
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
    self, carry: Carry, query: jax.Array, memory: Memory, deterministic: bool = True
  ) -> tuple[Carry, Attended]:
    """One step: query [B, D] -> context [B, V], weights [B, S]."""

    def step(params, carry, query, memory, rng):
      return self.run.attend_step(
        self.score_row, self.alignment_row, params, carry, query, memory, rng=rng, deterministic=deterministic
      )

    carry, attended = self._over_heads(step, carry, query, memory, deterministic)
    return carry, self._joined(attended)

  def parallel(self, query: jax.Array, memory: Memory, deterministic: bool = True) -> Attended:
    """All steps: query [B, T, D] -> context [B, T, V], weights [B, T, S]. Scanned where the law wants it."""

    def steps(params, _, query, memory, rng):
      return self.run.attend(
        self.score_row, self.alignment_row, params, query, memory, rng=rng, deterministic=deterministic
      )

    return self._joined(self._over_heads(steps, (), query, memory, deterministic))

  def _over_heads(self, fn, carry, query, memory: Memory, deterministic: bool):
    """fn(params, carry, query, memory, rng) under vmaps over batch and heads."""
    query = query.astype(self.dtype)
    size, own = query.shape[-1], self.features // self.heads
    params = {
      'score': self.score_params(own if self.projects else size, memory.key.shape[-1], own),
      'alignment': self.alignment_params(size, memory.key.shape[-1], own),
    }
    if self.projects:
      params['query'] = self.query_kernel(size)
    # Single numbers and what alignments learn stay float32: bfloat16 would move them in steps that matter.
    cast = lambda p: p if p.ndim == 1 else p.astype(self.dtype)
    params = {name: p if name == 'alignment' else jax.tree.map(cast, p) for name, p in params.items()}
    shared = Memory(0, 0, None)
    over_heads = jax.vmap(fn, in_axes=(0, 0, None, shared, 0))
    over_batch = jax.vmap(over_heads, in_axes=(None, 0, 0, 0, 0))
    memory = memory._replace(mask=memory.mask[:, 0])
    return over_batch(params, carry, query, memory, self._rngs(memory.key.shape[:2], deterministic))

  def _rngs(self, shape: tuple[int, int], deterministic: bool):
    row = self.alignment_row
    draws = 'rng' in self.score_row.needs or ('rng' in row.needs and not (deterministic and row.at_test))
    return jax.random.split(self.make_rng('attention'), shape) if draws else None

  def _joined(self, attended: Attended) -> Attended:
    context, weights = attended
    if self.heads == 1:
      return Attended(context[:, 0], weights[:, 0])
    joined = jnp.moveaxis(context, 1, -2)
    return Attended(self.join(joined.reshape(*joined.shape[:-2], -1)), weights)
