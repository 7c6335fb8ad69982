"""A training program without jax, for tests of sweeps: it writes the files of a run, fails, or sleeps.

Environment variables control it. A run sleeps for FAKE_SLEEP seconds. A run whose command line contains the text of
FAKE_FAIL exits with an error, and one with that of FAKE_KILL is killed. Each start adds a line to the file FAKE_STARTS.
"""

import json
import os
import signal
import sys
import time

from etils import epath


def main() -> None:
  flags = dict(argument.removeprefix('--').split('=', 1) for argument in sys.argv[1:])
  line = ' '.join(sys.argv[1:])
  with open(os.environ['FAKE_STARTS'], 'a') as file:
    file.write(f'{os.getpid()} {line}\n')
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # as an interrupted training
  time.sleep(float(os.environ.get('FAKE_SLEEP', '0')))
  if os.environ.get('FAKE_FAIL', '\0') in line:
    print('starting')
    sys.exit('error: loss is nan at step 7')
  if os.environ.get('FAKE_KILL', '\0') in line:
    os.kill(os.getpid(), signal.SIGKILL)
  folder = epath.Path(flags['workdir'])
  first = int(flags['config.training.seed'])
  seeds = int(flags.get('config.seeds', 1))
  for seed in range(first, first + seeds):
    write_run(folder if seeds == 1 else folder / f'seed_{seed}', seed, line)


def write_run(folder: epath.Path, seed: int, line: str) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  value = 10 * line.count('dot') + seed
  results = {'test': {'exact_match': {'value': value, 'unit': '%', 'signature': ''}}}
  (folder / 'config.json').write_text(json.dumps({'system': 'translation', 'training': {'seed': seed}}))
  (folder / 'results.json').write_text(json.dumps({'step': 100, 'results': results}))
  (folder / 'metrics').mkdir()
  (folder / 'metrics' / '0000000000.jsonl').write_text(
    json.dumps({'step': 100, 'validation/exact_match': value}) + '\n'
  )


if __name__ == '__main__':
  main()
