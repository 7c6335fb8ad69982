"""Translation of a test set by a trained run, beside PyTorch with the same parameters: batches by length, until each
sentence has ended."""

import subprocess
import sys

import jax
import numpy as np

from attention_jax.data.encoding import encode
from attention_jax.data.files import read_lines
from attention_jax.data.text import Corpus
from attention_jax.errors import UserError
from attention_jax.inference.metrics import compute_metric
from attention_jax.systems.runs import open_run
from attention_jax.tokens import UNK
from experiments.benchmarks import peers
from experiments.benchmarks.measure import BenchmarkContext, Side, Timing, compare

ROWS = 128
SAME = {'score': 'additive', 'alignment': 'softmax', 'heads': 1}  # what PyTorch has beside it
METRIC = 'bleu(tokenize="none")'


def translation(bench: BenchmarkContext) -> list[Timing]:
  """Greedy search and beam 5. `run` is a folder with bahdanau2015 on text; `data`, one with test2016.{en,de}.

  Raises: UserError where the run is another model than the one that PyTorch has beside it.
  """
  folder, log, repeats = bench.run, bench.log, bench.repeats
  run = open_run(folder, dtype=bench.dtype)
  lines, references = (read_lines(f'{bench.data}/test2016.{side}') for side in ('en', 'de'))
  timings = []
  for beams in (1, 5):
    log(f'translation of {len(lines)} sentences by {folder}, {beams} beam(s)')
    said: dict[str, list[str]] = {}

    def ours(beams=beams, said=said):
      said['attention_jax'] = [p.hypotheses[0].text for p in run.predictor(lines, beams=beams)]

    sides = {'attention_jax': Side(ours)}
    if peers.torch is not None:
      sides |= {f'torch, {dtype}': _torch(run, lines, beams, said, dtype) for dtype in bench.torch_dtypes}
    found = compare(
      'translation', f'test2016, {beams} beam(s)', sides, repeats=repeats, amount=len(lines), unit='sentences'
    )
    for timing in found:
      value = compute_metric(METRIC, said[timing.side], [[line] for line in references]).value
      log(f'{timing.side}: {timing.rate:.0f} sentences/s, BLEU {value:.2f}')
    timings += found
  return timings + _start(folder, lines[0], log, repeats)


def _start(folder: str, line: str, log, repeats: int) -> list[Timing]:
  """Seconds of a whole process that translates one line; its programs were compiled, and stored, by the one before."""
  log('a new process that translates one sentence')
  command = [sys.executable, '-m', 'experiments.translate', f'--workdir={folder}']
  run = lambda: subprocess.run(command, input=line, text=True, check=True, stdout=subprocess.PIPE)
  return compare('translation', 'start and one sentence', {'attention_jax': Side(run)}, repeats=min(repeats, 3))


def _torch(run, lines: list[str], beams: int, said: dict[str, list[str]], dtype: str) -> Side:
  """The same in PyTorch, from ids on."""
  params, model = jax.device_get(run.params), run.config['model']
  try:
    other = {k: v for k, v in model['attention'].items() if SAME.get(k, v) != v}
    if other or len(params['decoder']['cell']['stack']) != 2:  # a bridge and a layer
      raise KeyError
    sizes = {
      'source_size': params['encoder']['embedding']['table']['embedding'].shape[0],
      'target_size': params['output']['kernel'].shape[1],
      'embedding': params['embedding']['table']['embedding'].shape[1],
      'features': params['decoder']['cell']['stack']['cells_0']['kernel'].shape[0],
      'dropout': 0.0,
    }
    translate = peers.translate(params, sizes, beams, run.predictor.max_length, dtype)
  except (KeyError, RuntimeError) as error:
    raise UserError(f'{run.folder}: PyTorch has bahdanau2015 with one layer beside it, and no other model') from error
  encoded = encode(Corpus(lines, [''] * len(lines)), run.predictor.source_vocab, run.predictor.target_vocab)
  flat = np.where(encoded.source < sizes['source_size'], encoded.source, UNK)
  ids = [flat[a:b] for a, b in zip(encoded.source_offsets, encoded.source_offsets[1:], strict=False)]
  order = sorted(range(len(ids)), key=lambda i: len(ids[i]))

  def theirs():
    texts = [''] * len(ids)
    for start in range(0, len(ids), ROWS):
      rows = order[start : start + ROWS]
      padded = np.zeros((len(rows), max(len(ids[i]) for i in rows)), np.int32)
      for row, i in zip(padded, rows, strict=True):
        row[: len(ids[i])] = ids[i]
      for i, tokens in zip(rows, translate(padded), strict=True):
        texts[i] = run.predictor.target_vocab.decode(tokens)
    said[f'torch, {dtype}'] = texts

  return Side(theirs)
