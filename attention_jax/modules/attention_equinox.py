"""`Attention` as a module of Equinox, over the pure functions of heads.py."""

from typing import Any

import equinox as eqx

from attention_jax.functional.attend import Attended
from attention_jax.modules.heads import attend_heads, init_heads


class Attention(eqx.Module):
  """Attends with all queries; the parameters are those of `attention_jax.Attention`.

  Args:
    query, key: the widths of queries and of the memory.
    features: width F of the projections of all heads together.
    heads: number N of heads.
    score, alignment: a spec string, a table row, or a function.
    implementation: a name of `attention_jax.IMPLEMENTATIONS`.
    rng: a PRNG key, consumed.
  """

  params: dict[str, Any]
  score: Any = eqx.field(static=True)
  alignment: Any = eqx.field(static=True)
  implementation: str = eqx.field(static=True)

  def __init__(
    self, query, key, features=128, heads=1, score='additive', alignment='softmax', implementation='auto', *, rng
  ):
    sizes = {'query': query, 'key': key, 'features': features, 'heads': heads}
    self.params = init_heads(rng, **sizes, score=score, alignment=alignment)
    self.score = score
    self.alignment = alignment
    self.implementation = implementation

  def __call__(self, query, encoded, mask=None, rng=None, deterministic=True) -> Attended:
    """Attends; arguments and result are those of `attend_heads`."""
    options = {'score': self.score, 'alignment': self.alignment, 'implementation': self.implementation}
    return attend_heads(self.params, query, encoded, mask, rng=rng, deterministic=deterministic, **options)
