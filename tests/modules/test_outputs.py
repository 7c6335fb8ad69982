"""Embeddings and output layers."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.embedding import Embedding
from attention_jax.modules.outputs import OUTPUTS, LinearLogits, TiedOutput, VocabularyOutput
from tests.modules.helpers import assert_close, draw, variables

B, T, FEATURES, EMBEDDED, WORDS = 2, 3, 7, 5, 11
IDS = jnp.asarray([[1, 4, 2], [10, 0, 3]])


class EmbeddingAndOutput(nn.Module):
  """Embeddings, and an output layer that may share them."""

  kind: Callable
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.embedding = Embedding(WORDS, EMBEDDED, dtype=self.dtype)
    self.output = self.kind(WORDS, self.embedding, self.dtype)

  def __call__(self, ids, features):
    return self.embedding(ids), self.output(features).logits()


@pytest.mark.long
def test_vocabulary_output_is_a_linear_layer():
  layer, features = EmbeddingAndOutput(VocabularyOutput), draw(B, T, FEATURES)
  params = variables(layer, IDS, features)
  dense = jax.tree.map(np.asarray, params['params']['output'])
  assert_close(layer.apply(params, IDS, features)[1], np.asarray(features) @ dense['kernel'] + dense['bias'])


@pytest.mark.long
def test_tied_output_is_a_product_with_the_embeddings():
  layer = EmbeddingAndOutput(TiedOutput)
  features = draw(B, T, FEATURES)
  params = variables(layer, IDS, features)
  embedded, logits = layer.apply(params, IDS, features)
  numpy_params = jax.tree.map(np.asarray, params['params'])
  table = numpy_params['embedding']['table']['embedding']
  output = numpy_params['output']
  assert table.shape == (WORDS, EMBEDDED) and set(output) == {'Dense_0', 'bias'}
  assert_close(embedded, table[np.asarray(IDS)])
  assert_close(logits, np.asarray(features) @ output['Dense_0']['kernel'] @ table.T + output['bias'])
  _, step_logits = layer.apply(params, IDS, features[:, 1])
  assert_close(step_logits, logits[:, 1])


def test_a_scaled_tied_output_divides_by_the_root_of_the_width():
  layer = EmbeddingAndOutput(TiedOutput)
  features = draw(B, T, EMBEDDED)
  params = variables(layer, IDS, features)
  _, logits = layer.apply(params, IDS, features)
  _, scaled = EmbeddingAndOutput(functools.partial(TiedOutput, scaled=True)).apply(params, IDS, features)
  bias = params['params']['output']['bias']
  assert_close(scaled - bias[None, None], (logits - bias[None, None]) / EMBEDDED**0.5)


@pytest.mark.parametrize('kind', [name for name, cls in OUTPUTS.items() if not cls.copies])
def test_logits_are_float32(kind):
  layer = EmbeddingAndOutput(OUTPUTS[kind], jnp.bfloat16)
  features = draw(B, T, FEATURES).astype(jnp.bfloat16)
  embedded, logits = jax.eval_shape(layer.apply, variables(layer, IDS, features), IDS, features)
  assert embedded.dtype == jnp.bfloat16 and logits.dtype == jnp.float32


@pytest.mark.long
def test_logits_of_16_bits_are_not_rounded():
  """257 is no number of bfloat16."""
  linear = LinearLogits(jnp.ones((1, 2), jnp.bfloat16), jnp.asarray([[256.0], [1.0]]), jnp.zeros(1))
  assert linear.logits() == 257
