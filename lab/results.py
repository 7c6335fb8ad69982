"""Renders the tables of RESULTS.md, README.md and docs/claims/ from the records in lab/results/, and adds records.

  python -m lab.results            # writes every table
  python -m lab.results --check    # fails if a document differs from the records
  python -m lab.results --add=runs/x --table=nettalk --config=configs/nettalk.py:bahdanau2015_deep_tanh \\
    --hardware='2 cores'                   # a run folder, of one seed or several
  python -m lab.results --add=runs/grid --table=nettalk --hardware='2 cores'       # the settings of a sweep

A new row replaces the row with the same config, preset and flags, or is appended.
"""

from pathlib import Path

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, launch, require_flag
from lab.result_tables import add_results, check_flags, outdated_documents, write_documents

flags.DEFINE_bool('check', False, 'write nothing; fail if a document differs from the records')
flags.DEFINE_string('add', None, 'the folder of a finished run or of a sweep')
flags.DEFINE_string('table', None, 'name of the table in lab/results/ to which --add adds rows')
flags.DEFINE_string('config', '', 'FILE:PRESET of a run folder, or of a sweep that was started without a preset')
flags.DEFINE_string('hardware', None, "hardware on which the runs of --add were measured, such as '2 cores'")


def main() -> None:
  """Adds the records of --add, then writes the tables. Raises UserError if --check finds a table that differs."""
  check_flags({name: FLAGS[name].value for name in ('check', 'add', 'table', 'config', 'hardware')})
  if FLAGS.check:
    if outdated := outdated_documents():
      raise UserError(f'{", ".join(map(str, outdated))} differ from lab/results/; run: python -m lab.results')
    return
  if FLAGS.add:
    add_results(Path(FLAGS.add).expanduser(), require_flag('table'), FLAGS.config, require_flag('hardware'))
  write_documents()


if __name__ == '__main__':
  launch(main)
