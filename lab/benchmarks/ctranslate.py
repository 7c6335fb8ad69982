"""Search by CTranslate2, in float32 or int8, with the parameters of our Transformer.

Without the package ctranslate2, `difference` returns None; everything else needs the package.
"""

import atexit
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_jax.tokens import SPECIAL_TOKENS
from lab.benchmarks.measure import Side

try:
  import ctranslate2
except ImportError:
  ctranslate2 = None

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN = SPECIAL_TOKENS
MAX_POSITIONS = 512


class CTranslate:
  """A Transformer of CTranslate2 with the parameters of ours, in a temporary folder.

  Args:
    params: parameters of transformer2017, post-norm, with sinusoidal positions and a tied output layer.
    heads: number of heads.
  """

  def __init__(self, params: Any, heads: int):
    self._vocabularies = [_tokens(size) for size in _vocabulary_sizes(params)]
    spec = make_spec(params, heads)
    spec.register_source_vocabulary(self._vocabularies[0])
    spec.register_target_vocabulary(self._vocabularies[1])
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    spec.validate()
    spec.optimize()
    self._model = os.path.join(folder.name, 'model')
    os.mkdir(self._model)
    spec.save(self._model)

  def log_probs(self, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """Returns the log-probability of every token of each target; ids [B, S] and [B, T], 0 for padding."""
    translator = ctranslate2.Translator(self._model, 'cpu')
    lines = [
      [[names[id] for id in row if id] for row in ids]
      for names, ids in zip(self._vocabularies, (source, target), strict=True)
    ]
    return [np.array(result.log_probs[:-1]) for result in translator.score_batch(*lines)]  # without EOS

  def search(self, source: np.ndarray, beams: int, steps: int, compute_type: str = 'float32') -> list[list[int]]:
    """Returns the ids of the best hypothesis of each source, of exactly `steps` tokens. Arguments: see `side`."""
    return self._searcher(source, beams, steps, compute_type)()

  def side(self, source: np.ndarray, beams: int, steps: int, compute_type: str = 'float32') -> Side:
    """Returns a search as a side of a comparison.

    Args:
      source: ids [B, S], 0 for padding.
      beams: beam size, 1 for greedy search.
      steps: number of decoding steps; no hypothesis ends before.
      compute_type: 'float32' or 'int8'.
    """
    return Side(self._searcher(source, beams, steps, compute_type))

  def _searcher(self, source: np.ndarray, beams: int, steps: int, compute_type: str):
    translator = ctranslate2.Translator(
      self._model, 'cpu', compute_type=compute_type, inter_threads=1, intra_threads=os.cpu_count()
    )
    names, target_names = self._vocabularies
    ids = {name: id for id, name in enumerate(target_names)}
    lines = [[names[id] for id in row if id] for row in source]

    def run() -> list[list[int]]:
      results = translator.translate_batch(
        lines,
        beam_size=beams,
        length_penalty=0.6,
        min_decoding_length=steps,
        max_decoding_length=steps,
      )
      return [[ids[name] for name in result.hypotheses[0]] for result in results]

    return run


def make_spec(params: Any, heads: int):
  """Returns CTranslate2's description of our Transformer."""
  layers = sum(name.startswith('blocks_') for name in params['decoder'])
  spec = ctranslate2.specs.TransformerSpec.from_config(layers, heads, pre_norm=False)
  spec.config.bos_token = spec.config.decoder_start_token = BOS_TOKEN
  spec.config.eos_token = EOS_TOKEN
  spec.config.unk_token = UNK_TOKEN
  source, target = (_array(table) for table in _embeddings(params))
  spec.encoder.embeddings[0].weight = source
  spec.decoder.embeddings.weight = target
  spec.decoder.projection.weight = target.copy()
  spec.decoder.projection.bias = _array(params['output']['bias'])
  for side in (spec.encoder, spec.decoder):
    side.position_encodings.encodings = _positions(source.shape[1])
  for i in range(layers):
    _fill_layer(spec.encoder.layer[i], params['encoder'][f'blocks_{i}'])
    _fill_layer(spec.decoder.layer[i], params['decoder'][f'blocks_{i}'])
  return spec


def difference(params: Any, logits: Any, batch: tuple[np.ndarray, np.ndarray], heads: int) -> float | None:
  """Compares log-probabilities of target tokens with those of CTranslate2 with the same parameters.

  Args:
    params: parameters of our model.
    logits: logits of our model [B, T, V].
    batch: (source, target) ids.
    heads: number of heads.

  Returns:
    The largest absolute difference, or None without ctranslate2.
  """
  if ctranslate2 is None:
    return None
  source, target = batch
  logits = np.asarray(logits, np.float64)
  normalizers = np.log(np.exp(logits).sum(-1))
  log_probs = np.take_along_axis(logits, target[..., None], -1)[..., 0] - normalizers
  peer_log_probs = CTranslate(params, heads).log_probs(source, target)
  pairs = zip(log_probs, peer_log_probs, strict=True)
  return max(float(np.abs(ours[: len(theirs)] - theirs).max()) for ours, theirs in pairs)


def _fill_layer(layer, block: Mapping[str, Any]) -> None:
  """Fills an encoder or decoder layer; residuals are numbered in the order of the sublayers."""
  norms = [block[f'residuals_{i}']['LayerNorm_0'] for i in range(3 if 'cross' in block else 2)]
  query, key, value, out = _kernels(block['attention'])
  _fill_linear(layer.self_attention.linear[0], np.concatenate([query, key, value]))
  _fill_linear(layer.self_attention.linear[1], out)
  _fill_norm(layer.self_attention.layer_norm, norms[0])
  if 'cross' in block:
    query, key, value, out = _kernels(block['cross'])
    for linear, weight in zip(layer.attention.linear, (query, np.concatenate([key, value]), out), strict=True):
      _fill_linear(linear, weight)
    _fill_norm(layer.attention.layer_norm, norms[1])
  for linear, name in ((layer.ffn.linear_0, 'Dense_0'), (layer.ffn.linear_1, 'Dense_1')):
    dense = block['feed'][name]
    _fill_linear(linear, np.asarray(dense['kernel']).T, dense['bias'])
  _fill_norm(layer.ffn.layer_norm, norms[-1])


def _kernels(attention: Mapping[str, Any]) -> list[np.ndarray]:
  """Returns the weights of query, key and value, [N F, D] from kernels [N, D, F], and of the join, transposed."""
  kernels = [np.asarray(attention[f'{name}_kernel']['kernel']) for name in ('query', 'key', 'value')]
  projections = [kernel.transpose(0, 2, 1).reshape(-1, kernel.shape[1]) for kernel in kernels]
  return [*projections, np.asarray(attention['join']['kernel']).T]


def _fill_linear(linear, weight: np.ndarray, bias: Any = None) -> None:
  linear.weight = _array(weight)
  linear.bias = np.zeros(len(weight), np.float32) if bias is None else _array(bias)


def _fill_norm(norm, params: Mapping[str, Any]) -> None:
  norm.gamma = _array(params['scale'])
  norm.beta = _array(params['bias'])


def _positions(features: int) -> np.ndarray:
  """Sinusoidal positions [MAX_POSITIONS, D], sines before cosines, counted from 0."""
  half = features // 2
  angles = np.arange(MAX_POSITIONS)[:, None] / 10_000 ** (2 * np.arange(half)[None, :] / features)
  return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)


def _embeddings(params: Any) -> tuple[Any, Any]:
  return params['encoder']['embedding']['table']['embedding'], params['embedding']['table']['embedding']


def _vocabulary_sizes(params: Any) -> list[int]:
  return [table.shape[0] for table in _embeddings(params)]


def _tokens(size: int) -> Sequence[str]:
  return [*SPECIAL_TOKENS, *(f'w{id}' for id in range(len(SPECIAL_TOKENS), size))]


def _array(x: Any) -> np.ndarray:
  return np.ascontiguousarray(np.asarray(x, np.float32))
