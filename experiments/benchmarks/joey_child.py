"""python joey_child.py ARRAYS.npz MODEL SIZES: Joey NMT at work, in an interpreter of its own (its packages are old).

Reads commands from standard input, does each once and then prints 'done': 'train', one update of Adam with clipping on
the batch of source and target; 'search BEAMS STEPS', of the source. It knows nothing of this package; see joey.py.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

import numpy as np
import torch
from joeynmt.batch import Batch
from joeynmt.model import build_model
from joeynmt.search import search
from joeynmt.vocabulary import Vocabulary

UNK, PAD, BOS, EOS = range(4)
SPECIAL = SimpleNamespace(
  unk_token='<unk>',
  pad_token='<pad>',
  bos_token='<s>',
  eos_token='</s>',
  sep_token=None,
  lang_tags=[],
  unk_id=UNK,
  pad_id=PAD,
  bos_id=BOS,
  eos_id=EOS,
  sep_id=None,
)


def recurrent(attention: str, input_feeding: bool):
  def config(embedding, features, dropout, **rest):
    side = {'rnn_type': 'gru', 'num_layers': 1, 'embeddings': {'embedding_dim': embedding}, 'dropout': dropout}
    decoder = {'attention': attention, 'input_feeding': input_feeding, 'init_hidden': 'bridge', 'hidden_size': features}
    return {
      'encoder': side | {'type': 'recurrent', 'hidden_size': features // 2, 'bidirectional': True},
      'decoder': side | {'type': 'recurrent'} | decoder,
    }

  return config


def transformer(features, heads, layers, hidden, dropout, **rest):
  side = {
    'type': 'transformer',
    'num_layers': layers,
    'num_heads': heads,
    'hidden_size': features,
    'ff_size': hidden,
    'embeddings': {'embedding_dim': features, 'scale': True},
    'dropout': dropout,
  }
  return {'encoder': dict(side), 'decoder': dict(side)}


CONFIGS = {'Bahdanau': recurrent('bahdanau', True), 'Luong': recurrent('luong', False), 'Transformer': transformer}


def make_batch(source: np.ndarray, target: np.ndarray) -> Batch:
  """Ids from 4 on, 0 behind the ends; targets get BOS before them, and EOS in the place of their last word."""
  lengths, ends = (source > 0).sum(1), (target > 0).sum(1)
  target = np.where(np.arange(target.shape[1])[None] == ends[:, None] - 1, EOS, np.where(target > 0, target, PAD))
  target = np.pad(target, ((0, 0), (1, 0)), constant_values=BOS)
  tensor = lambda x: torch.tensor(x, dtype=torch.long)
  given = tensor(np.where(source > 0, source, PAD)), tensor(lengths), None, tensor(target), None
  return Batch(*given, torch.arange(len(source)), torch.device('cpu'), PAD, EOS)


def main() -> None:
  arrays, name, sizes = np.load(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
  torch.manual_seed(0)
  vocabularies = [
    Vocabulary([f'w{i}' for i in range(sizes.pop(f'{side}_size') - 4)], SPECIAL) for side in ('source', 'target')
  ]
  config = CONFIGS[name](**sizes) | {'initializer': 'xavier_uniform', 'embed_initializer': 'xavier_uniform'}
  model = build_model(config, *vocabularies)
  model.loss_function = ('crossentropy', 0.0)
  optimizer = torch.optim.Adam(model.parameters(), 1e-3)
  size = sum(p.numel() for p in model.parameters())

  def train() -> None:
    model.train()
    batch = make_batch(arrays['source'], arrays['target'])
    batch.sort_by_src_length()
    loss, *_ = model(return_type='loss', **vars(batch))
    batch.normalize(loss, 'tokens').backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  def found(beams: str, steps: str) -> None:
    model.eval()
    batch = make_batch(arrays['source'], arrays['target'])
    batch.sort_by_src_length()
    search(model, batch, int(steps), int(beams), 0.6, min_output_length=int(steps))

  commands = {'train': train, 'search': found}
  print(f'ready {size}', flush=True)
  for line in sys.stdin:
    command, *rest = line.split()
    commands[command](*rest)
    print('done', flush=True)


if __name__ == '__main__':
  main()
