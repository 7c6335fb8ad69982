"""Makes torch_fixtures/: weights of layers of torch and of models of Joey NMT, with inputs and their outputs.

  python tests/modules/make_torch_fixtures.py

The tests read the files and do not run this program, which needs torch, safetensors and joeynmt. The files in the
repository are of torch 2.13.0 and joeynmt 2.3.0; their metadata name the versions. Weights have the names
of torch, inputs and outputs names that begin with 'io.'. All numbers are random: nothing was trained.
"""

from pathlib import Path
from types import SimpleNamespace

import joeynmt
import torch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).parent / 'torch_fixtures'
B, S, T, D, HEADS, HIDDEN = 2, 5, 4, 8, 2, 12
SOURCE_MASK = torch.arange(S) < torch.tensor([[S], [3]])  # True = not padding
SPECIAL = {
  'unk_token': '<unk>',
  'pad_token': '<pad>',
  'bos_token': '<s>',
  'eos_token': '</s>',
  'sep_token': None,
  'unk_id': 0,
  'pad_id': 1,
  'bos_id': 2,
  'eos_id': 3,
  'sep_id': None,
  'lang_tags': [],
}


def save(name: str, module: nn.Module, **arrays: torch.Tensor) -> None:
  weights = {key: value.detach().clone().contiguous() for key, value in module.state_dict().items()}
  # Positional encodings are large constants: only the first position is stored.
  weights = {key: value[:, :1].clone() if key.endswith('pe.pe') else value for key, value in weights.items()}
  arrays = {f'io.{key}': value.detach().clone().contiguous() for key, value in arrays.items()}
  versions = {'torch': torch.__version__, 'joeynmt': joeynmt.__version__}
  save_file(weights | arrays, FOLDER / f'{name}.safetensors', versions)


def randomize(module: nn.Module) -> nn.Module:
  """Replaces initial values such as 0 and 1, which would hide exchanged weights."""
  for parameter in module.parameters():
    nn.init.normal_(parameter, std=0.4)
  return module.eval()


def multihead_attention() -> None:
  module = randomize(nn.MultiheadAttention(D, HEADS, batch_first=True))
  query, memory = torch.randn(B, T, D), torch.randn(B, S, D)
  context, weights = module(query, memory, memory, key_padding_mask=~SOURCE_MASK, average_attn_weights=False)
  save('multihead_attention', module, query=query, memory=memory, mask=SOURCE_MASK, context=context, weights=weights)


def transformer(norm_first: bool) -> None:
  options = {'dropout': 0.0, 'batch_first': True, 'norm_first': norm_first}
  module = randomize(nn.Transformer(D, HEADS, 2, 2, HIDDEN, **options))
  source, target = torch.randn(B, S, D), torch.randn(B, T, D)
  padding = ~SOURCE_MASK
  result = module(
    source,
    target,
    tgt_mask=nn.Transformer.generate_square_subsequent_mask(T),
    src_key_padding_mask=padding,
    memory_key_padding_mask=padding,
  )
  name = f'transformer_{"pre" if norm_first else "post"}'
  save(name, module, source=source, target=target, mask=SOURCE_MASK, result=result)


class BahdanauDecoder(nn.Module):
  """The decoder of the tutorial 'Translation with a sequence to sequence network and attention' of pytorch.org."""

  def __init__(self, vocabulary: int, hidden: int):
    super().__init__()
    self.embedding = nn.Embedding(vocabulary, hidden)
    self.attention = nn.Module()
    self.attention.Wa = nn.Linear(hidden, hidden)
    self.attention.Ua = nn.Linear(hidden, hidden)
    self.attention.Va = nn.Linear(hidden, 1)
    self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
    self.out = nn.Linear(hidden, vocabulary)

  def forward(self, tokens, memory, mask, state):
    logits, weights = [], []
    attention = self.attention
    for token in tokens.T:
      scores = attention.Va(torch.tanh(attention.Wa(state.transpose(0, 1)) + attention.Ua(memory))).squeeze(2)
      weights.append(scores.masked_fill(~mask, -torch.inf).softmax(-1))
      context = weights[-1][:, None] @ memory
      output, state = self.gru(torch.cat([self.embedding(token)[:, None], context], dim=2), state)
      logits.append(self.out(output[:, 0]))
    return torch.stack(logits, 1), torch.stack(weights, 1)


def bahdanau() -> None:
  module = randomize(BahdanauDecoder(9, D))
  tokens = torch.randint(9, (B, T))
  memory, state = torch.randn(B, S, D), torch.randn(1, B, D)
  logits, weights = module(tokens, memory, SOURCE_MASK, state)
  arrays = {'tokens': tokens, 'memory': memory, 'state': state[0], 'mask': SOURCE_MASK}
  save('bahdanau', module, **arrays, logits=logits, weights=weights)


def joeynmt_model(name: str, encoder: dict, decoder: dict, scale: bool) -> None:
  embeddings = {'embedding_dim': D if scale else 6, 'scale': scale, 'dropout': 0.0}
  common = {'dropout': 0.0, 'embeddings': embeddings}
  vocabularies = [Vocabulary([f'w{i}' for i in range(size)], SimpleNamespace(**SPECIAL)) for size in (7, 5)]
  config = {'encoder': encoder | common, 'decoder': decoder | common, 'initializer': 'xavier_uniform'}
  module = randomize(build_model(config, *vocabularies))
  sizes = [len(vocabulary) for vocabulary in vocabularies]
  source = torch.where(SOURCE_MASK, torch.randint(2, sizes[0], (B, S)), 1)
  target = torch.randint(2, sizes[1], (B, T))
  inputs = torch.cat([torch.full((B, 1), 2), target[:, :-1]], 1)
  logits, _, weights, _ = module._encode_decode(
    src=source,
    trg_input=inputs,
    src_mask=SOURCE_MASK[:, None],
    src_length=SOURCE_MASK.sum(1),
    trg_mask=torch.ones(B, 1, T, dtype=torch.bool),
    return_attention=True,
  )
  save(name, module, source=source, target=target, mask=SOURCE_MASK, logits=logits, weights=weights)


def main() -> None:
  torch.manual_seed(0)
  FOLDER.mkdir(exist_ok=True)
  multihead_attention()
  transformer(norm_first=False)
  transformer(norm_first=True)
  bahdanau()
  rnn_encoder = {'type': 'recurrent', 'rnn_type': 'gru', 'hidden_size': 4, 'num_layers': 2, 'bidirectional': True}
  rnn_decoder = {'type': 'recurrent', 'rnn_type': 'gru', 'hidden_size': D, 'num_layers': 2, 'input_feeding': True}
  joeynmt_model(
    'joeynmt_bahdanau', rnn_encoder, rnn_decoder | {'attention': 'bahdanau', 'init_hidden': 'bridge'}, False
  )
  lstm = {'rnn_type': 'lstm', 'num_layers': 1}
  luong = {'attention': 'luong', 'init_hidden': 'zero'}
  joeynmt_model('joeynmt_luong', rnn_encoder | lstm, rnn_decoder | lstm | luong, False)
  layers = {'type': 'transformer', 'hidden_size': D, 'ff_size': HIDDEN, 'num_layers': 2, 'num_heads': HEADS}
  for position in ('pre', 'post'):
    side = layers | {'layer_norm': position}
    joeynmt_model(f'joeynmt_transformer_{position}', side, side, True)


if __name__ == '__main__':
  main()
