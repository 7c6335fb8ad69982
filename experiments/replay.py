"""Repeats an update, and prints which parameters, gradients and rows are not finite.

python -m experiments.replay --workdir=runs/dates --step=1234
python -m experiments.replay --workdir=runs/dates_of_eight_seeds/seed_3 --step=1234
"""

from absl import flags

from experiments.launch import launch, require_flag

flags.DEFINE_string('workdir', None, 'the folder of a run')
flags.DEFINE_integer('step', None, 'number of the update, as the message about it states', 1)


def main() -> None:
  """Repeats an update of the run of --workdir, and prints what is not finite."""
  from attention_jax.systems.replay import replay

  result = replay(require_flag('workdir'), require_flag('step'))
  repeated = result.update - 1 - result.start
  print(f'update {result.update}, after {repeated} repeated updates from step {result.start}')
  print(f'loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}')
  for label, values in (
    ('parameters that are not finite before the update', result.params),
    ('parameters whose gradient is not finite', result.gradients),
    ('rows whose own loss is not finite', result.rows),
  ):
    print(f'{label}: {", ".join(map(str, values)) or "none"}')


if __name__ == '__main__':
  launch(main)
