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
from experiments.launch import FLAGS, define_run, launch, required
from experiments.tables import rounded

define_run(several=True)
flags.DEFINE_string('source', None, 'a file of lines')
flags.DEFINE_string('target', None, 'a file with a translation of each')
flags.DEFINE_bool('layers', False, 'also print layers: the weights of every layer and every head')


def main() -> None:
  from attention_jax.data.text import read_parallel
  from attention_jax.inference.scoring import score_pairs
  from attention_jax.systems import runs

  workdir, paths = required('workdir'), (required('source'), required('target'))
  corpus = read_parallel(*paths)
  run = runs.open_runs(workdir, FLAGS.checkpoint, dtype=FLAGS.dtype)
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
      'weights': rounded(pair.weights),
    }
    found |= {'layers': rounded(pair.layers)} if FLAGS.layers else {}
    print(json.dumps(found, ensure_ascii=False))


if __name__ == '__main__':
  launch(main)
