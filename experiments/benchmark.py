"""python -m experiments.benchmark --out=runs/benchmark [--suites=kernels,training]

Measures this machine: attention kernels, training, decoding, input pipeline, start-up. Every figure is a ratio of
sides that were run in turns in one process; beside PyTorch where it is installed (requirements-bench.txt), and beside
Joey NMT where it is in an environment of its own (python -m venv joey; joey/bin/pip install torch==2.13.0
joeynmt==2.3.0 importlib_metadata): --joey=joey/bin/python.
"""

import functools

from absl import flags

from experiments.launch import FLAGS, launch

flags.DEFINE_list('suites', [], 'which suites; all of them where none is named')
flags.DEFINE_string('out', 'runs/benchmark', 'folder for benchmark.json and the pictures')
flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'what attention and models compute in')
flags.DEFINE_integer('repeats', 7, 'how often each side is run', lower_bound=2)
flags.DEFINE_string('run', '', 'folder of a trained bahdanau2015: also measures how fast it translates')
flags.DEFINE_string('joey', '', 'interpreter of an environment with Joey NMT, to train and decode beside it')
flags.DEFINE_string('data', 'data/multi30k', 'folder with test2016.en and test2016.de, for --run')


def main() -> None:
  from experiments.benchmarks.measure import BenchmarkContext
  from experiments.benchmarks.report import run_suites

  log = functools.partial(print, flush=True)
  run_suites(
    FLAGS.suites, FLAGS.out, BenchmarkContext(log, FLAGS.repeats, FLAGS.dtype, FLAGS.joey, FLAGS.run, FLAGS.data)
  )


if __name__ == '__main__':
  launch(main)
