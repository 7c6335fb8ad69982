"""Further training of a run: its config, with the run as the start.

  python -m experiments.train --config=configs/from_run.py:runs/opus --workdir=runs/tuned --config.data.folder=FOLDER \\
    --config.data.task="text(train='train', validation='val', test='test', source='en', target='de')"

The preset is the folder of the run, such as one of experiments.import_model.
"""

from ml_collections import ConfigDict

from attention_jax.systems.config import read_run_config, to_dict
from attention_jax.systems.ready_made import resolve_folder


def get_config(folder: str):
  config = ConfigDict(to_dict(read_run_config(resolve_folder(folder))))
  config.initial_run = folder
  return config
