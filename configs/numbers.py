"""Numbers in English, German and French words -> digits, with the settings of configs/text.py. No download.

python -m experiments.train --config=configs/numbers.py:bahdanau2015_deep_tanh@tiny --workdir=runs/numbers
"""

from configs import text


def get_config(preset: str = 'bahdanau2015_deep_tanh@tiny'):
  config = text.get_config(preset)
  config.data.task = 'numbers'
  return config
