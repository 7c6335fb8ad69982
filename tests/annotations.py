"""Enforces the jaxtyping annotations of the pure functions."""

import jaxtyping


def enforce_annotations() -> None:
  """Makes every call of attention_jax.functional check shapes and dtypes. Call it before the package is imported."""
  jaxtyping.install_import_hook(
    'attention_jax.functional', 'beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))'
  )
