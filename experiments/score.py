"""Scores given translations with a trained run: the log-probability of each token, and the alignment.

  python -m experiments.score --workdir=runs/dates --source=lines.txt --target=translations.txt
  python -m experiments.score --workdir=runs/transformer --source=lines.txt --target=translations.txt --layers

Prints one JSON object per pair: line, source, target, tokens of the target, log_prob of the target with EOS, log_probs
of each token and of EOS, alignment (source-target pairs, counted from 0) and weights, a row for each token and for EOS;
with --layers also the weights of every layer and head. Blank pairs are skipped and reported on stderr.
"""

import sys

from absl import flags

from attention_jax.atomic import to_json
from experiments.launch import FLAGS, define_run_flags, launch, require_flag
from experiments.tables import round_weights

define_run_flags(allow_ensemble=True)
flags.DEFINE_string('source', None, 'a file of source lines')
flags.DEFINE_string('target', None, 'a file with a translation of each source line')
flags.DEFINE_bool('layers', False, 'also print layers: the weights of every layer and every head')


def main() -> None:
  """Prints the scores of each pair of --source and --target."""
  from attention_jax.data.text import read_parallel
  from attention_jax.systems import runs

  workdir = require_flag('workdir')
  corpus = read_parallel(require_flag('source'), require_flag('target'))
  run = runs.open_run_or_ensemble(workdir, FLAGS.checkpoint, dtype=FLAGS.dtype)
  pairs = run.score(corpus, layers=FLAGS.layers)
  for line in corpus.report:
    print(line, file=sys.stderr)
  for row, pair in enumerate(pairs):
    record = {
      'line': corpus.line(row),
      'source': corpus.source[row],
      'target': corpus.target[row],
      'tokens': pair.tokens,
      'log_prob': pair.log_prob,
      'log_probs': pair.log_probs,
      'alignment': pair.alignment,
      'weights': round_weights(pair.weights),
    }
    if FLAGS.layers:
      record['layers'] = round_weights(pair.layer_weights)
    print(to_json(record, ensure_ascii=False))


if __name__ == '__main__':
  launch(main)
