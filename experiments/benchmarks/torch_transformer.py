"""The Transformer of PyTorch's own layers, and our parameters put into it."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PAD, BOS = 0, 1


class Transformer(nn.Module):
  """Norms after the sums, sines before cosines, output layer tied to the target embeddings: as in transformer2017."""

  def __init__(self, source_size, target_size, features, heads, layers, hidden, dropout):
    super().__init__()
    self.source = nn.Embedding(source_size, features)
    self.target = nn.Embedding(target_size, features)
    sizes = features, heads, hidden, dropout
    self.encoder = nn.TransformerEncoder(
      nn.TransformerEncoderLayer(*sizes, batch_first=True), layers, enable_nested_tensor=False
    )
    self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, batch_first=True), layers)
    self.bias = nn.Parameter(torch.zeros(target_size))
    self.drop = nn.Dropout(dropout)
    for table in (self.source, self.target):
      nn.init.normal_(table.weight, std=features**-0.5)

  def enter(self, table, ids):
    features, half = table.weight.shape[1], table.weight.shape[1] // 2
    at = torch.arange(ids.shape[1]).unsqueeze(1) / 10000 ** (2 * torch.arange(half) / features)
    return self.drop(table(ids)) * math.sqrt(features) + torch.cat([at.sin(), at.cos()], -1)

  def forward(self, source, target):
    """Features [B, T, D] of the target's positions."""
    padding, entering = source == PAD, F.pad(target[:, :-1], (1, 0), value=BOS)
    memory = self.encoder(self.enter(self.source, source), src_key_padding_mask=padding)
    later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
    return self.decoder(
      self.enter(self.target, entering), memory, tgt_mask=later, memory_key_padding_mask=padding, tgt_is_causal=True
    )

  def loss(self, source, target):
    real = target != PAD
    return F.cross_entropy(F.linear(self(source, target)[real], self.target.weight, self.bias), target[real])

  def logits(self, source, target):
    return F.linear(self(source, target), self.target.weight, self.bias)

  def load_jax_params(self, params):
    """Puts the parameters of our model here. Theirs has biases where the paper has none; they are set to zero."""
    tensor = lambda x: torch.tensor(np.asarray(x))
    state = {
      'source.weight': tensor(params['encoder']['embedding']['table']['embedding']),
      'target.weight': tensor(params['embedding']['table']['embedding']),
      'bias': tensor(params['output']['bias']),
    }
    for side, attentions in (('encoder', {'self_attn': 'attention'}), ('decoder', DECODING)):
      for i in range(len(getattr(self, side).layers)):
        ours, at = params[side][f'blocks_{i}'], f'{side}.layers.{i}.'
        for theirs, name in attentions.items():
          state |= {f'{at}{theirs}.{k}': tensor(v) for k, v in _attention(ours[name]).items()}
        for n, feed in enumerate(('Dense_0', 'Dense_1'), 1):
          state[f'{at}linear{n}.weight'] = tensor(ours['feed'][feed]['kernel']).T
          state[f'{at}linear{n}.bias'] = tensor(ours['feed'][feed]['bias'])
        for n in range(len(attentions) + 1):
          norm = ours[f'residuals_{n}']['LayerNorm_0']
          state |= {f'{at}norm{n + 1}.weight': tensor(norm['scale']), f'{at}norm{n + 1}.bias': tensor(norm['bias'])}
    self.load_state_dict(state)


DECODING = {'self_attn': 'attention', 'multihead_attn': 'cross'}


def _attention(ours) -> dict[str, np.ndarray]:
  sides = [np.asarray(ours[f'{side}_kernel']['kernel']) for side in ('query', 'key', 'value')]  # [N, D, F]
  inward = np.concatenate([side.transpose(0, 2, 1).reshape(-1, side.shape[1]) for side in sides])
  outward = np.asarray(ours['join']['kernel']).T
  zeros = {'in_proj_bias': np.zeros(len(inward), np.float32), 'out_proj.bias': np.zeros(len(outward), np.float32)}
  return {'in_proj_weight': inward, 'out_proj.weight': outward, **zeros}
