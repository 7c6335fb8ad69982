"""Learns word vectors from the training split of a config, for embeddings that start from them.

  python -m experiments.word_vectors --config=configs/imdb.py:yang2016 --config.data.folder=FOLDER --output=vectors.txt
  python -m experiments.train --config=configs/imdb.py:yang2016 --config.data.folder=FOLDER --workdir=runs/imdb \\
    --config.initial_vectors=vectors.txt

The size of the vectors is config.model.embedding. The file has the text format of word2vec.
"""

import sys

import rich.console
import rich.progress
from absl import flags

from attention_jax.errors import UserError, choose
from attention_jax.specs import MAX_INTEGER
from experiments.launch import FLAGS, check_output_path, define_config, launch, require_flag

MAX_WINDOW = 10_000  # gensim splits texts at this many words; with a window of more than 32 bits it does not terminate

define_config('a file of configs/ and a preset: configs/imdb.py:yang2016')
flags.DEFINE_string('output', None, 'a new text file; one that ends with .gz is compressed')
flags.DEFINE_string('table', '', 'the embeddings to learn vectors for, such as encoder.embedding; by default the first')
flags.DEFINE_integer('window', 5, 'largest distance of two words that predict each other', 1, MAX_WINDOW)
flags.DEFINE_integer('epochs', 10, 'passes over the training split', 1)
flags.DEFINE_integer('seed', 0, 'seed of the initial vectors and of all samples', 0, MAX_INTEGER)


def main() -> None:
  """Writes the vectors to --output. Raises UserError if --config is missing or its system embeds no words."""
  import jax

  from attention_jax.data.word_vectors import write_word_vectors
  from attention_jax.systems.config import fill_defaults
  from attention_jax.systems.experiment import check_config
  from attention_jax.systems.initial_vectors import embedding_tables
  from attention_jax.systems.registry import SYSTEMS

  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/imdb.py:yang2016')
  path = check_output_path(require_flag('output'), 'output')
  config = fill_defaults(FLAGS.config.to_dict(), 'the config')
  check_config(config)
  system = SYSTEMS[config['system']].load(config, None)
  initializer = system.initializer()
  tables = embedding_tables(system, jax.eval_shape(lambda: initializer(0)))
  table = tables[choose(FLAGS.table, tables, 'table')] if FLAGS.table else next(iter(tables.values()))
  with rich.progress.Progress(console=rich.console.Console(file=sys.stderr)) as progress:
    bar = progress.add_task('epochs', total=FLAGS.epochs)

    def on_epoch() -> None:
      progress.advance(bar)

    options = {'window': FLAGS.window, 'epochs': FLAGS.epochs, 'seed': FLAGS.seed}
    features = config['model']['embedding']
    count = write_word_vectors(path, table, features, **options, on_epoch=on_epoch)
  print(f'written to {path}: {count} vectors of {features} numbers')


if __name__ == '__main__':
  launch(main)
