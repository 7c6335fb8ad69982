"""Frozen parameters: they keep their initial values, and no gradient of them is computed.

`training.frozen='encoder, embedding.table'` has the dotted names of arrays, or of modules with all of their arrays.
Parameters that `training.anneal` names follow their schedules nevertheless.
"""

import dataclasses
from typing import Any

import jax
import optax

from attention_jax.errors import UserError
from attention_jax.training.loss import Loss

TRAINED, FROZEN = 'trained', 'frozen'


def parse_frozen(spec: str) -> tuple[str, ...]:
  """Returns the names of a spec: 'encoder, embedding' -> ('encoder', 'embedding')."""
  return tuple(filter(None, (name.strip() for name in spec.split(','))))


def check_frozen(spec: str, params: Any) -> None:
  """Checks the names of a spec.

  Args:
    spec: names, separated by commas; '' freezes nothing.
    params: the parameters of the model, or their shapes.

  Raises:
    UserError: for a name that is neither a parameter nor a module with parameters, and if all parameters are frozen.
  """
  names = [_dotted(path) for path, _ in jax.tree.leaves_with_path(params)]
  frozen = parse_frozen(spec)
  for name in frozen:
    if not any(_is_part(name, parameter) for parameter in names):
      modules = dict.fromkeys(parameter.partition('.')[0] for parameter in names)
      raise UserError(
        f'training.frozen: the model has no module or array {name!r}; expected one of: {", ".join(modules)}, or the '
        'dotted name of a part of one'
      )
  if all(any(_is_part(name, parameter) for name in frozen) for parameter in names):
    raise UserError(f'training.frozen={spec!r} leaves no parameter to train')


def freeze_optimizer(optimizer: optax.GradientTransformation, spec: str) -> optax.GradientTransformation:
  """Returns an optimiser that neither updates frozen parameters nor keeps a state for them.

  Args:
    optimizer: an optimiser. What it computes over all gradients, such as a norm, then excludes the frozen parameters.
    spec: names, as for `check_frozen`.
  """
  if not parse_frozen(spec):
    return optimizer
  return optax.partition({TRAINED: optimizer, FROZEN: optax.set_to_zero()}, lambda params: _labels(params, spec))


def freeze_loss(loss: Loss, spec: str) -> Loss:
  """Returns the loss with zero gradients with respect to frozen parameters, which cost no computation.

  Args:
    loss: a loss.
    spec: names, as for `check_frozen`.
  """
  if not parse_frozen(spec):
    return loss

  def with_frozen(params: Any, *args: Any) -> dict[str, jax.Array]:
    labels = _labels(params, spec)
    params = jax.tree.map(lambda x, label: jax.lax.stop_gradient(x) if label == FROZEN else x, params, labels)
    return loss.fn(params, *args)

  return dataclasses.replace(loss, fn=with_frozen)


def _labels(params: Any, spec: str) -> Any:
  """TRAINED or FROZEN for every parameter."""
  frozen = parse_frozen(spec)

  def label(path, _):
    return FROZEN if any(_is_part(name, _dotted(path)) for name in frozen) else TRAINED

  return jax.tree.map_with_path(label, params)


def _dotted(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='.')


def _is_part(name: str, parameter: str) -> bool:
  """Whether a parameter is `name` itself, or in the module of that name."""
  return f'{parameter}.'.startswith(f'{name}.')
