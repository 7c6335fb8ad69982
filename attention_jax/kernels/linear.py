"""Implementation 'linear': weights proportional to q . k >= 0, with the sum over positions computed before the queries.

Σₛ (q · kₛ) vₛ / Σₛ q · kₛ = q (Σₛ kₛ vₛᵀ) / (q · Σₛ kₛ): time and memory grow with T + S, not T S (Katharopoulos et al.
2020, equations 5 and 6). This requires that all queries attend to the same positions. With a mask per query, a bias or
requested weights, the definition is computed.
"""

import jax.numpy as jnp

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Problem, lifted, score_terms, zero_masked_memory
from attention_jax.functional.dense import proportional
from attention_jax.functional.masking import accumulation_dtype, zero_masked
from attention_jax.functional.table import Product, Row


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported, or ''."""
  if not (isinstance(score.form, Product) and score.form.nonnegative):
    return 'the score is not a product q . k of vectors without negative entries'
  if alignment.fn is not proportional or alignment.at_test:
    return 'the alignment is not proportional, or dropout, an edit or a test-time counterpart changes it'
  return ''


def attend(problem: Problem) -> Attended:
  """Attends with all queries at once."""
  if problem.return_weights or problem.bias is not None or not problem.memory.mask.is_shared:
    return definition.attend(problem)
  memory = zero_masked_memory(problem.memory, 1)
  q, k = score_terms(problem._replace(memory=memory))
  dtype = accumulation_dtype(q, k, memory.value)
  k = zero_masked(k, memory.mask.any_query(1, k.shape[0])).astype(dtype)
  sums = q.astype(dtype) @ jnp.concatenate([k.T @ memory.value.astype(dtype), k.sum(0)[:, None]], axis=1)
  total = sums[:, -1:]
  return Attended((sums[:, :-1] / jnp.where(total > 0, total, 1.0)).astype(memory.value.dtype), None)


attend_batch = lifted(attend)
