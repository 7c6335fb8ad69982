"""Makes the ready-made models, which programs open by '@NAME' in place of a run folder: trains them, and exports them.

  python -m experiments.models
  python -m experiments.models --names=nettalk --folder=FOLDER
  echo 'March 5th, 1999' | python -m experiments.translate --workdir=@dates

They are stored in the cache of the user. FOLDER has train.tsv and dev.tsv of NETtalk, whose licence allows
non-commercial research only, so that neither these data nor a model of them is distributed. The same command resumes
an interrupted training, and leaves a model that exists as it is.
"""

import subprocess
import sys
from pathlib import Path

from absl import flags

from experiments.launch import FLAGS, launch, program_command

flags.DEFINE_list('names', None, 'names of models; by default all, or without --folder those whose data are generated')
flags.DEFINE_string('folder', None, 'the folder with the data of models whose data are not generated, such as nettalk')
flags.DEFINE_string('workdir', 'runs/models', 'the folder of the trainings')


def main() -> None:
  """Makes the ready-made models of --names.

  Raises:
    UserError: before any training, for an unknown name, and for one that needs --folder, which is missing.
  """
  from attention_jax.errors import UserError
  from attention_jax.systems.ready_made import READY_MADE, ready_made_folder
  from attention_jax.training.paths import run_path

  workdir = run_path(FLAGS.workdir)
  missing = {}  # model -> target
  for name in FLAGS.names or READY_MADE:
    target = ready_made_folder(name)
    data = READY_MADE[name].data
    if target.exists():
      print(f'@{name} is in {target}')
    elif data and not FLAGS.folder:
      reason = f'@{name} needs --folder with {data}'
      if FLAGS.names:
        raise UserError(reason)
      print(f'{reason}; not made')
    else:
      missing[name] = target
  for name, target in missing.items():
    _make(name, workdir / name, target)


def _make(name: str, workdir: Path, target: Path) -> None:
  """Trains a model, unless it is trained already, and exports it.

  Args:
    name: a key of READY_MADE.
    workdir: the folder of the training.
    target: the folder of the model.
  """
  from attention_jax.systems.export import export_run
  from attention_jax.systems.ready_made import READY_MADE

  model = READY_MADE[name]
  fields = [f'data.folder={FLAGS.folder}'] if model.data else []
  flags_of_fields = [f'--config.{field}' for field in (*model.fields, *fields)]
  command = [*program_command('train'), f'--config={model.config}', f'--workdir={workdir}', *flags_of_fields]
  if status := subprocess.run(command).returncode:
    sys.exit(status)
  size = export_run(workdir, target)
  print(f'@{name} is in {target} ({size / 1e6:.2f} MB)')


if __name__ == '__main__':
  launch(main)
