"""Ready-made models: small trained runs in the cache of the user, which '@NAME' opens in place of a run folder.

They are made by training, with `make models`; nothing is downloaded.
"""

from collections.abc import Mapping
from typing import NamedTuple

from etils import epath

from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError, choose
from attention_jax.training.folder import CONFIG
from attention_jax.training.paths import run_path

PREFIX = '@'


class ReadyMade(NamedTuple):
  """The training of a ready-made model.

  Attributes:
    config: FILE:PRESET of the config.
    data: what `config.data.folder` has to contain, or '' if the data are generated.
    fields: fields of the config that differ from the preset, 'FIELD=VALUE'.
  """

  config: str
  data: str = ''
  fields: tuple[str, ...] = ()


READY_MADE: Mapping[str, ReadyMade] = {
  'dates': ReadyMade('configs/dates.py:bahdanau2015_deep_tanh'),
  'nettalk': ReadyMade(
    'configs/nettalk.py:bahdanau2015_deep_tanh', 'train.tsv and dev.tsv of NETtalk, see configs/nettalk.py'
  ),
  # A quarter of the updates of the config, and a smaller model: trains in minutes; the run folder has less than 2 MB.
  'shapes': ReadyMade(
    'configs/shapes.py:xu2015_soft',
    fields=('training.steps=2000', 'model.embedding=32', 'model.attention.features=64'),
  ),
}


def ready_made_folder(name: str) -> epath.Path:
  """Returns the folder of a ready-made model; the folder need not exist.

  Raises:
    UserError: for a name that is not in READY_MADE.
  """
  return epath.Path(cache_folder('models')) / choose(name, READY_MADE, 'ready-made model')


def resolve_folder(folder: epath.PathLike) -> epath.Path:
  """Returns the run folder that a program opens.

  It is that of a ready-made model for '@NAME', otherwise the folder itself.

  Raises:
    UserError: for an unknown model, one that has not been made yet, and a name that cannot be that of a folder.
  """
  name = str(folder)
  if not name.startswith(PREFIX):
    return run_path(folder)
  path = ready_made_folder(name.removeprefix(PREFIX))
  if not (path / CONFIG).exists():
    raise UserError(f'{name} has not been made yet; run: make models (without a clone: attention-jax models)')
  return path
