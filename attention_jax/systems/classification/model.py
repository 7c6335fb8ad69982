"""Document classifiers, which combine any encoder with any pooling of words and sentences: CLASSIFIERS."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.encoder_decoder import DTYPES, make_module
from attention_jax.models.encoders import ENCODERS
from attention_jax.modules.adaptive import Ponder
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.embedding import Embedding
from attention_jax.modules.linear import Dense
from attention_jax.modules.pooling import POOLINGS
from attention_jax.specs import Count, Fraction, Size, check_fields


class ClassifierOutput(NamedTuple):
  """Logits of the labels, and attention weights over words and sentences.

  Attributes:
    logits: [B, L], float32.
    word_weights: [B, N, H, W], weights of H heads over the W words of each of N sentences. H is the number of heads of
      the attention times the hops of the pooling, or 1 if it does not attend. For pairs of texts, see Decomposable.
    sentence_weights: [B, H, N], weights of H heads over the sentences; 1 everywhere if the classifier does not pool
      sentences.
    ponder: Ponder [B, positions] of every layer and direction with adaptive computation time; the positions are the
      words of a document (or of one text of a pair), or its sentences.
  """

  logits: jax.Array
  word_weights: jax.Array
  sentence_weights: jax.Array
  ponder: tuple[Ponder, ...] = ()


class Classifier(nn.Module):
  """Base class of classifiers.

  Class attributes: `takes_pairs`, whether the input is a pair of texts; `single_level`, whether all words of a document
  are pooled at once.

  Attributes:
    embedding: module from ids to vectors.
    encoder: spec of ENCODERS, for words and, in a hierarchical classifier, for sentences.
    pooling: spec of POOLINGS.
    attention: configuration of the attention of the pooling, and of the attention between the texts of a pair.
    labels: number of labels, L.
    hidden: width of a ReLU layer before the output layer; 0 for none.
    dropout: rate on embeddings, in the encoder (see encoder_decoder.ModelConfig), and on inputs of ReLU layers and of
      the output layer.
    dtype: dtype of the computation.
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
    """Returns a new encoder with `embedding` as its input layer."""
    parts = {'embedding': embedding, 'dropout': self.dropout, 'dtype': self.dtype}
    return make_module(self.encoder, ENCODERS, 'encoder', **parts)

  @property
  def pair_heads(self) -> int:
    """Number of heads of a classifier of pairs of texts; 0 for other classifiers."""
    return self.attention.heads if self.takes_pairs else 0

  def make_pooling(self) -> nn.Module:
    """Returns a new pooling module."""
    return make_module(self.pooling, POOLINGS, 'pooling', attention=self.attention)

  def classify(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """Returns the logits [B, L] of document vectors [B, V]."""
    drop = Dropout(self.dropout)
    if self.hidden:
      x = drop(x, deterministic=deterministic)
      x = nn.relu(Dense(self.hidden, dtype=self.dtype, name='hidden')(x))
    x = drop(x, deterministic=deterministic)
    return Dense(self.labels, dtype=self.dtype, name='labels')(x).astype(jnp.float32)


class Identity(nn.Module):
  """Returns its input, in place of an embedding when the inputs are vectors already."""

  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    return x


class Flat(Classifier):
  """Single-level classifier: pools all words of a document as one sequence, ignoring sentence boundaries."""

  single_level = True

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies documents.

    Args:
      source: ids [B, N, W].
      mask: [B, N, W], True for words.
      deterministic: whether dropout is off.

    Returns:
      ClassifierOutput; `sentence_weights` are 1 everywhere.
    """
    batch, sentences, words = source.shape
    ids = source.reshape(batch, sentences * words)
    flat_mask = mask.reshape(batch, sentences * words)
    # Moves padding to the end, so that the position of a word is the number of words before it.
    order = jnp.argsort(~flat_mask, axis=1, stable=True)
    ids = jnp.take_along_axis(ids, order, 1)
    flat_mask = jnp.take_along_axis(flat_mask, order, 1)

    encoded = self.make_encoder(self.embedding)(ids, flat_mask, deterministic)
    summary, weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)

    inverse_order = jnp.argsort(order, axis=1)
    weights = jnp.take_along_axis(weights, inverse_order[:, None], 2)
    word_weights = jnp.moveaxis(weights.reshape(batch, -1, sentences, words), 1, 2)
    ponder = jax.tree.map(lambda x: jnp.take_along_axis(x, inverse_order, 1), encoded.ponder)
    sentence_weights = jnp.ones((batch, 1, sentences), jnp.float32)
    return ClassifierOutput(self.classify(summary, deterministic), word_weights, sentence_weights, ponder)


class Hierarchical(Classifier):
  """Hierarchical classifier: encodes and pools words to sentences, then sentences to a document.

  Yang et al. 2016, section 2.
  """

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies documents.

    Args:
      source: ids [B, N, W].
      mask: [B, N, W], True for words.
      deterministic: whether dropout is off.

    Returns:
      ClassifierOutput.
    """
    batch, sentences, words = source.shape
    ids = source.reshape(batch * sentences, words)
    word_mask = mask.reshape(batch * sentences, words)
    encoded = self.make_encoder(self.embedding)(ids, word_mask, deterministic)
    x, word_weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)

    word_ponder = jax.tree.map(lambda x: x.reshape(batch, -1), encoded.ponder)
    sentence_mask = mask.any(-1)
    encoded = self.make_encoder(Identity())(x.reshape(batch, sentences, -1), sentence_mask, deterministic)
    x, sentence_weights = self.make_pooling()(encoded.memory, encoded.mask, encoded.final, deterministic)

    word_weights = word_weights.reshape(batch, sentences, -1, words)
    ponder = word_ponder + encoded.ponder
    return ClassifierOutput(self.classify(x, deterministic), word_weights, sentence_weights, ponder)


class Decomposable(Classifier):
  """Decomposable attention between two texts: attend to the other text, compare, and pool.

  Parikh et al. 2016, equations 1 to 5, with score 'dot', softmax and pooling 'sum'. The functions F, G and H of the
  paper are two ReLU layers each (`attend`, `compare` and `decide`). Every word of text a is a query F(a) into a memory
  with keys F(b) and values b, and vice versa. The first sentence of a document is text a, the second one text b.

  Attributes as in Classifier, and:
    width: width of the layers of F, G and H.
  """

  takes_pairs = True
  width: Size = 200

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool = True) -> ClassifierOutput:
    """Classifies pairs of texts.

    Args:
      source: ids [B, 2, W].
      mask: [B, 2, W], True for words.
      deterministic: whether dropout is off.

    Returns:
      ClassifierOutput with `word_weights` [B, 2, H W, W] over the words of each text: row h W + w has the weights with
      which word w of the other text attends to them in head h; 0 if word w is padding.

    Raises:
      UserError: if a document does not have two texts.
    """
    if source.shape[1] != 2:
      raise UserError(
        f'decomposable: documents must have 2 texts, got {source.shape[1]}; '
        'expected config.data.buckets of (2, words), such as ((2, 20),)'
      )
    batch, _, words = source.shape
    attend = _Layers(self.width, self.dropout, self.dtype, name='attend')
    compare = _Layers(self.width, self.dropout, self.dtype, name='compare')
    encoder = self.make_encoder(self.embedding)
    pooling = self.make_pooling()
    attention = self.attention.copy()

    encoded = [encoder(source[:, side], mask[:, side], deterministic) for side in (0, 1)]
    keys = [attend(text.memory, deterministic) for text in encoded]
    summaries = []
    weights = []
    for query, key in ((0, 1), (1, 0)):
      memory = attention.remember(keys[key], mask[:, key], value=encoded[key].memory)
      attended = attention.parallel(keys[query], memory, deterministic)
      compared = compare(jnp.concatenate([encoded[query].memory, attended.context], -1), deterministic)
      mean = masked_mean(compared, mask[:, query])
      summary, _ = pooling(compared, mask[:, query], mean, deterministic)
      summaries.append(summary)
      weights_by_head = attended.weights.reshape(batch, -1, words, words)
      weights.append(zero_masked(weights_by_head, mask[:, query][:, None, :, None]))

    decide = _Layers(self.width, self.dropout, self.dtype, name='decide')
    features = decide(jnp.concatenate(summaries, -1), deterministic)
    # Reversed: the queries of one text weigh the words of the other.
    word_weights = jnp.stack([x.reshape(batch, -1, words) for x in reversed(weights)], 1)
    sentence_weights = jnp.ones((batch, 1, 2), jnp.float32)
    ponder = sum((text.ponder for text in encoded), ())
    return ClassifierOutput(self.classify(features, deterministic), word_weights, sentence_weights, ponder)


class _Layers(nn.Module):
  """Two ReLU layers with dropout before each. He initialisation preserves the variance (He et al. 2015)."""

  width: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    for _ in range(2):
      x = Dropout(self.dropout)(x, deterministic=deterministic)
      x = nn.relu(Dense(self.width, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x))
    return x


class ClassifierEnsemble:
  """Several classifiers of the same labels behind the interface of one.

  Probabilities and attention weights are means over the classifiers. If the numbers of heads differ, the weights of
  each classifier are first averaged over its heads. The parameters of an ensemble are a tuple with one parameter tree
  per classifier.

  Args:
    models: the classifiers.

  Raises:
    UserError: if only some of the classifiers take pairs of texts.
  """

  def __init__(self, models: Sequence[Classifier]):
    self.models = tuple(models)
    self.takes_pairs = self.models[0].takes_pairs
    num_with_pairs = sum(model.takes_pairs for model in self.models)
    if num_with_pairs not in (0, len(self.models)):
      raise UserError(
        'ensemble: all classifiers must take pairs of texts or none, '
        f'got {num_with_pairs} of {len(self.models)} classifiers that take pairs'
      )
    self.attention = self.models[0].attention
    heads = {model.pair_heads for model in self.models}
    self.pair_heads = heads.pop() if len(heads) == 1 else 1

  def apply(self, variables: Any, source: jax.Array, source_mask: jax.Array) -> ClassifierOutput:
    """Classifies documents at test time.

    Args:
      variables: {'params': one parameter tree per classifier}.
      source: ids [B, N, W].
      source_mask: True at real words.

    Returns:
      ClassifierOutput whose logits are log-probabilities; `ponder` is ().
    """
    pairs = zip(self.models, variables['params'], strict=True)
    outputs = [model.apply({'params': params}, source, source_mask) for model, params in pairs]
    log_probs = jnp.stack([jax.nn.log_softmax(output.logits) for output in outputs])
    logits = jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(outputs))
    word_weights = [output.word_weights for output in outputs]
    if self.takes_pairs:
      word_weights = [self._match_heads(model, x) for model, x in zip(self.models, word_weights, strict=True)]
    word_weights = _mean_over_models(word_weights, heads_axis=2)
    sentence_weights = _mean_over_models([output.sentence_weights for output in outputs], heads_axis=1)
    return ClassifierOutput(logits, word_weights, sentence_weights)

  def _match_heads(self, model: Classifier, word_weights: jax.Array) -> jax.Array:
    """Returns the pair weights [B, 2, H W, W] of a model, averaged over its heads if the numbers of heads differ."""
    if model.pair_heads == self.pair_heads:
      return word_weights
    batch, texts, _, size = word_weights.shape
    return word_weights.reshape(batch, texts, model.pair_heads, size, size).mean(2)


def _mean_over_models(weights: Sequence[jax.Array], heads_axis: int) -> jax.Array:
  if len({x.shape for x in weights}) > 1:
    weights = [x.mean(heads_axis, keepdims=True) for x in weights]
  return jnp.stack(weights).mean(0)


CLASSIFIERS: Mapping[str, type[Classifier]] = {
  'decomposable': Decomposable,
  'flat': Flat,
  'hierarchical': Hierarchical,
}


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
  """The fields of `config.model` and their defaults.

  Attributes:
    classifier: spec of CLASSIFIERS.
    encoder: spec of ENCODERS.
    pooling: spec of POOLINGS.
    embedding: width of the word embeddings.
    hidden: width of a ReLU layer before the output layer; 0 for none.
    dropout: rate on embeddings, in the encoder (as in a translation model), and on inputs of ReLU layers and of the
      output layer.
    dtype: dtype of the computation, 'float32' or 'bfloat16'; parameters are float32.
    attention: the attention of the pooling, and between the texts of a pair.
  """

  classifier: str = 'hierarchical'
  encoder: str = 'birnn(features=100)'
  pooling: str = 'attention'
  embedding: Size = 200
  hidden: Count = 0
  dropout: Fraction = 0.0
  dtype: str = 'float32'
  attention: Attention = dataclasses.field(default_factory=Attention)

  def __post_init__(self):
    check_fields(self, 'config.model')
    check_fields(self.attention, 'config.model.attention')


def build_classifier(config: ClassifierConfig, vocabulary_size: int, labels: int) -> Classifier:
  """Builds the classifier that `config.model` describes.

  Args:
    config: the group `model` of the config.
    vocabulary_size: number of words that have an embedding.
    labels: number of labels.

  Returns:
    A Classifier without parameters.

  Raises:
    UserError: if a field, a spec or an option is unknown or out of range, or if the alignment is not
      trained by backpropagation alone.
  """
  dtype = DTYPES[choose(config.dtype, DTYPES, 'dtype')]
  parts = {'dtype': dtype, 'dropout': config.dropout}
  attention = config.attention.clone(dtype=dtype)
  if not attention.resolved_alignment.trains_by_backprop:
    expected = ', '.join(name for name, row in ALIGNMENTS.items() if row.trains_by_backprop)
    raise UserError(
      'attention.alignment of classifiers must be trained by backpropagation alone, '
      f'got {attention.alignment!r}; expected one of: {expected}'
    )

  embedding = Embedding(vocabulary_size, config.embedding, **parts)
  classifier = make_module(
    config.classifier,
    CLASSIFIERS,
    'classifier',
    embedding=embedding,
    attention=attention,
    labels=labels,
    encoder=config.encoder,
    pooling=config.pooling,
    hidden=config.hidden,
    **parts,
  )
  # Classifiers make their encoder and pooling when they are applied; this reports wrong specs earlier.
  make_module(config.encoder, ENCODERS, 'encoder', embedding=Identity(), **parts)
  make_module(config.pooling, POOLINGS, 'pooling', attention=attention)
  return classifier
