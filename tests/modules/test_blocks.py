"""Decoder blocks built from modules against those of transformers (tests/references/make_blocks.py): random weights."""

import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from attention_jax.functional.mask import Mask
from attention_jax.modules.attention import Attention
from attention_jax.modules.differential import lambda_of_layer
from attention_jax.modules.positions import POSITIONS
from attention_jax.modules.transformer import (
  ACTIVATIONS,
  Activation,
  DecoderLayer,
  EncoderLayer,
  FeedForward,
  Residual,
  make_norm,
  self_attention_mask,
)

FOLDER = Path(__file__).parents[1] / 'references' / 'blocks'
D, HEADS, KV_HEADS, WIDTH, HIDDEN = 32, 4, 2, 12, 40
CAUSAL = Mask.causal()
WINDOW = self_attention_mask(causal=True, window=2)  # transformers counts the query: sliding_window=3


def attention(score, alignment='softmax', **fields) -> Attention:
  options = {'features': D, 'heads': HEADS, 'kv_heads': KV_HEADS, 'head_dim': WIDTH, 'implementation': 'xla'}
  options['positions'] = POSITIONS['rope'](base=100.0)
  return Attention(score, alignment, **options | fields)


def split_heads(weight: np.ndarray, width: int = WIDTH) -> np.ndarray:
  """A weight [N F, D] of torch as a kernel [N, D, F]."""
  return weight.reshape(-1, width, weight.shape[-1]).swapaxes(1, 2)


def of_attention(weights: dict, prefix: str, names: str = 'qkvo', value_width: int = WIDTH) -> dict:
  """Parameters of an Attention from weights with names such as prefix + 'q_proj.weight'."""
  q, k, v, o = (weights[prefix.format(name) + '.weight'] for name in names)
  kernels = {'query_kernel': split_heads(q), 'key_kernel': split_heads(k), 'value_kernel': split_heads(v, value_width)}
  params = {name: {'kernel': kernel} for name, kernel in kernels.items()} | {'join': {'kernel': o.T}}
  if prefix.format('q') + '.bias' in weights:
    biases = (weights[prefix.format(name) + '.bias'] for name in names)
    for name, bias in zip(params, biases, strict=True):
      params[name]['bias'] = bias if name == 'join' else bias.reshape(-1, WIDTH)
  return params


def of_feed(weights: dict, names: tuple[str, ...]) -> dict:
  return {f'Dense_{i}': {'kernel': weights[name + '.weight'].T} for i, name in enumerate(names)}


GATED = ('mlp.gate_proj', 'mlp.down_proj', 'mlp.up_proj')


class GemmaBlock(nn.Module):
  """A block whose sublayers are normalised before and after."""

  attention: Attention
  feed: FeedForward

  @nn.compact
  def __call__(self, x, mask, positions):
    norms = [make_norm('rms', jnp.float32, 1e-6) for _ in range(4)]
    normed = norms[0](x)
    memory = self.attention.remember(normed, mask, positions)
    x = x + norms[1](self.attention.parallel(normed, memory, positions=positions).context)
    return x + norms[3](self.feed(norms[2](x)))


def of_gemma(weights: dict, score_params: dict) -> dict:
  names = ('input', 'post_attention', 'pre_feedforward', 'post_feedforward')
  norms = {f'RMSNorm_{i}': {'scale': 1 + weights[f'{name}_layernorm.weight']} for i, name in enumerate(names)}
  return norms | {
    'attention': of_attention(weights, 'self_attn.{}_proj') | score_params,
    'feed': of_feed(weights, GATED),
  }


def of_llama(weights: dict, **fields) -> dict:
  """Parameters of an EncoderLayer, which norms with names of Llama precede."""
  norms = ('input_layernorm', 'post_attention_layernorm')
  return {'attention': of_attention(weights, 'self_attn.{}_proj', **fields), 'feed': of_feed(weights, GATED)} | {
    f'residuals_{i}': {'RMSNorm_0': {'scale': weights[f'{name}.weight']}} for i, name in enumerate(norms)
  }


def residual(epsilon: float = 1e-6):
  return functools.partial(Residual, 'rms', norm_first=True, epsilon=epsilon)


def qwen3_gains(weights: dict, offset: float = 0.0) -> dict:
  gains = {'query_gain': ('q', HEADS), 'key_gain': ('k', KV_HEADS)}
  tiled = {key: np.tile(offset + weights[f'self_attn.{name}_norm.weight'], (n, 1)) for key, (name, n) in gains.items()}
  return {'score_params': tiled}


def gpt_oss(weights, x):
  """The attention with its norm and residual connection."""
  module = attention('scaled_dot', 'softmax(sink=True)', bias=True)
  params = of_attention(weights, 'self_attn.{}_proj') | {'alignment_params': {'sink': weights['self_attn.sinks']}}
  normed = make_norm('rms', jnp.float32, 1e-5).apply({'params': {'scale': weights['input_layernorm.weight']}}, x)
  indices = jnp.arange(x.shape[1])

  def attend(module, x):
    return module.parallel(x, module.remember(x, WINDOW, indices), positions=indices).context

  return x + module.apply({'params': params}, normed, method=attend)


def gemma2(weights, x):
  module = attention('scaled_dot(scale=0.4472135954999579)', 'softmax(cap=2.0)')
  block = GemmaBlock(module, FeedForward(D, HIDDEN, 'geglu_tanh'))
  return block.apply({'params': of_gemma(weights, {})}, x, WINDOW, jnp.arange(x.shape[1]))


def gemma3(weights, x):
  module = attention('normed_dot(epsilon=1e-6, scale=0.4472135954999579)')
  block = GemmaBlock(module, FeedForward(D, HIDDEN, 'geglu_tanh'))
  params = of_gemma(weights, qwen3_gains(weights, offset=1.0))
  return block.apply({'params': params}, x, WINDOW, jnp.arange(x.shape[1]))


def qwen3(weights, x):
  layer = EncoderLayer(attention('normed_dot(epsilon=1e-6)'), FeedForward(D, HIDDEN, 'swiglu'), residual())
  params = of_llama(weights)
  params['attention'] |= qwen3_gains(weights)
  mask = CAUSAL & Mask.array(weights['io.attention_mask'][:, None] > 0)
  return layer.apply({'params': params}, x, mask, jnp.asarray(weights['io.position_ids'], jnp.int32), True)


def diffllama(weights, x):
  module = attention('scaled_dot', differential=True, initial_lambda=lambda_of_layer(2))
  params = of_llama(weights, value_width=2 * WIDTH)
  names = {'query_1': 'q1', 'key_1': 'k1', 'query_2': 'q2', 'key_2': 'k2'}
  difference = {name: weights[f'self_attn.lambda_{other}'] for name, other in names.items()}
  params['attention']['difference'] = difference | {'norm': {'scale': np.ones(2 * WIDTH, np.float32)}}
  layer = EncoderLayer(module, FeedForward(D, HIDDEN, 'swiglu'), residual(1e-5))
  return layer.apply({'params': params}, x, CAUSAL, jnp.arange(x.shape[1]), True)


def t5(weights, x):
  positions = POSITIONS['t5'](HEADS, WIDTH, False, buckets=6, max_distance=5)
  fields = {'kv_heads': 0}
  module = attention('scaled_dot(scale=1.0)', positions=positions, **fields)
  cross = attention('scaled_dot(scale=1.0)', positions=None, **fields)
  layer = DecoderLayer(module, cross, FeedForward(D, HIDDEN), residual())
  relative = weights['layer.0.SelfAttention.relative_attention_bias.weight']
  feed = of_feed(weights, ('layer.2.DenseReluDense.wi', 'layer.2.DenseReluDense.wo'))
  params = {
    'attention': of_attention(weights, 'layer.0.SelfAttention.{}') | {'positions': {'table': relative.T}},
    'cross': of_attention(weights, 'layer.1.EncDecAttention.{}'),
    'feed': {name: dense | {'bias': np.zeros(dense['kernel'].shape[1], np.float32)} for name, dense in feed.items()},
  } | {f'residuals_{i}': {'RMSNorm_0': {'scale': weights[f'layer.{i}.layer_norm.weight']}} for i in range(3)}
  encoded = weights['io.encoded']

  def decode(layer, x):
    mask = jnp.ones(encoded.shape[:2], bool)
    return layer(x, layer.remember(encoded, mask, encoded), CAUSAL, jnp.arange(x.shape[1]), True)[0]

  return layer.apply({'params': params}, x, method=decode)


@pytest.mark.long
@pytest.mark.parametrize('block', [gpt_oss, gemma2, gemma3, qwen3, diffllama, t5])
def test_blocks_equal_those_of_transformers(block, monkeypatch):
  gelu = functools.partial(jax.nn.gelu, approximate=True)
  monkeypatch.setitem(ACTIVATIONS, 'geglu_tanh', Activation('(gelu(x U) * x W) V, approximate.', gelu, gated=True))
  weights = load_file(FOLDER / f'{block.__name__}.safetensors')
  actual = jax.jit(functools.partial(block, weights))(weights['io.x'])
  is_token = weights.get('io.attention_mask', np.ones(actual.shape[:2])) > 0
  np.testing.assert_allclose(actual[is_token], weights['io.y'][is_token], rtol=1e-5, atol=1e-5)
