"""Makes the updates of test_meshes.py in one of several processes; prints metrics and sums of parameters of each case.

python -m tests.systems.train_on_meshes
"""

import json

import jax
import numpy as np

if __name__ == '__main__':
  jax.distributed.initialize()  # before the imports, some of which compute

from attention_jax.training.partition import make_mesh
from tests.systems.test_meshes import SEVERAL_PROCESSES, make_model, search_scores, train

if __name__ == '__main__':
  for name, (preset, sizes, options) in SEVERAL_PROCESSES.items():
    seeds = len(options.get('seed', [0]))
    mesh = make_mesh(jax.devices(), seeds, sizes)
    params, metrics, _ = train(make_model(preset), mesh, **options)
    sums = [float(np.abs(x).sum(dtype=np.float64)) for x in jax.tree.leaves(params)]
    values = {key: np.asarray(value).tolist() for key, value in metrics.items()}
    values['scores'] = [] if options else search_scores(make_model(preset), mesh).tolist()
    print(json.dumps({'case': name, 'params': sums, **values}), flush=True)
