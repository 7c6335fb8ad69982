"""Writes the weights of a trained run to a safetensors file, or lists their names and shapes.

  python -m experiments.weights --workdir=runs/dates
  python -m experiments.weights --workdir=runs/dates --output=dates.safetensors
  python -m experiments.translate --workdir=runs/dates --checkpoint=dates.safetensors

Every program that opens a run reads such a file with --checkpoint; docs/interop.md explains the names.
"""

from experiments.process_settings import prepare_process

if __name__ == '__main__':
  prepare_process()  # before jax is imported

from absl import flags

from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags()
flags.DEFINE_string('output', None, 'a new file; by default names and shapes are printed')


def main() -> None:
  from attention_jax.modules.weights import check_suffix, flatten_names, save_weights
  from attention_jax.systems import runs

  output = check_suffix(check_output_path(FLAGS.output, 'output')) if FLAGS.output else None
  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  if output is None:
    for name, array in flatten_names(run.params).items():
      print(f'{name} {list(array.shape)}')
    return
  save_weights(run.params, output, {'steps': ' '.join(map(str, run.steps))})
  print(f'written to {output}')


if __name__ == '__main__':
  launch(main)
