"""Times the translation of a test set by a trained run, and by PyTorch with the same parameters.

Sentences are batched by length, and the decoding of a batch ends when all its sentences have ended.
"""

import itertools
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from attention_jax.data.encoding import encode
from attention_jax.data.files import read_lines
from attention_jax.data.text import Corpus
from attention_jax.decoding.metrics import compute_metric
from attention_jax.errors import UserError
from attention_jax.modules.attention import Attention
from attention_jax.systems.runs import Run, open_run
from attention_jax.tokens import UNK
from experiments.launch import program_command
from lab.benchmarks import peers
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare

BATCH_SIZE = 128  # of PyTorch
TORCH_ATTENTION = {'score': 'additive', 'alignment': 'softmax', 'heads': 1}  # fields of config.model.attention
METRIC = 'bleu(tokenize="none")'


def translation(bench: BenchmarkContext) -> list[Timing]:
  """Times greedy search and beam search with 5 beams, and the start of a new process.

  Args:
    bench: its `run` is the folder of a trained bahdanau2015_deep_tanh on text, its `data` one with test2016.en and
      test2016.de.

  Returns:
    The timings; BLEU of every side is logged.

  Raises:
    UserError: if the run or the test set cannot be read, or if PyTorch is installed but lacks the model of the run.
  """
  run = open_run(bench.run, dtype=bench.dtype)
  lines = read_lines(f'{bench.data}/test2016.en')
  references = [[line] for line in read_lines(f'{bench.data}/test2016.de')]
  timings = []
  for beams in (1, 5):
    bench.log(f'translation of {len(lines)} sentences by {bench.run}, {beams} beam(s)')
    outputs: dict[str, list[str]] = {}  # side -> its latest translations
    sides = {'attention_jax': _jax_side(run, lines, beams, outputs)}
    if peers.is_available():
      for dtype in bench.torch_dtypes:
        sides[f'torch, {dtype}'] = _torch_side(run, lines, beams, outputs, dtype)
    case = f'test2016, {beams} beam(s)'
    case_timings = compare('translation', case, sides, repeats=bench.repeats, amount=len(lines), unit='sentences')
    for timing in case_timings:
      bleu = compute_metric(METRIC, outputs[timing.side], references).value
      bench.log(f'{timing.side}: {timing.rate:.0f} sentences/s, BLEU {bleu:.2f}')
    timings += case_timings
  return timings + _time_start(bench, lines[0])


def _time_start(bench: BenchmarkContext, line: str) -> list[Timing]:
  """Times a whole process that translates one line with programs that an earlier process has compiled and stored."""
  bench.log('a new process that translates one sentence')
  command = [*program_command('translate'), f'--workdir={bench.run}']
  side = Side(lambda: subprocess.run(command, input=line, text=True, check=True, stdout=subprocess.PIPE))
  repeats = min(bench.repeats, 3)
  return compare('translation', 'start and one sentence', {'attention_jax': side}, repeats=repeats)


def _jax_side(run: Run, lines: Sequence[str], beams: int, outputs: dict[str, list[str]]) -> Side:
  def translate_all() -> None:
    predictions = run.predictor(lines, beams=beams)
    outputs['attention_jax'] = [prediction.hypotheses[0].text for prediction in predictions]

  return Side(translate_all)


def _torch_side(run: Run, lines: list[str], beams: int, outputs: dict[str, list[str]], dtype: str) -> Side:
  """Returns the side that translates the lines in PyTorch; its time does not include the encoding of the sources."""
  translate, source_size = _torch_translator(run, beams, dtype)
  sources = _encode_sources(run, lines, source_size)
  by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))

  def translate_all() -> None:
    texts = [''] * len(sources)
    for start in range(0, len(sources), BATCH_SIZE):
      rows = by_length[start : start + BATCH_SIZE]
      padded = _pad([sources[i] for i in rows])
      for i, tokens in zip(rows, translate(padded), strict=True):
        texts[i] = run.predictor.target_vocab.decode(tokens)
    outputs[f'torch, {dtype}'] = texts

  return Side(translate_all)


def _torch_translator(run: Run, beams: int, dtype: str) -> tuple[Callable, int]:
  """Returns PyTorch's translator with the parameters of a run, and the size of the source vocabulary."""
  params = jax.device_get(run.params)
  try:
    _check_same_model(run.config.model.attention, params)
    sizes = {
      'source_size': params['encoder']['embedding']['table']['embedding'].shape[0],
      'target_size': params['output']['kernel'].shape[1],
      'embedding': params['embedding']['table']['embedding'].shape[1],
      'features': params['decoder']['cell']['stack']['cells_0']['kernel'].shape[0],
      'dropout': 0.0,
    }
    translate = peers.make_translator(params, sizes, beams, run.predictor.max_length, dtype)
  except (KeyError, RuntimeError) as error:
    raise UserError(
      f'{run.folder}: expected bahdanau2015_deep_tanh with one layer, the only model compared with PyTorch'
    ) from error
  return translate, sizes['source_size']


def _check_same_model(attention: Attention, params: Any) -> None:
  """Raises KeyError unless PyTorch has this attention and this number of layers."""
  if any(getattr(attention, field) != value for field, value in TORCH_ATTENTION.items()):
    raise KeyError('attention')
  if len(params['decoder']['cell']['stack']) != 2:  # a bridge and one layer
    raise KeyError('stack')


def _encode_sources(run: Run, lines: list[str], source_size: int) -> list[np.ndarray]:
  """Returns the ids of each line; ids outside of the vocabulary become UNK."""
  corpus = Corpus(lines, [''] * len(lines))
  encoded = encode(corpus, run.predictor.source_vocab, run.predictor.target_vocab)
  ids = np.where(encoded.source < source_size, encoded.source, UNK)
  offsets = encoded.source_offsets
  return [ids[start:stop] for start, stop in itertools.pairwise(offsets)]


def _pad(rows: Sequence[np.ndarray]) -> np.ndarray:
  """Returns [B, S] with 0 for padding."""
  padded = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded
