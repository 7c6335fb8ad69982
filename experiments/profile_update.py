"""Shows where the time of an update goes: the time of its operations by module, and by kind of operation.

  python -m experiments.profile_update --config=configs/dates.py:bahdanau2015_deep_tanh
  python -m experiments.profile_update --config=configs/dates.py:bahdanau2015_deep_tanh --output=trace

--output keeps the trace: perfetto_trace.json.gz for https://ui.perfetto.dev, and the files of XProf and TensorBoard.
"""

from experiments.process_settings import prepare_process

if __name__ == '__main__':
  prepare_process()  # before jax is imported

from absl import flags
from rich.console import Console

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_folder, define_config, launch
from experiments.tables import print_profile

define_config('a file of configs/ and a preset: configs/dates.py:bahdanau2015_deep_tanh')
flags.DEFINE_integer('updates', 10, 'number of updates that are timed, and number of those that are traced', 1)
flags.DEFINE_integer('depth', 2, 'names of a path of modules after which deeper modules are counted as one', 1)
flags.DEFINE_integer('rows', 20, 'number of rows of each table', 1)
flags.DEFINE_string('output', None, 'a new folder for the trace')


def main() -> None:
  """Profiles updates of --config on the devices of this process, and prints the tables."""
  from attention_jax.systems.profiling import profile_update

  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/dates.py:bahdanau2015_deep_tanh')
  folder = check_output_folder(FLAGS.output, 'output') if FLAGS.output else None
  profile = profile_update(FLAGS.config.to_dict(), FLAGS.updates, folder)
  print_profile(profile, FLAGS.depth, FLAGS.rows)
  if folder:
    Console(highlight=False).print(f'written to {folder}', markup=False, soft_wrap=True)


if __name__ == '__main__':
  launch(main)
