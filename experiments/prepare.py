"""Prepares a data set on disk: tokenises the data of a config once, for data that are larger than memory.

  python -m experiments.prepare --config=configs/wmt14.py:transformer2017_base --output=FOLDER
  python -m experiments.train --config=configs/wmt14.py:transformer2017_base --workdir=runs/wmt \\
    --config.data.task=prepared --config.data.folder=FOLDER

The same command continues an interrupted preparation.
"""

import sys

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_config, launch, require_flag

define_config('a file of configs/ and a preset: configs/wmt14.py:gnmt2016')
flags.DEFINE_string('output', None, 'the folder of the prepared data set')


def main() -> None:
  """Prepares the data of --config. Raises UserError if --config is missing or its system cannot be prepared."""
  from attention_jax.data.preparing import write_prepared
  from attention_jax.systems.config import parse_config
  from attention_jax.systems.registry import SYSTEMS

  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/wmt14.py:transformer2017_base')
  config = parse_config(FLAGS.config)
  preparation = SYSTEMS[config.system].preparation(config)
  write_prepared(preparation, require_flag('output'), lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == '__main__':
  launch(main)
