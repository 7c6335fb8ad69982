"""Events that add finished runs, which were trained outside of a sweep, to its ledger."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from attention_jax.errors import UserError
from attention_jax.sweeps.collect import check_finished
from attention_jax.sweeps.ledger import FINISHED, PLANNED, SweepState, Unit, planned_event
from attention_jax.sweeps.plan import run_folders
from attention_jax.sweeps.resolve import IRRELEVANT_FIELDS, Resolved, config_id
from attention_jax.systems.config import flatten_config, read_run_config
from attention_jax.training.paths import absolute, run_path

MAX_DIFFERENCES = 3  # fields named in an error


class Adoption(NamedTuple):
  """A finished run that becomes part of a sweep.

  Attributes:
    events: the events that add it to the ledger; none if the sweep has one of its seeds already.
    line: describes what is added, or why nothing is.
  """

  events: Sequence[Mapping[str, Any]]
  line: str


def plan_adoption(
  state: SweepState, sweep_folder: Path, folder: epath.PathLike, resolved: Sequence[Resolved]
) -> Adoption:
  """Returns how a finished run, of one seed or several, is added to a sweep.

  Args:
    state: the state of the sweep.
    sweep_folder: the folder of the sweep.
    folder: the folder of the run, which may be in a bucket.
    resolved: the settings of the sweep; the config of one must equal that of the run, but for IRRELEVANT_FIELDS.

  Raises:
    UserError: if the folder has no config, the run is not finished, or no setting has its config.
  """
  folder = absolute(run_path(folder))
  config = read_run_config(folder)
  fields = flatten_config(config)
  setting = next((setting for setting in resolved if setting.id == config_id(fields)), None)
  if setting is None:
    raise UserError(
      f'--adopt={folder}: no setting of the sweep has its config; {_nearest_difference(fields, resolved)}'
    )
  seeds = tuple(config.run_seeds)
  if covered := sorted(state.covered_seeds(setting.id) & set(seeds)):
    return Adoption((), f'{folder}: the sweep has a unit with seed {covered[0]} of this setting already')
  unit = Unit(str(folder), setting.id, dict(setting.setting), setting.path, setting.overrides, seeds, str(folder))
  for path in run_folders(unit, sweep_folder).values():
    check_finished(path)
  finished = {'event': FINISHED, 'unit': unit.id, 'adopted': True}
  events = {'event': PLANNED, **planned_event(unit)}, finished
  return Adoption(events, f'{folder}: adopted, seeds {", ".join(map(str, seeds))}')


def _nearest_difference(fields: Mapping[str, Any], resolved: Sequence[Resolved]) -> str:
  """Describes how the config differs from that of the most similar setting.

  Values are compared as JSON, as in `config_id`: lists equal tuples, and 1 differs from 1.0.
  """
  differences = []
  for setting in resolved:
    expected = flatten_config(setting.config)
    names = expected if fields['system'] == expected['system'] else ['system']  # other systems have other fields
    differing = [
      f'{name} is {fields[name]!r}, expected {expected[name]!r}'
      for name in names
      if name not in IRRELEVANT_FIELDS and json.dumps(fields[name]) != json.dumps(expected[name])
    ]
    differences.append(differing)
  nearest = min(differences, key=len, default=[])
  ellipsis = ', ...' if len(nearest) > MAX_DIFFERENCES else ''
  return '; '.join(nearest[:MAX_DIFFERENCES]) + ellipsis
