"""Symbolic sizes, with which jax.export exports a function for any number of queries and positions."""

from jax.export import is_symbolic_dim

from attention_jax.errors import UserError
from attention_jax.functional.attend import Problem

# Implementations that support symbolic sizes for every pair of score and alignment. 'factored' supports them for
# additive scores only.
ANY_SIZE = ('xla', 'chunked', 'auto')


def has_symbolic_sizes(problem: Problem) -> bool:
  """Returns whether the number of queries or the number of positions is symbolic."""
  return is_symbolic_dim(problem.query.shape[-2]) or is_symbolic_dim(problem.memory.key.shape[-2])


def require_fixed_sizes(implementation: str, problem: Problem) -> None:
  """Raises UserError, with the name of the implementation, for symbolic sizes."""
  if has_symbolic_sizes(problem):
    raise UserError(
      f"implementation '{implementation}' needs fixed numbers of queries and positions, got "
      f'T={problem.query.shape[-2]} and S={problem.memory.key.shape[-2]}; expected one of: {", ".join(ANY_SIZE)}'
    )
