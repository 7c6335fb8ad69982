"""Compares finished runs with the first of them: differences with intervals and tests, curves, costs.

  python -m experiments.compare runs/softmax runs/entmax
  python -m experiments.compare runs/a runs/b --metrics=bleu --output=comparison

Runs of several seeds (--config.seeds=8) are compared seed by seed. Between two runs of one seed each, only the outputs
are tested, row by row.
"""

from pathlib import Path

import jax
from absl import flags
from rich.console import Console

from experiments.launch import FLAGS, check_output_folder, launch

flags.DEFINE_string('output', None, 'a new folder for the report; by default it is printed as Markdown')
flags.DEFINE_list('metrics', [], 'metrics of the report, the most important first; by default as in the config')
flags.DEFINE_string('test', 't', 'paired test over seeds: t, wilcoxon or permutation')


def main(folders: list[str]) -> None:
  """Compares the runs in `folders`; prints the report, or writes it to --output."""
  jax.config.update('jax_platforms', 'cpu')
  from attention_jax.sweeps.render import render, write_files
  from attention_jax.sweeps.report import ReportOptions, folders_report

  output = check_output_folder(FLAGS.output, 'output') if FLAGS.output else None
  console = Console(highlight=False, stderr=True)
  report = folders_report(
    [Path(folder) for folder in folders],
    ReportOptions(metrics=tuple(FLAGS.metrics), test=FLAGS.test),
    lambda line: console.print(line, markup=False, soft_wrap=True),
  )
  if output is None:
    print(render(report, [], Path.cwd(), 'md'))
    return
  for path in write_files(report, output):
    print(path)


if __name__ == '__main__':
  launch(main, takes_positional=True)
