"""PRNG keys that are arguments of attention."""

from typing import Any

import jax

from attention_jax.errors import UserError
from attention_jax.functional.masking import Dimension


def check_rng(caller: str, rng: Any, is_required: bool = False) -> None:
  """Raises UserError unless `rng` is a single PRNG key; None is allowed unless `is_required`."""
  if rng is None and not is_required:
    return
  try:
    jax.eval_shape(jax.random.split, rng)
  except (TypeError, ValueError) as error:
    raise UserError(f'{caller}: rng must be a single PRNG key, such as jax.random.key(0), got {rng!r}') from error


def split_rng(rng: jax.Array | None, num_queries: Dimension) -> jax.Array | None:
  """Returns one rng per query, or None without an rng."""
  return None if rng is None else jax.random.split(rng, num_queries)
