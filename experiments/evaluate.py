"""Evaluates a trained run on any split of its task; --output writes the hypotheses, one per line.

python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
python -m experiments.evaluate --workdir=runs/a,runs/b --checkpoint=average
python -m experiments.evaluate --workdir=runs/m --split=validation --beams=10 --alpha=1.0 --beta=0.2
python -m experiments.evaluate --workdir=runs/m --hypotheses=FILE     # from another search or another system
python -m experiments.evaluate --workdir=runs/m --hypotheses=a.txt,b.txt,c.txt --mbr=exact_match    # a vote
python -m experiments.evaluate --workdir=runs/m --hypotheses=a.jsonl,b.jsonl --mbr=exact_match      # by probabilities
python -m experiments.evaluate --workdir=runs/m --metrics=chrf --metrics='bleu(lowercase=True)' --json
python -m experiments.evaluate --workdir=runs/m --by=source_length --plot=lengths.png
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from attention_jax import atomic
from attention_jax.decoding.metrics import MetricValue, compute_metric
from attention_jax.errors import UserError
from experiments.launch import (
  FLAGS,
  check_output_path,
  define_run_flags,
  define_search_flags,
  launch,
  require_flag,
  search_overrides,
)
from experiments.tables import print_bins, print_results

define_run_flags(allow_ensemble=True)
define_search_flags()
flags.DEFINE_string('split', 'test', 'the split: train, validation, test or unseen; a task may lack some of them')
flags.DEFINE_string(
  'hypotheses',
  None,
  'a file with one text per row of the split, or with its best hypotheses as translate --json prints them (.jsonl); '
  'or several separated by commas: evaluate these, without a search',
)
flags.DEFINE_string(
  'mbr',
  None,
  'a metric whose expected value chooses between the hypotheses of each row in --hypotheses (minimum Bayes risk)',
)
flags.DEFINE_string('output', None, 'a new file for the hypotheses')
flags.DEFINE_multi_string('metrics', [], 'metrics of texts, instead of those of the config; may be repeated')
flags.DEFINE_bool(
  'json', False, 'print JSON: every value with its unit and signature, and the settings of the evaluation'
)
flags.DEFINE_string('by', '', 'also print metrics by source_length, target_length or rarest_word')
flags.DEFINE_integer('bins', 5, 'number of bins of --by, with about equally many rows')
flags.DEFINE_string('plot', None, 'a new PNG file for the metrics by bins')


def main() -> None:
  """Evaluates the run of --workdir, or the texts of --hypotheses, on --split, and prints the metrics."""
  from attention_jax.sweeps.bins import SOURCE_PROPERTIES
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsCorpus, SupportsTranslation
  from attention_jax.systems.config import to_dict
  from attention_jax.training.watch import BatchProgress

  overrides = search_overrides()
  files = _hypotheses_files(overrides)
  for spec in [*FLAGS.metrics, *([FLAGS.mbr] if FLAGS.mbr else [])]:
    compute_metric(spec, ['a'], [['a']])  # reports a mistake in the spec before the search
  output = Path(check_output_path(FLAGS.output, 'output')) if FLAGS.output else None
  plot = _check_bins()
  if plot and output == Path(plot):
    raise UserError(f'--output and --plot must be two files, got {plot} for both')
  if FLAGS.metrics:
    overrides['metrics'] = FLAGS.metrics
  run = runs.open_run_or_ensemble(require_flag('workdir'), FLAGS.checkpoint, overrides, FLAGS.dtype)
  if FLAGS.by:  # raises UserError before the search
    run.system_with(SupportsTranslation if FLAGS.by in SOURCE_PROPERTIES else SupportsCorpus)
    _check_binned_metrics(run)
  if files:
    lines = _read_hypotheses(files)
    results = runs.evaluate_hypotheses(run, FLAGS.split, lines)
    bins = _evaluate_bins(run, lines, plot)
    settings = {'split': FLAGS.split, 'hypotheses': FLAGS.hypotheses} | ({'mbr': FLAGS.mbr} if FLAGS.mbr else {})
    label = FLAGS.hypotheses if len(files) == 1 else f'{len(files)} files'
    label += f' combined by {FLAGS.mbr}' if FLAGS.mbr else ''
    _print_evaluation(label, results, settings, bins)
    _write_output(output, lines)
    return
  progress = BatchProgress(f'evaluating {FLAGS.split}', lambda line: print(line, file=sys.stderr, flush=True))
  results, predictions = runs.evaluate_split(run, FLAGS.split, progress)
  steps = ', '.join(map(str, run.steps))
  label = f'steps {steps}' if len(run.steps) > 1 else f'step {steps}'
  evaluation = to_dict(run.config.evaluation) | {'dtype': run.config.model.dtype}
  lines = run.system.format_predictions(predictions)
  bins = _evaluate_bins(run, lines, plot)
  _print_evaluation(label, results, {'split': FLAGS.split, 'steps': run.steps, 'evaluation': evaluation}, bins)
  _write_output(output, lines)


def _hypotheses_files(overrides: Mapping[str, Any]) -> list[str]:
  """Returns the files of --hypotheses; none without it.

  Args:
    overrides: the fields of config.evaluation that flags of a search override, which --hypotheses excludes.

  Raises:
    UserError: for flags that contradict each other.
  """
  from attention_jax.decoding.hypothesis_files import has_lists
  from attention_jax.systems.runs import split_commas

  files = split_commas(FLAGS.hypotheses, '--hypotheses') if FLAGS.hypotheses else []
  if FLAGS.mbr and len(files) < 2 and not any(map(has_lists, files)):
    raise UserError(
      f'--mbr={FLAGS.mbr} chooses between several hypotheses of a row; --hypotheses must name at least 2 files, '
      'or one of translate --json (.jsonl)'
    )
  if len(files) > 1 and not FLAGS.mbr:
    raise UserError(
      f'--hypotheses names {len(files)} files; expected --mbr=METRIC, which chooses one text of each row: '
      'with exact_match the text of most files'
    )
  search_flags = [*(['output'] if FLAGS.output and not FLAGS.mbr else []), *overrides]
  if files and search_flags:
    raise UserError(
      f'--{search_flags[0]} applies to a search; the texts of --hypotheses={FLAGS.hypotheses} are evaluated as they are'
    )
  return files


def _read_hypotheses(files: Sequence[str]) -> list[str]:
  """Returns the first hypothesis of each line of a file, or those chosen by --mbr from all of them.

  Raises:
    UserError: for a file that cannot be read, and for files with different numbers of lines.
  """
  from attention_jax.decoding.hypothesis_files import read_candidates
  from attention_jax.decoding.minimum_bayes_risk import combine_hypotheses

  systems = [read_candidates(file) for file in files]
  for file, lines in zip(files, systems, strict=True):
    if len(lines) != len(systems[0]):
      raise UserError(
        f'{file} has {len(lines)} lines and {files[0]} {len(systems[0])}; expected one for each row in each'
      )
  return combine_hypotheses(systems, FLAGS.mbr) if FLAGS.mbr else [candidates.texts[0] for candidates in systems[0]]


def _write_output(output: Path | None, lines: Sequence[str]) -> None:
  """Writes the texts to the file of --output, if there is one."""
  from attention_jax.systems import runs

  if output:
    runs.write_lines(output, lines)
    print(f'written to {output}', file=sys.stderr if FLAGS.json else sys.stdout)


def _check_bins() -> str | None:
  """Returns the path of --plot, or None. Raises UserError for mistakes in --by, --bins and --plot."""
  from attention_jax.analysis.picture_files import check_png_path
  from attention_jax.sweeps.bins import check_property

  if FLAGS.plot and not FLAGS.by:
    raise UserError('--plot needs --by')
  if FLAGS.by:
    check_property(FLAGS.by, FLAGS.bins)
  if not FLAGS.plot:
    return None
  check_png_path(FLAGS.plot)
  return check_output_path(FLAGS.plot, 'plot')


def _has_teacher_forcing_metrics(system: Any) -> bool:
  """Returns whether metrics by bins include those by teacher forcing, such as the loss of the references."""
  from attention_jax.systems.base import SupportsTranslation

  return not FLAGS.hypotheses and isinstance(system, SupportsTranslation)


def _check_binned_metrics(run: Any) -> None:
  """Raises UserError if there are no metrics for --by."""
  if not run.config.evaluation.metrics and not _has_teacher_forcing_metrics(run.system):
    raise UserError(
      f'--by={FLAGS.by} needs metrics of texts, and config.evaluation.metrics of the run is empty; set --metrics'
    )


def _evaluate_bins(run: Any, lines: Sequence[str], plot: str | None) -> Any:
  """Returns the metrics by the bins of --by, None without it, and writes their picture.

  Args:
    run: the run.
    lines: the texts to evaluate.
    plot: the path of the picture, or None.
  """
  if not FLAGS.by:
    return None
  from attention_jax.sweeps.bins import add_teacher_forcing_metrics, evaluate_bins
  from attention_jax.sweeps.plots import draw_bins
  from attention_jax.systems.base import SupportsCorpus

  system = run.system_with(SupportsCorpus)
  corpora = system.corpus(FLAGS.split), system.corpus('train')
  bins = evaluate_bins(*corpora, lines, run.config.evaluation, FLAGS.by, FLAGS.bins)
  if _has_teacher_forcing_metrics(system):
    pairs = run.score(corpora[0])
    unlinked_targets = run.config.evaluation.unlinked_targets
    attends = run.model.traits.attends
    bins = add_teacher_forcing_metrics(bins, *corpora, pairs, run.vocabularies, attends, unlinked_targets)
  if plot:
    atomic.write_bytes(plot, draw_bins(bins))
  return bins


def _print_evaluation(
  label: str, results: Mapping[str, MetricValue], settings: Mapping[str, Any], bins: Any = None
) -> None:
  """Prints results and settings as a table or, with --json, as JSON.

  Args:
    label: what was evaluated, for the head of the table.
    results: metric -> value.
    settings: what the results depend on.
    bins: the results by bins, or None.
  """
  if FLAGS.json:
    record = {**settings, 'results': {name: result._asdict() for name, result in results.items()}}
    record |= {'bins': bins.as_json()} if bins else {}
    print(atomic.to_json(record, indent=2))
    return
  print_results({f'{FLAGS.split} ({label})': results})
  if bins:
    print_bins(bins)
  if 'evaluation' in settings:
    print('evaluation: ' + ', '.join(f'{name}={value}' for name, value in settings['evaluation'].items()))


if __name__ == '__main__':
  launch(main)
