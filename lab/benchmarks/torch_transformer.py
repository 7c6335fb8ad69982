"""A Transformer of PyTorch's own layers, which can load our parameters."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PAD, BOS = 0, 1


class Transformer(nn.Module):
  """The model of transformer2017: post-norm, sines before cosines, output layer tied to the target embeddings."""

  def __init__(self, source_size, target_size, features, heads, layers, hidden, dropout):
    super().__init__()
    self.source = nn.Embedding(source_size, features)
    self.target = nn.Embedding(target_size, features)
    sizes = (features, heads, hidden, dropout)
    self.encoder = nn.TransformerEncoder(
      nn.TransformerEncoderLayer(*sizes, batch_first=True), layers, enable_nested_tensor=False
    )
    self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, batch_first=True), layers)
    self.bias = nn.Parameter(torch.zeros(target_size))
    self.drop = nn.Dropout(dropout)
    for table in (self.source, self.target):
      nn.init.normal_(table.weight, std=features**-0.5)

  def embed(self, table, ids):
    """Returns scaled embeddings plus sinusoidal positions [B, T, D]."""
    features = table.weight.shape[1]
    half = features // 2
    angles = torch.arange(ids.shape[1]).unsqueeze(1) / 10000 ** (2 * torch.arange(half) / features)
    return self.drop(table(ids)) * math.sqrt(features) + torch.cat([angles.sin(), angles.cos()], -1)

  def forward(self, source, target):
    """Returns features [B, T, D] of the target positions."""
    padding = source == PAD
    inputs = F.pad(target[:, :-1], (1, 0), value=BOS)
    memory = self.encoder(self.embed(self.source, source), src_key_padding_mask=padding)
    causal_mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
    return self.decoder(
      self.embed(self.target, inputs),
      memory,
      tgt_mask=causal_mask,
      memory_key_padding_mask=padding,
      tgt_is_causal=True,
    )

  def loss(self, source, target):
    """Returns the mean cross-entropy of the target tokens; ids [B, S] and [B, T], 0 for padding."""
    mask = target != PAD
    return F.cross_entropy(F.linear(self(source, target)[mask], self.target.weight, self.bias), target[mask])

  def logits(self, source, target):
    """Returns the logits [B, T, V]. Arguments: see `loss`."""
    return F.linear(self(source, target), self.target.weight, self.bias)

  def load_jax_params(self, params):
    """Loads the parameters of our model. PyTorch has biases that the paper does not have; they are set to zero."""
    state = {
      'source.weight': _to_tensor(params['encoder']['embedding']['table']['embedding']),
      'target.weight': _to_tensor(params['embedding']['table']['embedding']),
      'bias': _to_tensor(params['output']['bias']),
    }
    for side, attentions in ATTENTIONS.items():
      for i in range(len(getattr(self, side).layers)):
        weights = _layer_weights(params[side][f'blocks_{i}'], attentions)
        state |= {f'{side}.layers.{i}.{name}': _to_tensor(weight) for name, weight in weights.items()}
    self.load_state_dict(state)


# side -> names of its attentions in PyTorch and in our blocks
ATTENTIONS = {
  'encoder': {'self_attn': 'attention'},
  'decoder': {'self_attn': 'attention', 'multihead_attn': 'cross'},
}


def _layer_weights(block, attentions: dict[str, str]) -> dict[str, np.ndarray]:
  """Converts the parameters of one of our blocks to those of a layer of PyTorch."""
  weights = {}
  for torch_name, jax_name in attentions.items():
    converted = _attention_weights(block[jax_name])
    weights |= {f'{torch_name}.{name}': weight for name, weight in converted.items()}
  for number, dense in enumerate(('Dense_0', 'Dense_1'), 1):
    weights[f'linear{number}.weight'] = np.asarray(block['feed'][dense]['kernel']).T
    weights[f'linear{number}.bias'] = block['feed'][dense]['bias']
  for number in range(len(attentions) + 1):
    norm = block[f'residuals_{number}']['LayerNorm_0']
    weights[f'norm{number + 1}.weight'] = norm['scale']
    weights[f'norm{number + 1}.bias'] = norm['bias']
  return weights


def _attention_weights(attention) -> dict[str, np.ndarray]:
  """Converts the parameters of multi-head attention; kernels of query, key and value are [N, D, F]."""
  kernels = [np.asarray(attention[f'{name}_kernel']['kernel']) for name in ('query', 'key', 'value')]
  in_proj = np.concatenate([kernel.transpose(0, 2, 1).reshape(-1, kernel.shape[1]) for kernel in kernels])
  out_proj = np.asarray(attention['join']['kernel']).T
  return {
    'in_proj_weight': in_proj,
    'in_proj_bias': np.zeros(len(in_proj), np.float32),
    'out_proj.weight': out_proj,
    'out_proj.bias': np.zeros(len(out_proj), np.float32),
  }


def _to_tensor(array) -> torch.Tensor:
  return torch.tensor(np.asarray(array))
