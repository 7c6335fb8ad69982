"""Repeats an update whose loss or gradient was not finite, and prints which parameters, gradients and rows are not.

python -m experiments.replay --workdir=runs/dates
python -m experiments.replay --workdir=runs/dates --update=1234
python -m experiments.replay --workdir=runs/dates_of_eight_seeds --seed=3
"""

from absl import flags

from experiments.launch import FLAGS, launch, require_flag

flags.DEFINE_string('workdir', None, 'the folder of a run that has stored a batch')
flags.DEFINE_integer('update', 0, 'number of the update; by default the first of which the batch is stored', 0)
flags.DEFINE_integer('seed', None, 'which of several runs side by side; by default the first that is not finite')


def main() -> None:
  """Repeats an update of the run of --workdir, and prints what is not finite."""
  from attention_jax.systems.replay import replay

  result = replay(require_flag('workdir'), FLAGS.update, FLAGS.seed)
  repeated = result.update - 1 - result.start
  print(f'update {result.update} of seed {result.seed}, after {repeated} repeated updates from step {result.start}')
  print(f'loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}')
  for label, values in (
    ('parameters that are not finite before the update', result.params),
    ('parameters whose gradient is not finite', result.gradients),
    ('rows whose own loss is not finite', result.rows),
  ):
    print(f'{label}: {", ".join(map(str, values)) or "none"}')


if __name__ == '__main__':
  launch(main)
