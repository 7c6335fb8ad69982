"""What a trained run says of new pictures or documents, a line for each: a caption, or a label.

  ls pictures/*.jpg | python -m experiments.predict --workdir=runs/shapes
  python -m experiments.predict --workdir=runs/imdb --input=reviews.txt --json

Lines are names of images, documents, or pairs of texts with a tab between them, as the run was trained on. With --json
each is an object with all that there is: of captions score, log_prob, tokens and the weights of each [rows, columns];
of labels the probability of each, the tokens of every sentence with their weights [heads, words], the weights of
sentences, and how many words were not read. Texts to be translated are for `translate`.
"""

import functools
import json
import sys

from absl import flags

from experiments.launch import FLAGS, define_run_flags, launch, require_flag
from experiments.tables import round_weights

WINDOW = 256  # lines read, and said something of, at once

define_run_flags()
flags.DEFINE_string('input', '-', 'a file; - is stdin')
flags.DEFINE_bool('json', False, 'print a JSON object for each line')


def main() -> None:
  from attention_jax.data.files import read_lines, split_lines
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsLinePrediction

  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  predict_lines = functools.partial(run.system_with(SupportsLinePrediction).predict_lines, run.params)
  stdin = FLAGS.input == '-'
  lines = split_lines(sys.stdin.buffer.read(), 'stdin') if stdin else read_lines(FLAGS.input)
  name = 'stdin' if stdin else FLAGS.input
  for start in range(0, len(lines), WINDOW):
    window = lines[start : start + WINDOW]
    for number, (line, (said, found)) in enumerate(
      zip(window, predict_lines(window, name, start + 1), strict=True), start + 1
    ):
      whole = {'line': number, 'input': line} | found
      print(json.dumps(whole, ensure_ascii=False, default=round_weights) if FLAGS.json else said, flush=True)


if __name__ == '__main__':
  launch(main)
