"""An error that names the command to install the distribution attention_jax_train, for imports of its modules."""

TRAIN_SUBPACKAGES = ('cli', 'data', 'decoding', 'inference', 'losses', 'models', 'sweeps', 'systems', 'training')
TRAIN_MODULES = frozenset(
  f'attention_jax.{name}' for name in (*TRAIN_SUBPACKAGES, 'analysis.gradient_paths', 'analysis.interventions')
)


class MissingTrainFinder:
  """Last entry of `sys.meta_path`: is only called for modules that no other finder has found."""

  @staticmethod
  def find_spec(name: str, path: object = None, target: object = None) -> None:
    """Returns None for a name that is not in TRAIN_MODULES, so that Python raises its ordinary error.

    Args:
      name: full name of the module.
      path: search path of its package, see importlib.abc.MetaPathFinder; not used.
      target: the module if it is reloaded; not used.

    Raises:
      ModuleNotFoundError: for a name in TRAIN_MODULES.
    """
    if name in TRAIN_MODULES:
      raise ModuleNotFoundError(f"{name} is not installed; run pip install 'attention_jax[train]'", name=name)
