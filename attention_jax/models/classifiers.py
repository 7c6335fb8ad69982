"""Classifiers of documents with any encoder and any pooling, over words and sentences: CLASSIFIERS."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.encoder_decoder import DTYPES, make
from attention_jax.models.encoders import ENCODERS
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.embedding import Embedding
from attention_jax.modules.linear import Dense
from attention_jax.modules.pooling import POOLINGS
from attention_jax.specs import Count, Fraction, Size, check_fields


class ClassifierOutput(NamedTuple):
  """Output of a classifier.

  Attributes:
    logits: logits of the labels, [B, L].
    words: weights of the words of each sentence, [B, N, H, W].
    sentences: weights of the sentences, [B, H, N]; all 1 if the words of a document are pooled at once.
  """

  logits: jax.Array
  words: jax.Array
  sentences: jax.Array


class Classifier(nn.Module):
  """Base class of classifiers.

  Attributes:
    embedding: module from ids to vectors.
    encoder: spec of ENCODERS, the encoder of the words, and of the sentences.
    pooling: spec of POOLINGS.
    attention: attention of the pooling.
    labels: number L of labels.
    hidden: width of a ReLU layer before the logits; 0 for none.
    dropout: dropout rate of the encoder, and before each layer of the output.
    takes_pairs: whether the inputs are pairs of texts.
    single_level: whether all words of a document are pooled at once.
  """

  takes_pairs = False
  single_level = False
  embedding: nn.Module
  encoder: str
  pooling: str
  attention: Attention
  labels: int
  hidden: Count = 0
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def make_encoder(self, embedding: nn.Module) -> nn.Module:
    """Returns a new encoder."""
    parts = {'embedding': embedding, 'dropout': self.dropout, 'dtype': self.dtype}
    return make(self.encoder, ENCODERS, 'encoder', **parts)

  def make_pooling(self) -> nn.Module:
    """Returns a new pooling."""
    return make(self.pooling, POOLINGS, 'pooling', attention=self.attention)

  def classify(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """Returns logits [B, L] of vectors x [B, V]."""
    drop = Dropout(self.dropout)
    if self.hidden:
      x = nn.relu(Dense(self.hidden, dtype=self.dtype, name='before')(drop(x, deterministic=deterministic)))
    return Dense(self.labels, dtype=self.dtype, name='labels')(drop(x, deterministic=deterministic))


class IdentityEmbedding(nn.Module):
  """The identity, in place of an embedding: the inputs of the encoder are vectors."""

  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    return x


class Flat(Classifier):
  """Pools all words of a document at once, without the boundaries of sentences."""

  single_level = True

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies documents; source ids [B, N, W], mask [B, N, W]."""
    batch, sentences, words = source.shape
    flat_source = source.reshape(batch, sentences * words)
    flat_mask = mask.reshape(batch, sentences * words)
    # Moves the padding between sentences to the end, so that positions are contiguous.
    order = jnp.argsort(~flat_mask, axis=1, stable=True)
    ids = jnp.take_along_axis(flat_source, order, 1)
    ids_mask = jnp.take_along_axis(flat_mask, order, 1)
    encoded = self.make_encoder(self.embedding)(ids, ids_mask, deterministic)
    summary, weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)
    weights = jnp.take_along_axis(weights, jnp.argsort(order, axis=1)[:, None], 2)
    word_weights = jnp.moveaxis(weights.reshape(batch, -1, sentences, words), 1, 2)
    logits = self.classify(summary, deterministic)
    return ClassifierOutput(logits, word_weights, jnp.ones((batch, 1, sentences), jnp.float32))


class Hierarchical(Classifier):
  """Encodes and pools the words of each sentence, then the sentences. Yang et al. 2016, section 2."""

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies documents; source ids [B, N, W], mask [B, N, W]."""
    batch, sentences, words = source.shape
    flat_shape = (batch * sentences, words)
    encoded = self.make_encoder(self.embedding)(source.reshape(flat_shape), mask.reshape(flat_shape), deterministic)
    vectors, word_weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)
    sentence_mask = mask.any(-1)
    sentence_encoder = self.make_encoder(IdentityEmbedding())
    encoded = sentence_encoder(vectors.reshape(batch, sentences, -1), sentence_mask, deterministic)
    summary, sentence_weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)
    logits = self.classify(summary, deterministic)
    return ClassifierOutput(logits, word_weights.reshape(batch, sentences, -1, words), sentence_weights)


class Decomposable(Classifier):
  """Compares every word of each of two texts with its context from the other text, and pools the comparisons.

  Parikh et al. 2016, equations 1 to 5, with score 'dot', softmax and pooling 'sum': F, G and H have two ReLU layers.
  Every word of one text is a query F(a); the other text is a memory with keys F(b) and values b; and vice versa. The
  two sentences of a document are the two texts.

  Attributes beside those of Classifier:
    width: width of F, G and H.
  """

  takes_pairs = True
  width: Size = 200

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies pairs; source ids [B, 2, W], mask [B, 2, W]."""
    if source.shape[1] != 2:
      raise UserError(
        f'decomposable: the inputs must be pairs of texts (buckets of (2, words)), got {source.shape[1]} texts'
      )
    project = TwoLayerReLU(self.width, self.dropout, self.dtype, name='attend')
    compare = TwoLayerReLU(self.width, self.dropout, self.dtype, name='compare')
    decide = TwoLayerReLU(self.width, self.dropout, self.dtype, name='decide')
    encoder = self.make_encoder(self.embedding)
    pool = self.make_pooling()
    attention = self.attention.copy()
    encoded = [encoder(source[:, text], mask[:, text], deterministic) for text in (0, 1)]
    keys = [project(text.memory, deterministic) for text in encoded]
    summaries = []
    weights = []
    for text, other in ((0, 1), (1, 0)):
      memory = attention.remember(keys[other], mask[:, other], value=encoded[other].memory)
      attended = attention.parallel(keys[text], memory, deterministic)
      compared = compare(jnp.concatenate([encoded[text].memory, attended.context], -1), deterministic)
      mean = masked_mean(compared, mask[:, text])
      summary, _ = pool(compared, mask[:, text], mean, deterministic)
      summaries.append(summary)
      weights.append(zero_masked(attended.weights, mask[:, text]))
    result = decide(jnp.concatenate(summaries, -1), deterministic)
    # The weights of the words of each text are those that the other text attends with.
    word_weights = jnp.stack([x.reshape(len(mask), -1, mask.shape[-1]) for x in reversed(weights)], 1)
    logits = self.classify(result, deterministic)
    return ClassifierOutput(logits, word_weights, jnp.ones((len(mask), 1, 2), jnp.float32))


class TwoLayerReLU(nn.Module):
  """Two ReLU layers with dropout before each, initialised to preserve the scale of their inputs (He et al. 2015)."""

  width: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    for _ in range(2):
      x = Dropout(self.dropout)(x, deterministic=deterministic)
      x = nn.relu(Dense(self.width, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x))
    return x


CLASSIFIERS: Mapping[str, type[Classifier]] = {
  'decomposable': Decomposable,
  'flat': Flat,
  'hierarchical': Hierarchical,
}


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
  """Fields of `config.model` and their defaults.

  Attributes:
    classifier, encoder, pooling: specs of CLASSIFIERS, ENCODERS and POOLINGS.
    embedding: features of the embeddings of words.
    hidden: width of a ReLU layer before the logits; 0 for none.
    dropout: dropout rate of embeddings, of the results of encoders, and before the logits.
    dtype: dtype of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  classifier: str = 'hierarchical'
  encoder: str = 'birnn(features=100)'
  pooling: str = 'attention'
  embedding: Size = 200
  hidden: Count = 0
  dropout: Fraction = 0.0
  dtype: str = 'float32'


def build_classifier(model: Mapping[str, Any], words: int, labels: int) -> Classifier:
  """Builds the classifier of a config.

  Args:
    model: `config.model`, with its group `attention`.
    words: number of words in the vocabulary.
    labels: number of labels.

  Returns:
    The classifier, without parameters.

  Raises:
    UserError: for unknown names and options, values out of range, and an alignment that needs an auxiliary loss.
  """
  options = ClassifierConfig(**{field.name: model[field.name] for field in dataclasses.fields(ClassifierConfig)})
  check_fields(options, 'config.model')
  check_fields(Attention(**model['attention']), 'config.model.attention')
  dtype = DTYPES[choose(options.dtype, DTYPES, 'dtype')]
  parts = {'dtype': dtype, 'dropout': options.dropout}
  attention = Attention(**model['attention'], dtype=dtype)
  if not attention.resolved_alignment.trains_by_backprop:
    expected = ', '.join(name for name, row in ALIGNMENTS.items() if row.trains_by_backprop)
    raise UserError(
      f'attention.alignment of a classifier must train by backpropagation alone, got {attention.alignment!r}; '
      f'expected one of: {expected}'
    )
  classifier = make(
    options.classifier,
    CLASSIFIERS,
    'classifier',
    embedding=Embedding(words, options.embedding, **parts),
    attention=attention,
    labels=labels,
    encoder=options.encoder,
    pooling=options.pooling,
    hidden=options.hidden,
    **parts,
  )
  # The classifier makes its encoder and pooling when it is called; making them here reports wrong specs early.
  make(options.encoder, ENCODERS, 'encoder', embedding=IdentityEmbedding(), **parts)
  make(options.pooling, POOLINGS, 'pooling', attention=attention)
  return classifier
