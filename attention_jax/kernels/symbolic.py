"""Symbolic sizes, with which jax.export exports a function for any number of queries and positions."""

import jax
from jax.export import is_symbolic_dim

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory

# Implementations that support symbolic sizes for every pair of score and alignment. 'factored' supports them for
# additive scores only.
ANY_SIZE = ('xla', 'chunked', 'auto')


def has_symbolic_sizes(query: jax.Array, memory: Memory) -> bool:
  """Returns whether the number of queries or the number of positions is symbolic."""
  return is_symbolic_dim(query.shape[0]) or is_symbolic_dim(memory.key.shape[0])


def require_fixed_sizes(implementation: str, query: jax.Array, memory: Memory) -> None:
  """Raises UserError for symbolic sizes.

  Args:
    implementation: name of the implementation, for the error.
    query: queries [T, D].
    memory: keys and values of S positions.
  """
  if has_symbolic_sizes(query, memory):
    raise UserError(
      f"implementation '{implementation}' needs fixed numbers of queries and positions, got T={query.shape[0]} and "
      f'S={memory.key.shape[0]}; expected one of: {", ".join(ANY_SIZE)}'
    )
