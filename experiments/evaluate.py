"""Evaluates a trained run on any split of its task and writes the hypotheses, one per line.

python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
python -m experiments.evaluate --workdir=runs/a,runs/b --checkpoint=average
python -m experiments.evaluate --workdir=runs/m --split=validation --beams=10 --alpha=1.0 --beta=0.2
python -m experiments.evaluate --workdir=runs/m --hypotheses=FILE     # of another search or another system
python -m experiments.evaluate --workdir=runs/m --metrics=chrf --metrics='bleu(lowercase=True)' --json
"""

from experiments.large_pages import restart_with_large_pages

if __name__ == '__main__':
  restart_with_large_pages()  # before jax is imported

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
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen; a task may lack some of them')
flags.DEFINE_string('hypotheses', None, 'a file with one text per row of the split: evaluate these, without a search')
flags.DEFINE_string('output', None, 'a new file for the hypotheses')
flags.DEFINE_multi_string('metrics', [], 'metrics of texts, instead of those of the config; may be repeated')
flags.DEFINE_bool(
  'json', False, 'print JSON: every value with its unit and signature, and the settings of the evaluation'
)


def main() -> None:
  from attention_jax.data.files import read_lines
  from attention_jax.systems import runs

  overrides = search_overrides()
  if FLAGS.hypotheses:
    _check_no_search(overrides)
  for spec in FLAGS.metrics:
    compute_metric(spec, ['a'], [['a']])  # reports a mistake in the spec before the search
  output = Path(check_output_path(FLAGS.output, 'output')) if FLAGS.output else None
  if FLAGS.metrics:
    overrides['metrics'] = FLAGS.metrics
  run = runs.open_run_or_ensemble(require_flag('workdir'), FLAGS.checkpoint, overrides, FLAGS.dtype)
  if FLAGS.hypotheses:
    results = runs.evaluate_hypotheses(run, FLAGS.split, read_lines(FLAGS.hypotheses))
    _print_evaluation(FLAGS.hypotheses, results, {'split': FLAGS.split, 'hypotheses': FLAGS.hypotheses})
    return
  results, predictions = runs.evaluate_split(run, FLAGS.split)
  steps = ', '.join(map(str, run.steps))
  label = f'steps {steps}' if len(run.steps) > 1 else f'step {steps}'
  evaluation = run.config['evaluation'] | {'dtype': run.config['model']['dtype']}
  _print_evaluation(label, results, {'split': FLAGS.split, 'steps': run.steps, 'evaluation': evaluation})
  if output:
    runs.write_lines(output, run.system.format_predictions(predictions))
    print(f'written to {output}', file=sys.stderr if FLAGS.json else sys.stdout)


def _check_no_search(overrides: Mapping[str, Any]) -> None:
  """Raises UserError for flags of a search, which --hypotheses excludes."""
  search_flags = [*(['output'] if FLAGS.output else []), *overrides]
  if search_flags:
    raise UserError(
      f'--{search_flags[0]} applies to a search; the texts of --hypotheses={FLAGS.hypotheses} are evaluated as they are'
    )


def _print_evaluation(label: str, results: Mapping[str, MetricValue], settings: Mapping[str, Any]) -> None:
  """Prints results and settings as a table or, with --json, as JSON.

  Args:
    label: what was evaluated, for the head of the table.
    results: metric -> value.
    settings: what the results depend on.
  """
  if FLAGS.json:
    record = {**settings, 'results': {name: result._asdict() for name, result in results.items()}}
    print(json.dumps(record, indent=2))
    return
  print_results({f'{FLAGS.split} ({label})': results})
  if 'evaluation' in settings:
    print('evaluation: ' + ', '.join(f'{name}={value}' for name, value in settings['evaluation'].items()))


if __name__ == '__main__':
  launch(main)
