"""The units of a sweep: which processes train which seeds of which settings, in which folders, by which command."""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from attention_jax.errors import choose
from attention_jax.sweeps.ledger import FINISHED, INTERRUPTED, SweepState, Unit, UnitState
from attention_jax.sweeps.resolve import Resolved
from attention_jax.sweeps.space import label, short_names
from attention_jax.systems.experiment import RESULTS
from attention_jax.systems.runs import seed_folder
from attention_jax.training.paths import is_in_bucket

MAX_NAME = 80  # characters of a setting in the name of its folder
TOGETHER_CHOICES = ('auto', 'yes', 'no')


def trains_seeds_together(choice: str, backend: str, settings: int, seeds: int, slots: int) -> bool:
  """Returns whether the seeds of a setting are trained side by side in one process.

  With 'auto', seeds are trained side by side, so that several small models fill an accelerator, unless the backend is
  'cpu' or there are fewer settings than slots. In these cases, and with 'no', each seed has a process, the first
  seed of all settings first: an early report then compares all settings, and the slots are full for longer.

  On a CPU, 'yes' is faster for short runs, because a setting starts one process for all of its seeds. With nothing
  compiled before, three seeds of dates:luong2015_birnn with 300 updates took 137 s side by side on one core, and 171 s
  in three processes, although the later seeds load the programs of the first. With training.on_nonfinite='stop', a
  loss that is not finite stops all seeds of a process; with --together=no, it stops one seed.

  Args:
    choice: one of TOGETHER_CHOICES.
    backend: the backend of jax.
    settings: number of settings.
    seeds: number of seeds of each.
    slots: number of processes at a time.

  Raises:
    UserError: for an unknown choice.
  """
  choose(choice, TOGETHER_CHOICES, 'value of --together')
  if choice != 'auto':
    return choice == 'yes'
  return backend != 'cpu' and seeds > 1 and settings >= slots


def plan_units(
  state: SweepState,
  resolved: Sequence[Resolved],
  seeds: Sequence[int],
  together: bool,
  plugins: str = '',
  runs: str = '',
) -> list[Unit]:
  """Returns the units that the ledger does not have yet.

  Args:
    state: the state of the sweep.
    resolved: the settings.
    seeds: the seeds of each setting.
    together: whether seeds are trained side by side, see `trains_seeds_together`.
    plugins: the value of --plugins, or ''.
    runs: the folder below which they are trained, which may be in a bucket; '' for that of the sweep.

  Returns:
    The units in the order in which they are to run.
  """
  names = short_names(dict.fromkeys(field for setting in resolved for field in setting.setting))
  units = []
  for setting in resolved:
    missing = sorted(set(seeds) - state.covered_seeds(setting.id))
    groups = _consecutive(missing) if together else [(seed,) for seed in missing]
    name = setting_folder(label(setting.setting, names), setting.id)
    for group in groups:
      folder = f'{name}/seed_{group[0]}' if len(group) == 1 else f'{name}/seeds_{group[0]}-{group[-1]}'
      unit = Unit(
        id=folder,
        setting_id=setting.id,
        setting=dict(setting.setting),
        path=setting.path,
        overrides=setting.overrides,
        seeds=group,
        folder=f'{runs}/{folder}' if runs else folder,
        plugins=plugins,
      )
      units.append(unit)
  # One seed of every setting first: an early report has all settings, and later seeds load the compiled programs.
  return sorted(units, key=lambda unit: unit.seeds[0])


def _consecutive(seeds: Sequence[int]) -> list[tuple[int, ...]]:
  """Groups ascending seeds into runs of consecutive numbers: [0, 1, 4] -> [(0, 1), (4,)]."""
  groups: list[tuple[int, ...]] = []
  for seed in seeds:
    if groups and groups[-1][-1] == seed - 1:
      groups[-1] += (seed,)
    else:
      groups.append((seed,))
  return groups


def setting_folder(name: str, setting_id: str) -> str:
  """Returns the name of the folder of a setting: its label in characters that need no quotes, and its id."""
  safe = re.sub(r'[^\w=.+-]+', '-', name.replace(', ', '+')).strip('-')
  return f'{safe[:MAX_NAME]}.{setting_id}'


def command(unit: Unit, sweep_folder: Path, train: Sequence[str]) -> list[str]:
  """Returns the command that trains a unit, which a user can repeat by hand.

  Args:
    unit: the unit.
    sweep_folder: the folder of the sweep.
    train: the program: ('python', '-m', 'experiments.train').
  """
  fields: dict[str, Any] = dict(unit.overrides) | {'training.seed': unit.seeds[0]}
  if len(unit.seeds) > 1:
    fields['seeds'] = len(unit.seeds)
  plugins = [f'--plugins={unit.plugins}'] if unit.plugins else []
  flags = [f'--config.{field}={value}' for field, value in fields.items()]
  return [*train, *plugins, f'--config={unit.path}', f'--workdir={unit_folder(unit, sweep_folder)}', *flags]


def format_command(words: Iterable[str]) -> str:
  """Returns a command line, quoted for a shell."""
  return shlex.join(words)


def unit_folder(unit: Unit, sweep_folder: Path) -> epath.Path:
  """Returns the folder in which a unit is trained, which may be in a bucket."""
  return epath.Path(unit.folder if is_in_bucket(unit.folder) else sweep_folder / unit.folder)


def run_folders(unit: Unit, sweep_folder: Path) -> dict[int, epath.Path]:
  """Returns the run folder of each seed of a unit."""
  folder = unit_folder(unit, sweep_folder)
  if len(unit.seeds) == 1:
    return {unit.seeds[0]: folder}
  return {seed: seed_folder(folder, seed) for seed in unit.seeds}


def requested_units(state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int]) -> list[UnitState]:
  """Returns the units of the ledger that train one of these seeds of one of these settings.

  Args:
    state: the state of the ledger.
    resolved: the settings.
    seeds: the seeds.
  """
  ids = {setting.id for setting in resolved}
  return [
    entry for entry in state.units.values() if entry.unit.setting_id in ids and set(entry.unit.seeds) & set(seeds)
  ]


def removed_units(state: SweepState, sweep_folder: Path) -> list[Unit]:
  """Returns the finished units without a run folder, as when it was removed.

  Runs outside the folder of the sweep, adopted or of --runs, are not among them.
  """
  units = [
    entry.unit
    for entry in state.finished
    if not (is_in_bucket(entry.unit.folder) or Path(entry.unit.folder).is_absolute())
  ]
  return [unit for unit in units if not all(path.is_dir() for path in run_folders(unit, sweep_folder).values())]


def has_results(unit: Unit, sweep_folder: Path) -> bool:
  """Returns whether every run of a unit has its results."""
  return all((path / RESULTS).exists() for path in run_folders(unit, sweep_folder).values())


def collected_units(state: SweepState, sweep_folder: Path) -> list[Unit]:
  """Returns the units that a queue of --submit has trained."""
  units = [entry.unit for entry in state.units.values() if entry.is_submitted]
  return [unit for unit in units if has_results(unit, sweep_folder)]


def observed_state(state: SweepState, sweep_folder: Path) -> SweepState:
  """Returns the state in which units of `removed_units` are unfinished, and those of `collected_units` finished."""
  states = {unit.id: INTERRUPTED for unit in removed_units(state, sweep_folder)}
  states |= {unit.id: FINISHED for unit in collected_units(state, sweep_folder)}
  changed = {unit_id: dataclasses.replace(state.units[unit_id], state=new) for unit_id, new in states.items()}
  return dataclasses.replace(state, units=dict(state.units) | changed)
