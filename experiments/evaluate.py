"""Measures a trained run on any split of its task and writes the hypotheses, one a line.

python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
python -m experiments.evaluate --workdir=runs/a,runs/b --checkpoint=average
python -m experiments.evaluate --workdir=runs/m --split=validation --beams=10 --alpha=1.0 --beta=0.2
python -m experiments.evaluate --workdir=runs/m --hypotheses=FILE     # of any search, or of somebody else
python -m experiments.evaluate --workdir=runs/m --metrics=chrf --metrics='bleu(lowercase=True)' --json
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from attention_jax.errors import UserError
from attention_jax.inference.metrics import MetricValue, compute_metric
from experiments.launch import (
  FLAGS,
  check_output_path,
  define_run_flags,
  define_search_flags,
  launch,
  require_flag,
  search_overrides,
)
from experiments.tables import print_results

define_run_flags(allow_ensemble=True)
define_search_flags()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_string('hypotheses', None, 'a file with one text for each row of the split, to be measured by themselves')
flags.DEFINE_string('output', None, 'a file for the hypotheses; it must not exist')
flags.DEFINE_multi_string('metrics', [], 'of texts, in place of those of the config; may be given several times')
flags.DEFINE_bool('json', False, 'write JSON: every value with its unit and signature, and what it was measured with')


def main() -> None:
  from attention_jax.data.files import read_lines
  from attention_jax.systems import runs

  if FLAGS.hypotheses and (FLAGS.output or search_overrides()):
    own = ('output', *search_overrides())[not FLAGS.output]
    raise UserError(f'--{own} is of a search; the texts of --hypotheses={FLAGS.hypotheses} are measured as they are')
  for spec in FLAGS.metrics:
    compute_metric(spec, ['a'], [['a']])  # what is wrong with it is said before anything is searched for
  output = Path(check_output_path(FLAGS.output, 'output')) if FLAGS.output else None
  measured = {'metrics': FLAGS.metrics} if FLAGS.metrics else {}
  run = runs.open_run_or_ensemble(require_flag('workdir'), FLAGS.checkpoint, search_overrides() | measured, FLAGS.dtype)
  if FLAGS.hypotheses:
    found = runs.evaluate_hypotheses(run, FLAGS.split, read_lines(FLAGS.hypotheses))
    _say(FLAGS.hypotheses, found, {'split': FLAGS.split, 'hypotheses': FLAGS.hypotheses})
    return
  found, predictions = runs.evaluate_split(run, FLAGS.split)
  steps = f'step{"s" * (len(run.steps) > 1)} {", ".join(map(str, run.steps))}'
  said = run.config['evaluation'] | {'dtype': run.config['model']['dtype']}
  _say(steps, found, {'split': FLAGS.split, 'steps': run.steps, 'evaluation': said})
  if output:
    runs.write_lines(output, run.system.format_predictions(predictions))
    print(f'written to {output}', file=sys.stderr if FLAGS.json else sys.stdout)


def _say(of: str, found: Mapping[str, MetricValue], how: Mapping[str, Any]) -> None:
  """What was measured of something, and how, as a table or as JSON."""
  if FLAGS.json:
    print(json.dumps({**how, 'results': {name: result._asdict() for name, result in found.items()}}, indent=2))
    return
  print_results({f'{FLAGS.split} ({of})': found})
  if 'evaluation' in how:
    print('evaluation: ' + ', '.join(f'{name}={value}' for name, value in how['evaluation'].items()))


if __name__ == '__main__':
  launch(main)
