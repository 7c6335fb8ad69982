"""What a trained run says of given translations: the log-probability of each token, and the alignment.

  python -m experiments.score --workdir=runs/dates --source=lines.txt --target=translations.txt
  python -m experiments.score --workdir=runs/transformer --source=lines.txt --target=translations.txt --layers

Prints one JSON object per pair: log_prob of the whole target with its end, the target's tokens, log_probs of each and
of the end, alignment (source-target pairs, counted from 0) and weights, a row for each of them; with --layers the same
of every layer and head. Blank pairs are left out, which stderr says.
"""

import json
import sys

from absl import flags

from attention_jax.analysis.alignment import links_from_weights
from experiments.launch import FLAGS, define_run_flags, launch, require_flag
from experiments.tables import round_weights

define_run_flags(allow_ensemble=True)
flags.DEFINE_string('source', None, 'a file of lines')
flags.DEFINE_string('target', None, 'a file with a translation of each')
flags.DEFINE_bool('layers', False, 'also print layers: the weights of every layer and every head')


def main() -> None:
  from attention_jax.data.text import read_parallel
  from attention_jax.inference.scoring import score_pairs
  from attention_jax.systems import runs

  workdir, paths = require_flag('workdir'), (require_flag('source'), require_flag('target'))
  corpus = read_parallel(*paths)
  run = runs.open_run_or_ensemble(workdir, FLAGS.checkpoint, dtype=FLAGS.dtype)
  of = run.predictor
  vocabs = of.source_vocab, of.target_vocab
  scored = score_pairs(run.model, run.params, corpus, *vocabs, run.config['data']['buckets'], layers=FLAGS.layers)
  for line in corpus.report:
    print(line, file=sys.stderr)
  for row, pair in enumerate(scored):
    links = links_from_weights(pair.weights, pair.weights.shape[1] - 1, len(pair.tokens))
    found = {
      'line': corpus.line(row),
      'source': corpus.source[row],
      'target': corpus.target[row],
      'tokens': pair.tokens,
      'log_prob': sum(pair.log_probs),
      'log_probs': pair.log_probs,
      'alignment': links,
      'weights': round_weights(pair.weights),
    }
    found |= {'layers': round_weights(pair.layers)} if FLAGS.layers else {}
    print(json.dumps(found, ensure_ascii=False))


if __name__ == '__main__':
  launch(main)
