"""`Attention` as a module of flax.nnx, over the pure functions of heads.py."""

import jax
from flax import nnx

from attention_jax.functional.attend import Attended
from attention_jax.modules.heads import attend_heads, init_heads


class Attention(nnx.Module):
  """Attends with all queries; its arrays have the names and shapes of those of `attention_jax.Attention`.

  Args:
    query, key: the widths of queries and of the memory.
    features: width F of the projections of all heads together.
    heads: number N of heads.
    score, alignment: a spec string, a table row, or a function.
    implementation: a name of `attention_jax.IMPLEMENTATIONS`.
    rngs: the stream 'params' is consumed.
  """

  def __init__(
    self, query, key, features=128, heads=1, score='additive', alignment='softmax', implementation='auto', *, rngs
  ):
    sizes = {'query': query, 'key': key, 'features': features, 'heads': heads}
    params = init_heads(rngs.params(), **sizes, score=score, alignment=alignment)
    self.params = nnx.data(jax.tree.map(nnx.Param, params))
    self.options = nnx.static((('score', score), ('alignment', alignment), ('implementation', implementation)))

  def __call__(self, query, encoded, mask=None, rng=None, deterministic=True) -> Attended:
    """Attends; arguments and result are those of `attend_heads`."""
    params = nnx.as_pure(self.params)
    options = dict(self.options)
    return attend_heads(params, query, encoded, mask, rng=rng, deterministic=deterministic, **options)
