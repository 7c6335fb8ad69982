"""Translates lines with an exported decoder, without attention_jax: copy this file into a project, or read it.

  python -m experiments.export --workdir=runs/dates --output=exported
  python docs/load_decoder.py exported '5 March 1999' '5. März 1999'

Prints the best hypothesis of each line, its score, and the hypothesis of a greedy search, which calls the model step by
step. Needs jax, flatbuffers, numpy and safetensors, and vocabularies of words or characters.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

SPECIAL_TOKENS = ['<pad>', '<s>', '</s>', '<unk>']
PAD, BOS, EOS, UNK = range(4)
SPLIT = {'char': list, 'word': str.split}  # kind of a vocabulary -> the function from a text to tokens
JOIN = {'char': ''.join, 'word': ' '.join}


def load_function(folder, name):
  """Returns an exported function, which `call` calls: search, start or step."""
  return jax.export.deserialize(bytearray((folder / f'{name}.jax_export').read_bytes()))


def load_vocabulary(folder, side):
  """Returns the kind of a vocabulary, and its tokens in the order of their ids."""
  content = json.loads((folder / f'vocabulary.{side}.json').read_text('utf-8'))
  return content['kind'], SPECIAL_TOKENS + content['tokens']


def encode(sources, tokens):
  """Returns the ids [B, S] of tokenized sources, each with EOS at its end, and the mask of what is not padding."""
  numbers = {token: number for number, token in enumerate(tokens)}
  ids = np.full((len(sources), max(map(len, sources)) + 1), PAD, np.int32)
  for row, source in zip(ids, sources, strict=True):
    row[: len(source) + 1] = [numbers.get(token, UNK) for token in source] + [EOS]
  return ids, ids != PAD


def decode(ids, kind, tokens, source):
  """Returns the text of ids, up to EOS; ids from the size of the vocabulary on are copied tokens of the source."""
  end = list(ids).index(EOS) if EOS in ids else len(ids)
  return JOIN[kind]((tokens + source)[number] for number in ids[:end])


def search_greedily(start, step, weights, ids, mask, max_length):
  """Returns ids [B, max_length - 1], each the most probable one after those before it."""
  carry, memory = start.call(weights, ids, mask)
  token = np.full(len(ids), BOS, np.int32)
  columns = []
  for _ in range(max_length - 1):
    carry, logits, _ = step.call(weights, carry, token, memory)  # the third result: attention weights [B, S]
    logits = np.array(logits)
    logits[:, [PAD, BOS]] = -np.inf  # never emitted
    token = logits.argmax(-1).astype(np.int32)
    columns.append(token)
  return np.stack(columns, axis=1)


def main(folder, lines):
  """Prints the hypotheses of lines, as columns separated by tabs."""
  search, start, step = (load_function(folder, name) for name in ('search', 'start', 'step'))
  weights = load_file(folder / 'weights.safetensors')
  source_kind, source_tokens = load_vocabulary(folder, 'source')
  target = load_vocabulary(folder, 'target')
  sources = [SPLIT[source_kind](line) for line in lines]
  ids, mask = encode(sources, source_tokens)
  found = {name: np.asarray(values) for name, values in search.call(weights, ids, mask).items()}  # tokens [B, K, T]
  greedy = search_greedily(start, step, weights, ids, mask, found['tokens'].shape[-1])
  for row, source in enumerate(sources):
    best = decode(found['tokens'][row, 0], *target, source)
    print(best, f'{found["scores"][row, 0]:.6f}', decode(greedy[row], *target, source), sep='\t')


if __name__ == '__main__':
  main(Path(sys.argv[1]), sys.argv[2:])
