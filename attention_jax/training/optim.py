"""Optimisers and learning-rate schedules, chosen by spec strings: 'adam(b2=0.98)', 'rsqrt(peak=1e-3, warmup=4000)'.

A schedule maps the update number n = 1, 2, ... to a rate. A row of SCHEDULES is `f(*, options) -> schedule`, and its
keyword arguments are the options that a spec may set. `steps` has no default: it is the length of the run, unless the
spec sets another.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from attention_jax.errors import UserError
from attention_jax.specs import Option, Range, bind
from attention_jax.training.frozen import freeze_optimizer

Schedule = Callable[[Any], Any]


def _constant(*, rate: float = 1e-3, warmup: int = 0) -> Schedule:
  return _warm(optax.constant_schedule(rate), rate, warmup)


def _rsqrt(*, peak: float = 1e-3, warmup: int = 4000) -> Schedule:
  return _warm(lambda count: peak * jnp.sqrt(max(warmup, 1) / (count + max(warmup, 1))), peak, warmup)


def _cosine(*, steps: int, peak: float = 1e-3, warmup: int = 0, end: float = 0.0) -> Schedule:
  if not peak:
    raise ValueError(f'peak must be greater than 0, got {peak}')
  return _warm(optax.cosine_decay_schedule(peak, max(steps - warmup, 1), end / peak), peak, warmup)


def _linear(*, steps: int, peak: float = 1e-3, warmup: int = 0, end: float = 0.0) -> Schedule:
  return _warm(optax.linear_schedule(peak, end, max(steps - warmup, 1)), peak, warmup)


def _wsd(*, steps: int, peak: float = 1e-3, warmup: int = 0, cooldown: float = 0.2, end: float = 0.0) -> Schedule:
  """Warm-up, constant, then linear to `end` in the last `cooldown` of the run.

  Hu et al. 2024 (WSD), whose decay is exponential; the linear one is that of Hägele et al. 2024.
  """
  if not 0 <= cooldown <= 1:
    raise ValueError(f'cooldown must be a share of the run, between 0 and 1, got {cooldown}')
  after_warmup = max(steps - warmup, 1)
  length = min(round(cooldown * steps), after_warmup)
  return _warm(optax.linear_schedule(peak, end, length, after_warmup - length), peak, warmup)


def _halve(*, rate: float = 1.0, after: int = 10_000, every: int = 1_000) -> Schedule:
  """Constant before update `after`, halved at it and then every `every` updates (Luong et al. 2015)."""
  if every < 1:
    raise ValueError(f'every must be at least 1, got {every}')
  return lambda n: rate * 0.5 ** jnp.maximum(0, jnp.floor((n - after) / every) + 1)


def _warm(schedule: Schedule, peak: float, warmup: int) -> Schedule:
  """Linear from peak / warmup at the first update to peak at update `warmup`, from which `schedule` counts."""
  return optax.join_schedules([lambda n: peak * n / max(warmup, 1), schedule], [warmup])


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
  'constant': _constant,  # after a warm-up of `warmup` updates
  # Peak at update `warmup`, then proportional to 1 / sqrt(n), or to 1 / sqrt(n + 1) without a warm-up (Vaswani et al.
  # 2017).
  'rsqrt': _rsqrt,
  'cosine': _cosine,
  'linear': _linear,
  'wsd': _wsd,
  'halve': _halve,
}


# Names of the layers that compute the logits, in the models of all systems.
OUTPUT_LAYERS = frozenset(['bits', 'classifier', 'labels', 'output'])


@functools.wraps(optax.contrib.muon)
def _muon(**options) -> optax.GradientTransformation:
  """Muon for the kernels of hidden layers, see `_hidden_kernels`; Adam for other parameters (Jordan et al. 2024).

  `weight_decay` applies to those kernels, `adam_weight_decay` to all other parameters.
  """
  return optax.contrib.muon(**options, muon_weight_dimension_numbers=_hidden_kernels)


def _hidden_kernels(params: Any) -> Any:
  """Dimension numbers for Muon of hidden kernels [D, F], and of all arrays [N, D, F] with N heads; None for others."""

  def dimension_numbers(path, leaf):
    names = [getattr(key, 'key', str(key)) for key in path]
    if leaf.ndim == 3:
      return optax.contrib.MuonDimensionNumbers(1, (0, 2))
    is_hidden = leaf.ndim == 2 and names[-1] == 'kernel' and OUTPUT_LAYERS.isdisjoint(names)
    return optax.contrib.MuonDimensionNumbers() if is_hidden else None

  return jax.tree_util.tree_map_with_path(dimension_numbers, params)


# Options that are the decay of a moving average, or of a sum of gradients, such as the momentum of sgd. With 1 an
# average would never change, and a sum would never forget a gradient; above 1 both would diverge.
DECAY_OPTIONS = frozenset(['adam_b1', 'adam_b2', 'b1', 'b2', 'beta', 'decay', 'momentum', 'rho'])

SUPPLIED_OPTIONS = ('learning_rate', 'muon_weight_dimension_numbers', 'weight_decay_mask')  # a spec may not set them

# Types of the options that are None by default.
Precision = Literal['bfloat16', 'float16', 'float32', None]
OPTIONAL = {
  'accumulator_dtype': Precision,
  'adam_learning_rate': float | None,
  'consistent_rms': float | None,
  'mask': Literal['all', 'kernels'],  # a key of MASKS
  'momentum': float | None,
  'mu_dtype': Precision,
  'weight_decay_rate': float | None,
}

# Modules whose parameters have a leading axis of heads (head_params.RowParams): shape [N] is one scalar per head.
PER_HEAD_MODULES = ('score_params', 'alignment_params')
UNDECAYED = frozenset(['bias', 'embedding', 'of_keys', 'of_values', 'place', 'table'])  # embeddings of words, positions


def _are_kernels(params: Any) -> Any:
  """Whether weight decay applies to each array: not to biases, gains and other vectors, nor to embeddings."""

  def is_kernel(path, leaf):
    names = [getattr(key, 'key', str(key)) for key in path]
    axes = leaf.ndim - any(name in (*PER_HEAD_MODULES, 'heads') for name in names[:-1])
    return axes > 1 and names[-1] not in UNDECAYED

  return jax.tree_util.tree_map_with_path(is_kernel, params)


MASKS = {'all': None, 'kernels': _are_kernels}  # option `mask`: the parameters to which weight decay applies

OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
  'adabelief': optax.adabelief,
  'adadelta': optax.adadelta,
  'adafactor': optax.adafactor,
  'adagrad': optax.adagrad,
  'adam': optax.adam,
  'adamw': optax.adamw,
  'lamb': optax.lamb,
  'lion': optax.lion,
  'muon': _muon,
  'nadam': optax.nadam,
  'radam': optax.radam,
  'rmsprop': optax.rmsprop,
  'sgd': optax.sgd,
}


def make_schedule(spec: str, steps: int) -> Schedule:
  """Builds a schedule.

  Args:
    spec: name and options of a row of SCHEDULES.
    steps: length of the run, in updates.

  Returns:
    A function from the update number n = 1, 2, ... to the rate.

  Raises:
    UserError: for an unknown name or option, and for a value that is not allowed.
  """
  return _build(spec, SCHEDULES, 'schedule', {'steps': steps}, lambda schedule: jax.eval_shape(schedule, 1))


def describe_warmup(spec: str, steps: int) -> str:
  """Returns a line about a warm-up that does not end within the run, or ''.

  Args:
    spec: as for `make_schedule`, valid.
    steps: length of the run, in updates.
  """
  _, function, options = bind(
    spec, SCHEDULES, 'schedule', lambda function: _option_schema(function, {'steps': steps}, ())
  )
  parameters = inspect.signature(function).parameters
  warmup = options.get('warmup', parameters['warmup'].default if 'warmup' in parameters else 0)
  if warmup <= steps:
    return ''
  return (
    f'training.schedule {spec!r}: the warm-up of {warmup} updates is longer than the run of {steps}; the learning rate '
    f'stays below its peak'
  )


def make_optimizer(spec: str, schedule: Schedule, clip: float = 0.0, frozen: str = '') -> optax.GradientTransformation:
  """Builds an optimiser.

  Args:
    spec: name and options of a row of OPTIMIZERS.
    schedule: the learning rate of each update.
    clip: bound of the gradients' global norm; 0 does not clip.
    frozen: names of parameters that keep their values, see frozen.py.

  Returns:
    The optimiser, an optax transformation.

  Raises:
    UserError: for an unknown name or option, and for a value that is not allowed.
  """

  def rate(count):
    return schedule(count + 1)  # optax counts the updates already made

  optimizer = _build(spec, OPTIMIZERS, 'optimizer', {'learning_rate': rate}, _one_update, fixed=SUPPLIED_OPTIONS)
  clipped = optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer
  return freeze_optimizer(clipped, frozen)


def _build(
  spec: str,
  table: Mapping[str, Callable],
  kind: str,
  supplied: Mapping[str, Any],
  probe: Callable[[Any], Any],
  fixed: Collection[str] = (),
) -> Any:
  """Calls the function of `table` that `spec` selects.

  Args:
    spec: name and options.
    table: functions by name.
    kind: the kind of entry, for error messages.
    supplied: arguments for every function that takes them; a spec may override those that are not `fixed`.
    probe: uses the result once, because some options raise only then.
    fixed: names that a spec may not set.

  Returns:
    The result of the function.

  Raises:
    UserError: for an unknown name or option, and for a value that is not allowed.
  """
  _, function, options = bind(spec, table, kind, lambda function: _option_schema(function, supplied, fixed))
  parameters = inspect.signature(function).parameters
  arguments = {name: value for name, value in supplied.items() if name in parameters} | options
  if 'mask' in options:
    arguments['mask'] = MASKS[options['mask']]
  try:
    built = function(**arguments)
    probe(built)
  except (TypeError, ValueError, ZeroDivisionError) as error:
    raise UserError(f'{kind} {spec!r} cannot be built: {error}') from error
  return built


def _option_schema(function: Callable, supplied: Collection[str], fixed: Collection[str]) -> dict[str, Option]:
  """The options of a function that a spec may set: numbers, booleans, and those of OPTIONAL."""
  schema = {}
  for name, parameter in inspect.signature(function).parameters.items():
    limits = Range(0, 1, include_high=False) if name in DECAY_OPTIONS else Range(0)
    if name in fixed:
      continue
    if name in supplied:
      schema[name] = Option(float, supplied[name], limits)
    elif name in OPTIONAL:
      schema[name] = Option(OPTIONAL[name], parameter.default, limits)
    elif isinstance(parameter.default, bool):
      schema[name] = Option(bool, parameter.default)
    elif isinstance(parameter.default, int | float):
      schema[name] = Option(float, parameter.default, limits)
  return schema


def _one_update(optimizer: optax.GradientTransformation) -> None:
  """Traces one update, because some options raise only then."""
  params = {'kernel': jnp.zeros((2, 2)), 'bias': jnp.zeros(2)}
  jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
