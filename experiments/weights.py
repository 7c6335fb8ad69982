"""Writes the weights of a trained run, or of a model of torch, to a safetensors file; or lists names and shapes.

  python -m experiments.weights --workdir=runs/dates
  python -m experiments.weights --workdir=runs/dates --output=dates.safetensors
  python -m experiments.translate --workdir=runs/dates --checkpoint=dates.safetensors
  python -m experiments.weights --layout=joeynmt_transformer --input=joey.safetensors --heads=8 --output=a.safetensors

Every program that opens a run reads such a file with --checkpoint; docs/interop.md explains the names.
"""

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags()
flags.DEFINE_string('output', None, 'a new file; by default names and shapes are printed')
flags.DEFINE_string(
  'layout', None, 'a layout of docs/interop.md: converts the weights of --input instead of those of a run'
)
flags.DEFINE_string('input', None, 'for --layout: a safetensors file with the names of torch')
flags.DEFINE_integer('heads', 1, 'for --layout: number of heads of a Transformer', 1)


def main() -> None:
  """Writes the weights of a run, or those of --input, to --output; or lists their names and shapes.

  Raises:
    UserError: for flags that exclude each other, have no effect or are missing.
  """
  from attention_jax.modules.parameter_files import check_suffix, flatten_names, save_weights

  if FLAGS.input and not FLAGS.layout:
    raise UserError('--input is only for --layout, which is missing; docs/interop.md lists the layouts')
  if FLAGS.layout and FLAGS.workdir:
    raise UserError(
      '--layout converts the weights of --input, and --workdir reads those of a run; expected one of them'
    )
  for name in ('checkpoint', 'dtype') if FLAGS.layout else ('heads',):
    if FLAGS[name].present:
      raise UserError(f'--{name} has no effect {"with" if FLAGS.layout else "without"} --layout; leave it out')
  output = check_suffix(check_output_path(FLAGS.output, 'output')) if FLAGS.output else None
  params, metadata = _convert() if FLAGS.layout else _open()
  if output is None:
    for name, array in flatten_names(params).items():
      print(f'{name} {list(array.shape)}')
    return
  save_weights(params, output, metadata)
  print(f'written to {output}')


def _open():
  """Parameters of a run, and its steps."""
  from attention_jax.systems import runs

  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  return run.params, {'steps': ' '.join(map(str, run.steps))}


def _convert():
  """Weights of --input under the names of this package, and their layout."""
  from attention_jax.modules.parameter_files import read_arrays
  from attention_jax.modules.torch_weights import convert_weights

  return convert_weights(FLAGS.layout, read_arrays(require_flag('input')), FLAGS.heads), {'layout': FLAGS.layout}


if __name__ == '__main__':
  launch(main)
