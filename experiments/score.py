"""What a trained run says of given translations: the log-probability of each token, and the alignment.

  python -m experiments.score --workdir=runs/dates --source=lines.txt --target=translations.txt

Prints one JSON object per pair: log_prob of the whole target with its end, the target's tokens, log_probs of each and
of the end, alignment (source-target pairs, counted from 0) and weights, a row for each of them. Blank pairs are left
out, which stderr says.
"""

import json
import sys

from absl import flags

from attention_jax.analysis.alignment import links_from_weights
from experiments.launch import FLAGS, SEVERAL, define_run, launch, required

define_run(SEVERAL)
flags.DEFINE_string('source', None, 'a file of lines')
flags.DEFINE_string('target', None, 'a file with a translation of each')


def main() -> None:
  from attention_jax.data.text import read_parallel
  from attention_jax.training import experiment
  from attention_jax.training.scoring import score_pairs

  workdir, paths = required('workdir'), (required('source'), required('target'))
  corpus = read_parallel(*paths)
  run = experiment.open_runs(workdir, FLAGS.checkpoint)
  for line in corpus.report:
    print(line, file=sys.stderr)
  of = run.predictor
  scored = score_pairs(run.model, run.params, corpus, of.source_vocab, of.target_vocab, run.config['data']['buckets'])
  for row, pair in enumerate(scored):
    rounded = [[round(float(w), 6) for w in line] for line in pair.weights]
    links = links_from_weights(pair.weights, pair.weights.shape[1] - 1, len(pair.tokens))
    found = {
      'line': corpus.line(row), 'source': corpus.source[row], 'target': corpus.target[row], 'tokens': pair.tokens,
      'log_prob': sum(pair.log_probs), 'log_probs': pair.log_probs, 'alignment': links, 'weights': rounded,
    }  # fmt: skip
    print(json.dumps(found, ensure_ascii=False))


if __name__ == '__main__':
  launch(main)
