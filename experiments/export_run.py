"""Writes a copy of a run folder with the parameters of one checkpoint, without the state from which training resumes.

  python -m experiments.export_run --workdir=runs/dates --output=shared/dates
  echo 'March 5th, 1999' | python -m experiments.translate --workdir=shared/dates

It can be opened like any other run; training cannot be resumed from it.
"""

from absl import flags

from experiments.launch import FLAGS, launch, require_flag

flags.DEFINE_string('workdir', None, 'the folder of a trained run')
flags.DEFINE_string(
  'checkpoint', 'best', 'best, latest, average, the step of a checkpoint, or a file of weights (.safetensors)'
)
flags.DEFINE_string('output', None, 'the new folder')


def main() -> None:
  """Writes the run of --workdir, with the parameters of --checkpoint, to the folder --output."""
  from attention_jax.systems.export import export_run

  size = export_run(require_flag('workdir'), require_flag('output'), FLAGS.checkpoint)
  print(f'written to {FLAGS.output} ({size / 1e6:.2f} MB)')


if __name__ == '__main__':
  launch(main)
