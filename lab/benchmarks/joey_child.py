"""Runs Joey NMT in an interpreter of its own, as its dependencies are old: python joey_child.py ARRAYS.npz MODEL SIZES.

Prints 'ready' and the number of parameters of the model. Then reads commands from standard input, runs each once and
prints 'done' after it. 'train' makes one update of Adam with clipping on the batch of source and target; 'search BEAMS
STEPS' searches over the source. Imports nothing of this project; see joey.py.
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


def make_recurrent_config(attention: str, input_feeding: bool):
  """Returns a function from sizes to the config of a recurrent model."""

  def config(embedding, features, dropout):
    shared = {'rnn_type': 'gru', 'num_layers': 1, 'embeddings': {'embedding_dim': embedding}, 'dropout': dropout}
    decoder = {'attention': attention, 'input_feeding': input_feeding, 'init_hidden': 'bridge', 'hidden_size': features}
    return {
      'encoder': shared | {'type': 'recurrent', 'hidden_size': features // 2, 'bidirectional': True},
      'decoder': shared | {'type': 'recurrent'} | decoder,
    }

  return config


def transformer_config(features, heads, layers, hidden, dropout):
  """Returns the config of a Transformer with these sizes.

  Args:
    features: width of the embeddings and of the layers.
    heads: number of heads.
    layers: number of layers of the encoder, and of the decoder.
    hidden: width of the hidden layer of the feed-forward networks.
    dropout: dropout rate.
  """
  shared = {
    'type': 'transformer',
    'num_layers': layers,
    'num_heads': heads,
    'hidden_size': features,
    'ff_size': hidden,
    'embeddings': {'embedding_dim': features, 'scale': True},
    'dropout': dropout,
  }
  return {'encoder': dict(shared), 'decoder': dict(shared)}


CONFIGS = {
  'Bahdanau': make_recurrent_config('bahdanau', True),
  'Luong': make_recurrent_config('luong', False),
  'Transformer': transformer_config,
}


def make_batch(source: np.ndarray, target: np.ndarray) -> Batch:
  """Converts ids to a batch of Joey NMT: BOS precedes each target, and EOS replaces its last word.

  Args:
    source: ids [B, S], words from 4 on, 0 for padding.
    target: ids [B, T], likewise.
  """
  source_lengths = (source > 0).sum(1)
  last_words = (target > 0).sum(1)[:, None] - 1
  target = np.where(np.arange(target.shape[1])[None] == last_words, EOS, np.where(target > 0, target, PAD))
  target = np.pad(target, ((0, 0), (1, 0)), constant_values=BOS)
  return Batch(
    to_tensor(np.where(source > 0, source, PAD)),
    to_tensor(source_lengths),
    None,
    to_tensor(target),
    None,
    torch.arange(len(source)),
    torch.device('cpu'),
    PAD,
    EOS,
  )


def to_tensor(array: np.ndarray) -> torch.Tensor:
  """Returns a tensor of int64 with the values of an array."""
  return torch.tensor(array, dtype=torch.long)


def main() -> None:
  """Builds the model, then runs the commands of standard input on the arrays."""
  arrays = np.load(sys.argv[1])
  name = sys.argv[2]
  sizes = json.loads(sys.argv[3])
  torch.manual_seed(0)
  vocabularies = [
    Vocabulary([f'w{i}' for i in range(sizes.pop(f'{side}_size') - 4)], SPECIAL) for side in ('source', 'target')
  ]
  config = CONFIGS[name](**sizes) | {'initializer': 'xavier_uniform', 'embed_initializer': 'xavier_uniform'}
  model = build_model(config, *vocabularies)
  model.loss_function = ('crossentropy', 0.0)
  optimizer = torch.optim.Adam(model.parameters(), 1e-3)
  parameters = sum(p.numel() for p in model.parameters())

  def train() -> None:
    model.train()
    batch = make_batch(arrays['source'], arrays['target'])
    batch.sort_by_src_length()
    loss, *_ = model(return_type='loss', **vars(batch))
    batch.normalize(loss, 'tokens').backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  def beam_search(beams: str, steps: str) -> None:
    model.eval()
    batch = make_batch(arrays['source'], arrays['target'])
    batch.sort_by_src_length()
    search(model, batch, int(steps), int(beams), 0.6, min_output_length=int(steps))

  commands = {'train': train, 'search': beam_search}
  print(f'ready {parameters}', flush=True)
  for line in sys.stdin:
    command, *arguments = line.split()
    commands[command](*arguments)
    print('done', flush=True)


if __name__ == '__main__':
  main()
