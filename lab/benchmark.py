"""Measures this machine: attention kernels, training, decoding, input pipeline, start-up.

  python -m lab.benchmark --out=runs/benchmark --suites=kernels,training

The sides of a comparison, such as this package and PyTorch, run in turns. --suites=prepared --pairs=4640000 prepares
that many pairs and reads batches of them. Compares with PyTorch if it is installed (lab/requirements.txt), and with
Joey NMT if it has an environment of its own (python -m venv joey; joey/bin/pip install torch==2.13.0 joeynmt==2.3.0
importlib_metadata): --joey=joey/bin/python.
"""

import os

if __name__ == '__main__':
  # Before jax is imported: PyTorch needs some of the memory of a GPU.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import functools

from absl import flags

from experiments.launch import FLAGS, launch

flags.DEFINE_list(
  'suites',
  [],
  'names of suites; by default all, but prepared only with --pairs, aot with --topology, and translation with --run',
)
flags.DEFINE_string(
  'out',
  '',
  'the folder for benchmark.json, benchmark.md and the pictures; by default a new one in runs/, named by date and time',
)
flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'dtype in which attention and models compute')
flags.DEFINE_integer(
  'repeats', 7, 'number of turns in which each side is timed; some suites limit or fix it', lower_bound=2
)
flags.DEFINE_string('run', '', 'the folder of a trained bahdanau2015_deep_tanh, to measure its translation')
flags.DEFINE_integer('compile_threads', None, 'threads that compile; by default as many as cores', lower_bound=1)
flags.DEFINE_bool('torch_compile', True, 'whether to compare with torch.compile, which takes minutes to compile')
flags.DEFINE_string('joey', '', 'the interpreter of an environment with Joey NMT, to compare with it')
flags.DEFINE_string('data', 'data/multi30k', 'the folder with test2016.en and test2016.de, for --run')
flags.DEFINE_string('data_root', 'data', 'the folder with nettalk, multi30k and imdb, for startup and prepared')
flags.DEFINE_integer(
  'pairs', 0, "number of pairs for the suite 'prepared', such as 4640000; 0 omits the suite", lower_bound=0
)
flags.DEFINE_string('topology', '', "a topology of TPUs, such as v5e:1x1, for which the suite 'aot' compiles attention")
flags.DEFINE_string('checkout', '', "a checkout of another commit, which the suite 'startup' measures too")


def main() -> None:
  """Runs the suites of --suites, and writes their timings to --out."""
  from lab.benchmarks.measure import BenchmarkContext
  from lab.benchmarks.report import run_suites

  context = BenchmarkContext(
    log=functools.partial(print, flush=True),
    repeats=FLAGS.repeats,
    dtype=FLAGS.dtype,
    compile_threads=FLAGS.compile_threads,
    torch_compile=FLAGS.torch_compile,
    joey=os.path.expanduser(FLAGS.joey),
    run=FLAGS.run,
    data=FLAGS.data,
    data_root=os.path.expanduser(FLAGS.data_root),
    pairs=FLAGS.pairs,
    checkout=os.path.expanduser(FLAGS.checkout),
    topology=FLAGS.topology,
  )
  run_suites(FLAGS.suites, FLAGS.out, context)


if __name__ == '__main__':
  launch(main)
