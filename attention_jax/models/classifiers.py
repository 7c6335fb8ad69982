"""Classifiers of documents: any encoder and any pooling, of words and of sentences. CLASSIFIERS."""

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
  """What is said of documents.

  Attributes:
    logits: [B, L].
    words: weights [B, N, H, W] of the words of each sentence.
    sentences: weights [B, H, N] of sentences; of one level, 1 for all.
  """

  logits: jax.Array
  words: jax.Array
  sentences: jax.Array


class Classifier(nn.Module):
  """What classifiers share.

  `takes_pairs` says whether it reads pairs of texts, `single_level` whether all words of a document are pooled at once.

  Attributes:
    embedding: module from ids to vectors.
    encoder: spec of ENCODERS, that reads the words (of a sentence), and the sentences.
    pooling: spec of POOLINGS.
    attention: what it attends by.
    labels: how many.
    hidden: width of a layer of ReLU before the labels; 0 is none.
  """

  takes_pairs, single_level = False, False
  embedding: nn.Module
  encoder: str
  pooling: str
  attention: Attention
  labels: int
  hidden: Count = 0
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def reader(self, embedding: nn.Module) -> nn.Module:
    parts = {'embedding': embedding, 'dropout': self.dropout, 'dtype': self.dtype}
    return make(self.encoder, ENCODERS, 'encoder', **parts)

  def pool(self) -> nn.Module:
    return make(self.pooling, POOLINGS, 'pooling', attention=self.attention)

  def classify(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """A vector [B, V] -> logits [B, L]."""
    drop = Dropout(self.dropout)
    if self.hidden:
      x = nn.relu(Dense(self.hidden, dtype=self.dtype, name='before')(drop(x, deterministic=deterministic)))
    return Dense(self.labels, dtype=self.dtype, name='labels')(drop(x, deterministic=deterministic))


class Same(nn.Module):
  """Vectors in the place of ids: what is read has been embedded."""

  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    return x


class Flat(Classifier):
  """One level: all words of a document in a row, whatever sentence they stand in."""

  single_level = True

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """source [B, N, W] ids, mask [B, N, W]."""
    batch, sentences, words = source.shape
    ids, real = (x.reshape(batch, sentences * words) for x in (source, mask))
    order = jnp.argsort(~real, axis=1, stable=True)  # no gaps where sentences end: a place is how many words are before
    ids, real = (jnp.take_along_axis(x, order, 1) for x in (ids, real))
    encoded = self.reader(self.embedding)(ids, real, deterministic)
    summary, weights = self.pool()(encoded.memory, encoded.mask, encoded.final, deterministic)
    weights = jnp.take_along_axis(weights, jnp.argsort(order, axis=1)[:, None], 2)
    of_words = jnp.moveaxis(weights.reshape(batch, -1, sentences, words), 1, 2)
    return ClassifierOutput(
      self.classify(summary, deterministic), of_words, jnp.ones((batch, 1, sentences), jnp.float32)
    )


class Hierarchical(Classifier):
  """Sentences from words, then the document from its sentences, each read and pooled. Yang et al. 2016, section 2."""

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """source [B, N, W] ids, mask [B, N, W]."""
    batch, sentences, words = source.shape
    apart = lambda x: x.reshape(batch * sentences, words)
    encoded = self.reader(self.embedding)(apart(source), apart(mask), deterministic)
    x, of_words = self.pool()(encoded.memory, encoded.mask, encoded.final, deterministic)
    there = mask.any(-1)
    encoded = self.reader(Same())(x.reshape(batch, sentences, -1), there, deterministic)
    x, of_sentences = self.pool()(encoded.memory, encoded.mask, encoded.final, deterministic)
    return ClassifierOutput(
      self.classify(x, deterministic), of_words.reshape(batch, sentences, -1, words), of_sentences
    )


class Decomposable(Classifier):
  """Two texts: each word attends to the other text, is compared with what it found, and all of them are pooled.

  Parikh et al. 2016, equations 1 to 5, with score 'dot', softmax and pooling 'sum': F, G and H have two layers of ReLU.
  Every word of the one is a query F(a) into a memory with keys F(b) and values b, and the other way round. The first
  sentence of a document is the one text, the second the other.

  Attributes as in Classifier, and width: of F, G and H.
  """

  takes_pairs = True
  width: Size = 200

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """source [B, 2, W] ids, mask [B, 2, W]."""
    if source.shape[1] != 2:
      raise UserError(f'decomposable: two texts are compared, got {source.shape[1]}; possible: buckets of (2, words)')
    attend, compare = (_Layers(self.width, self.dropout, self.dtype, name=name) for name in ('attend', 'compare'))
    reader, pool, attention = self.reader(self.embedding), self.pool(), self.attention.copy()
    encoded = [reader(source[:, side], mask[:, side], deterministic) for side in (0, 1)]
    keys = [attend(one.memory, deterministic) for one in encoded]
    found, weights = [], []
    for mine, other in ((0, 1), (1, 0)):
      memory = attention.remember(keys[other], mask[:, other], value=encoded[other].memory)
      read = attention.parallel(keys[mine], memory, deterministic)
      compared = compare(jnp.concatenate([encoded[mine].memory, read.context], -1), deterministic)
      summary, _ = pool(compared, mask[:, mine], masked_mean(compared, mask[:, mine]), deterministic)
      found.append(summary)
      weights.append(zero_masked(read.weights, mask[:, mine]))
    said = _Layers(self.width, self.dropout, self.dtype, name='decide')(jnp.concatenate(found, -1), deterministic)
    # Of each text the weights of its words, by each word of the other one.
    of_words = jnp.stack([x.reshape(len(mask), -1, mask.shape[-1]) for x in reversed(weights)], 1)
    return ClassifierOutput(self.classify(said, deterministic), of_words, jnp.ones((len(mask), 1, 2), jnp.float32))


class _Layers(nn.Module):
  """Two layers of ReLU, with dropout before each; they keep the size of what they are given (He et al. 2015)."""

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
  """The fields of `config.model` and their defaults.

  Attributes:
    classifier, encoder, pooling: spec strings for CLASSIFIERS, ENCODERS and POOLINGS.
    embedding: features of the words' embeddings.
    hidden: width of a layer of ReLU before the labels; 0 is none.
    dropout: on embeddings, on what encoders give, and before the labels.
    dtype: of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  classifier: str = 'hierarchical'
  encoder: str = 'birnn(features=100)'
  pooling: str = 'attention'
  embedding: Size = 200
  hidden: Count = 0
  dropout: Fraction = 0.0
  dtype: str = 'float32'


def build_classifier(model: Mapping[str, Any], words: int, labels: int) -> Classifier:
  """The classifier that `config.model` means, for so many words and labels. Raises UserError for what is not there."""
  options = ClassifierConfig(**{field.name: model[field.name] for field in dataclasses.fields(ClassifierConfig)})
  check_fields(options, 'config.model')
  check_fields(Attention(**model['attention']), 'config.model.attention')
  parts = {'dtype': DTYPES[choose(options.dtype, DTYPES, 'dtype')], 'dropout': options.dropout}
  attention = Attention(**model['attention'], dtype=parts['dtype'])
  if not attention.resolved_alignment.trains_by_backprop:
    possible = ', '.join(name for name, row in ALIGNMENTS.items() if row.trains_by_backprop)
    raise UserError(
      f'attention.alignment={attention.alignment!r} learns by a loss over words that are said; possible for documents: '
      + possible
    )
  given = {'embedding': Embedding(words, options.embedding, **parts), 'attention': attention, 'labels': labels, **parts}
  given |= {name: getattr(options, name) for name in ('encoder', 'pooling', 'hidden')}
  classifier = make(options.classifier, CLASSIFIERS, 'classifier', **given)
  for spec, table, what in ((options.encoder, ENCODERS, 'encoder'), (options.pooling, POOLINGS, 'pooling')):
    make(spec, table, what, **{'encoder': {'embedding': Same(), **parts}, 'pooling': {'attention': attention}}[what])
  return classifier
