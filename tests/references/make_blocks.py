"""Makes blocks/: weights of decoder blocks of transformers, with inputs and their outputs in eager attention.

  python tests/references/make_blocks.py

The tests read the files and do not run this program, which needs torch, transformers and safetensors. Weights have the
names of transformers, inputs and outputs names that begin with 'io.'. All numbers are random: nothing was trained.
Every model is a small one, of which one block is stored; of gpt-oss, the attention with its norm and its residual
connection, without the mixture of experts.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import (
  DiffLlamaConfig,
  DiffLlamaModel,
  Gemma2Config,
  Gemma2Model,
  Gemma3TextConfig,
  Gemma3TextModel,
  GptOssConfig,
  GptOssModel,
  Qwen3Config,
  Qwen3Model,
  T5Config,
  T5Model,
)

FOLDER = Path(__file__).parent / 'blocks'
B, T, S, D = 2, 7, 5, 32
COMMON = {
  'vocab_size': 8,
  'hidden_size': D,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 12,
  'max_position_embeddings': 64,
  'attn_implementation': 'eager',
}
ROPE = {'rope_type': 'default', 'rope_theta': 100.0}


def save(name: str, weights: dict[str, torch.Tensor], **arrays: torch.Tensor) -> None:
  tensors = weights | {f'io.{key}': value for key, value in arrays.items()}
  tensors = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
  versions = {'torch': torch.__version__, 'transformers': transformers.__version__}
  FOLDER.mkdir(exist_ok=True)
  save_file(tensors, FOLDER / f'{name}.safetensors', versions)


def randomize(module: nn.Module) -> nn.Module:
  """Replaces initial values such as 0 and 1, which would hide exchanged weights."""
  for parameter in module.parameters():
    nn.init.normal_(parameter, std=0.3)
  return module.eval()


def record(module: nn.Module, calls: dict[str, torch.Tensor], name: str) -> None:
  """Stores the first argument and the first result of a module in `calls`, when it is called."""

  def hook(_, args, options, output):
    calls[f'{name}_in'] = args[0] if args else options['hidden_states']
    calls[f'{name}_out'] = output[0] if isinstance(output, tuple) else output

  module.register_forward_hook(hook, with_kwargs=True)


def decoder_block(name: str, model: nn.Module, layer: int = 0, **inputs: torch.Tensor) -> None:
  """Stores the block `layer` of a decoder without an encoder."""
  randomize(model)
  calls: dict[str, torch.Tensor] = {}
  block = model.layers[layer]
  record(block, calls, 'block')
  model(inputs_embeds=torch.randn(B, T, D), use_cache=False, **inputs)
  save(name, block.state_dict(), x=calls['block_in'], y=calls['block_out'], **inputs)


def gpt_oss() -> None:
  config = GptOssConfig(**COMMON, sliding_window=3, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE)
  model = randomize(GptOssModel(config))
  calls: dict[str, torch.Tensor] = {}
  block = model.layers[0]
  assert config.layer_types[0] == 'sliding_attention'
  record(block, calls, 'block')
  record(block.post_attention_layernorm, calls, 'norm')
  model(inputs_embeds=torch.randn(B, T, D), use_cache=False)
  weights = {key: value for key, value in block.state_dict().items() if not key.startswith(('mlp', 'post'))}
  save('gpt_oss', weights, x=calls['block_in'], y=calls['norm_in'])


def gemma2() -> None:
  config = Gemma2Config(
    **COMMON, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, sliding_window=3, rope_parameters=ROPE
  )
  assert config.layer_types[0] == 'sliding_attention'
  decoder_block('gemma2', Gemma2Model(config))


def gemma3() -> None:
  types = {name: ROPE for name in ('sliding_attention', 'full_attention')}
  config = Gemma3TextConfig(
    **COMMON,
    query_pre_attn_scalar=5,
    sliding_window=3,
    layer_types=['sliding_attention', 'full_attention'],
    rope_parameters=types,
  )
  decoder_block('gemma3', Gemma3TextModel(config))


def qwen3() -> None:
  mask = torch.ones(B, T, dtype=torch.long)
  mask[1, :2] = 0  # padding on the left, as in generation
  positions = (mask.cumsum(1) - 1).clamp(min=0)
  config = Qwen3Config(**COMMON, rope_parameters=ROPE)
  decoder_block('qwen3', Qwen3Model(config), attention_mask=mask, position_ids=positions)


def diffllama() -> None:
  config = DiffLlamaConfig(**COMMON, rope_parameters=ROPE)
  decoder_block('diffllama', DiffLlamaModel(config), layer=1)


def t5() -> None:
  config = T5Config(
    vocab_size=8,
    d_model=D,
    d_kv=12,
    d_ff=40,
    num_layers=1,
    num_decoder_layers=1,
    num_heads=4,
    relative_attention_num_buckets=6,
    relative_attention_max_distance=5,
    attn_implementation='eager',
  )
  model = randomize(T5Model(config))
  calls: dict[str, torch.Tensor] = {}
  block = model.decoder.block[0]
  record(block, calls, 'block')
  encoded = torch.randn(B, S, D)
  model(encoder_outputs=(encoded,), decoder_inputs_embeds=torch.randn(B, T, D), use_cache=False)
  save('t5', block.state_dict(), x=calls['block_in'], y=calls['block_out'], encoded=encoded)


if __name__ == '__main__':
  torch.manual_seed(0)
  with torch.no_grad():
    for make in (gpt_oss, gemma2, gemma3, qwen3, diffllama, t5):
      make()
