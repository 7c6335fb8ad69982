"""Predicts a caption or a label for each line: the path of an image, a document, or a pair of texts.

  ls pictures/*.jpg | python -m experiments.predict --workdir=runs/shapes
  python -m experiments.predict --workdir=runs/imdb --input=reviews.txt --json

A line has the kind of input that the run was trained on: the path of an image, a document, or a pair of texts
separated by a tab. With --json each line of output is an object with line and input. A caption adds caption, score,
log_prob, tokens and weights [tokens, rows, columns]. A label adds label, probabilities of all labels, parts (tokens of
each sentence or text and their weights: [heads, words], or for a pair [heads x words of the other text, words]),
weights of the sentences [heads, sentences], and unread, the number of tokens that were not read. `translate` translates
texts.
"""

import functools
import sys

from absl import flags

from attention_jax.atomic import to_json
from experiments.launch import FLAGS, define_run_flags, launch, require_flag
from experiments.tables import round_weights

WINDOW = 256  # lines whose predictions are computed together and then printed

define_run_flags()
flags.DEFINE_string('input', '-', 'a file of lines, or - for stdin')
flags.DEFINE_bool('json', False, 'print a JSON object for each line')


def main() -> None:
  """Prints a prediction for each line of --input."""
  from attention_jax.data.files import read_lines, split_lines
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsLinePrediction

  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  predict_lines = functools.partial(run.system_with(SupportsLinePrediction).predict_lines, run.params)
  if FLAGS.input == '-':
    name = 'stdin'
    lines = split_lines(sys.stdin.buffer.read(), name)
  else:
    name = FLAGS.input
    lines = read_lines(name)
  for start in range(0, len(lines), WINDOW):
    window = lines[start : start + WINDOW]
    predictions = predict_lines(window, name, start + 1)
    for number, (line, (text, details)) in enumerate(zip(window, predictions, strict=True), start + 1):
      if FLAGS.json:
        text = to_json({'line': number, 'input': line} | details, ensure_ascii=False, default=round_weights)
      print(text, flush=True)


if __name__ == '__main__':
  launch(main)
