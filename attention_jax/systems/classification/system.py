"""Classification: the system of models from documents, or pairs of texts, to labels."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from attention_jax import atomic
from attention_jax.analysis.alignment import entropy
from attention_jax.data import vocab
from attention_jax.data.batching import Share
from attention_jax.data.preparing import Preparation
from attention_jax.decoding.metrics import MetricValue
from attention_jax.errors import UserError, choose
from attention_jax.losses.auxiliary import CLASSIFIER_LOSSES, DISABLE_HINT, auxiliary_losses
from attention_jax.losses.sequence import cross_entropy
from attention_jax.modules.pooling import POOLINGS
from attention_jax.specs import bind, parse
from attention_jax.systems.base import (
  LinePrediction,
  Log,
  System,
  check_parameter_options,
  check_setting,
  describe_implementation,
  parse_rows,
  trace_loss,
)
from attention_jax.systems.classification import shading as document_shading
from attention_jax.systems.classification.batches import (
  DocumentBatches,
  DocumentSplit,
  LabelledBatch,
  check_document_buckets,
  cut_document,
  describe_documents,
  encode_split,
  eval_document_batches,
  largest_bucket,
  load_splits,
  prepare_documents,
)
from attention_jax.systems.classification.config import ClassificationDataConfig, ClassificationEvaluationConfig
from attention_jax.systems.classification.data import (
  DOCUMENTS,
  LABELS_FILE,
  Documents,
  parse_documents,
  read_labels,
)
from attention_jax.systems.classification.model import (
  CLASSIFIERS,
  Classifier,
  ClassifierConfig,
  ClassifierEnsemble,
  build_classifier,
)
from attention_jax.systems.classification.outputs import (
  ClassificationPrediction,
  CutDocument,
  prediction_record,
  shade_document,
)
from attention_jax.systems.config import RunConfig
from attention_jax.training.compiling import CompiledForRuns, jit_once
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.watch import Watch, unwatched

SELECTABLE_METRICS = {'loss': False, 'accuracy': True}  # True: a higher value is better


class ClassificationSystem(System):
  """Any classifier, encoder and pooling on any task of documents or of pairs of texts.

  Args:
    config: the whole config of the run.
    vocabulary: the vocabulary of the documents.
    labels: names of the classes.
    load_data: returns the splits; called on first use.
  """

  config_groups: Mapping[str, type] = {
    'data': ClassificationDataConfig,
    'model': ClassifierConfig,
    'evaluation': ClassificationEvaluationConfig,
  }
  plot_filename = 'attention.html'
  extra_metrics = ('entropy',)
  mechanisms: Mapping[str, Mapping[str, type]] = {'model.classifier': CLASSIFIERS}

  def __init__(
    self,
    config: RunConfig,
    vocabulary: vocab.Vocabulary,
    labels: Sequence[str],
    load_data: Callable[[], Mapping[str, Documents]],
  ):
    self.config = config
    self.vocabulary = vocabulary
    self.labels = list(labels)
    self.model = build_classifier(config.model, len(vocabulary), len(labels))
    self._load_data = load_data

  @classmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'ClassificationSystem':
    documents = load_splits(config.data)
    train = documents['train']
    spec = config.data.vocabulary
    prepared_folder = train.prepared and str(train.prepared.folder)
    vocabulary, _ = vocab.load_or_train(spec, 'source', train.texts, folder, prepared_folder)
    has_labels = folder is not None and (epath.Path(folder) / LABELS_FILE).exists()
    labels = read_labels(folder) if has_labels else sorted(set(train.labels))
    return cls(config, vocabulary, labels, lambda: documents)

  @classmethod
  def open(cls, config: RunConfig, folder: str) -> 'ClassificationSystem':
    vocabulary = vocab.load_stored(config.data.vocabulary, folder, 'source')
    if vocabulary is None:
      raise UserError(f'{folder} holds no source vocabulary; expected the folder of a training run')
    return cls(config, vocabulary, read_labels(folder), lambda: load_splits(config.data))

  def with_config(self, config: RunConfig) -> 'ClassificationSystem':
    return ClassificationSystem(config, self.vocabulary, self.labels, self._load_data)

  def ensemble(self, others: Sequence['ClassificationSystem']) -> 'ClassificationSystem':
    """Returns the ensemble of this system and others; its parameters are a tuple with those of each.

    Raises:
      UserError: if their vocabularies, labels or data.joined differ, or if only some of them take pairs of texts.
    """
    for other in others:
      if not vocab.same_entries(self.vocabulary, other.vocabulary) or self.labels != other.labels:
        raise UserError('runs with different vocabularies or labels cannot be an ensemble')
      if self.config.data.joined != other.config.data.joined:
        values = f'{self.config.data.joined} and {other.config.data.joined}'
        raise UserError(f'runs with different config.data.joined cannot be an ensemble, got {values}')
    system = self.with_config(self.config)
    system.model = ClassifierEnsemble([system.model for system in (self, *others)])
    return system

  @classmethod
  def check(cls, config: RunConfig) -> None:
    training = config.training
    bind(config.data.task, DOCUMENTS, 'task')
    vocab.parse_kind(config.data.vocabulary)
    check_setting(training, 'objective', 'likelihood', 'classification')
    model = build_classifier(config.model, 5, 2)
    sentences, _ = largest_bucket(check_document_buckets(config.data.buckets))
    params = jax.eval_shape(lambda: initializer(model)(0))
    check_parameter_options(training, params)
    trace_loss(_loss(model, training), params, _dummy_batch(sentences))

  @classmethod
  def preparation(cls, config: RunConfig) -> Preparation:
    return prepare_documents(config.data)

  @classmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def documents(self) -> Mapping[str, Documents]:
    """The splits as text."""
    return self._load_data()

  @functools.cached_property
  def encoded(self) -> dict[str, DocumentSplit]:
    """The splits as ids."""
    return {split: self._encode(documents) for split, documents in self.documents.items()}

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config.training)

  @property
  def report(self) -> list[str]:
    vocabulary = f'vocabulary {self.config.data.vocabulary}: {len(self.vocabulary)} entries'
    splits = [describe_documents(split, encoded, self.labels) for split, encoded in self.encoded.items()]
    return [vocabulary, *splits]

  @property
  def splits(self) -> list[str]:
    return list(self.documents)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return {split: encoded.identity for split, encoded in self.encoded.items()}

  @property
  def implementation(self) -> str:
    return describe_implementation(self.model.attention)

  def save(self, folder: str) -> list[str]:
    path = self.vocabulary.save(folder, 'source')
    atomic.write_text(epath.Path(folder) / LABELS_FILE, json.dumps(self.labels, ensure_ascii=False))
    return [epath.Path(path).name, LABELS_FILE]

  def initializer(self) -> Callable[[int], Any]:
    return initializer(self.model)

  def embedding_tables(self) -> Mapping[str, vocab.Vocabulary]:
    return {'embedding': self.vocabulary}

  def batches(self, seed: int, share: Share | None = None) -> DocumentBatches:
    size = self.config.data.batch_size
    return DocumentBatches(self.encoded['train'], self._buckets, size, seed, share or self.share)

  def check_data(self, log: Log) -> None:
    if not self.model.takes_pairs:
      return
    for split in self.documents.values():
      if not split.pairs or self.config.data.joined:
        raise UserError(
          f"{split.name}: the classifier compares pairs of texts; expected text=('premise', 'hypothesis') in "
          'config.data.task, and config.data.joined=False'
        )

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], list[ClassificationPrediction]]:
    encoded = self.encoded[choose(split, self.documents, 'split')]
    sums, predictions = self._predict(params, encoded, watch)
    signature = f'rows:{encoded.rows}'
    entropies = [entropy(weights) for p in predictions for weights in p.word_weights if weights.any()]
    metrics = {
      'loss': MetricValue(sums['loss'] / sums['tokens'], 'nat/document', signature),
      'accuracy': MetricValue(100 * sums['accuracy'] / sums['tokens'], '%', signature),
    }
    if entropies:  # an alignment such as softpick may give weights of 0 to all words
      mean = float(np.concatenate(entropies).mean())
      metrics['entropy'] = MetricValue(mean, 'nat', f'words of a sentence|{signature}')
    return metrics, predictions

  def format_predictions(self, predictions: Sequence[ClassificationPrediction]) -> list[str]:
    return [prediction.label for prediction in predictions]

  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes an HTML page with documents whose sentences and words are shaded by their weights.

    Arguments: see `System.plot`.
    """
    if inputs:
      documents = self._parse_documents(inputs, '--text')
      titles = list(inputs)
      labels = [''] * len(inputs)
    else:
      whole = self.documents[choose(split, self.documents, 'split')]
      row_numbers = parse_rows(rows, split, len(whole.labels))
      sentences = [whole.sentences[row] for row in row_numbers]
      labels = [whole.labels[row] for row in row_numbers]
      documents = Documents(sentences, labels, whole.name, row_numbers, whole.pairs)
      titles = [f'{split} {row}' for row in row_numbers]
    _, predictions = self._predict(params, self._encode(documents))
    shaded = []
    for title, label, sentences, prediction in zip(titles, labels, documents.sentences, predictions, strict=True):
      document = self._read(sentences, documents.pairs)
      shaded.append(shade_document(title, label, document, prediction, self.model.pair_heads))
    document_shading.write(shaded, path)

  def predict_lines(self, params: Any, lines: Sequence[str], name: str, first: int = 1) -> list[LinePrediction]:
    """Returns for each text, or tab-separated pair of texts, its label, and a record with probabilities and weights.

    Arguments: see `SupportsLinePrediction.predict_lines`.
    """
    documents = self._parse_documents(lines, name, first)
    _, predictions = self._predict(params, self._encode(documents))
    outputs = []
    for sentences, prediction in zip(documents.sentences, predictions, strict=True):
      record = prediction_record(self._read(sentences, documents.pairs), prediction)
      outputs.append((prediction.label, record))
    return outputs

  def _parse_documents(self, lines: Sequence[str], name: str, first: int = 1) -> Documents:
    return parse_documents(lines, name, self.config.data, label=self.labels[0], first=first)

  @property
  def _buckets(self) -> tuple[tuple[int, int], ...]:
    return check_document_buckets(self.config.data.buckets)

  def _read(self, sentences: Sequence[str], pairs: bool) -> CutDocument:
    joined = self.config.data.joined
    largest = largest_bucket(self._buckets)
    pieces, num_unread = cut_document(sentences, self.vocabulary.tokenize, largest, joined=joined, pairs=pairs)
    return CutDocument(pieces, num_unread)

  def _encode(self, documents: Documents) -> DocumentSplit:
    return encode_split(documents, self.vocabulary, self.labels, self.config.data)

  @functools.cached_property
  def _classify(self) -> CompiledForRuns:
    """Compiles (params, batch) -> sums, log-probabilities [B, labels], and word and sentence weights."""

    def classify(params, batch):
      outputs = self.model.apply({'params': params}, batch.source, batch.source_mask)
      return _sums(outputs, batch), jax.nn.log_softmax(outputs.logits), outputs.word_weights, outputs.sentence_weights

    return CompiledForRuns(self.mesh, classify)

  def _predict(
    self, params: Any, encoded: DocumentSplit, watch: Watch = unwatched
  ) -> tuple[dict[str, float], list[ClassificationPrediction]]:
    """Classifies every document; returns sums over documents, and one prediction each."""
    params = self.place_params(params)
    num_evaluations = self.config.training.evaluations
    num_batches = -(-encoded.rows // self.evaluation_rows)
    classify = self._classify.select(num_evaluations * num_batches, params)
    totals = []
    predictions = [None] * encoded.rows
    batches = eval_document_batches(encoded, self._buckets, self.evaluation_rows)
    for batch, outputs in map_batches(lambda x: classify(params, shard_rows(x, self.mesh)), batches, watch, self.mesh):
      sums, log_probs, word_weights, sentence_weights = outputs
      totals.append(sums)
      for i in np.flatnonzero(batch.index >= 0):
        lengths = batch.source_mask[i].sum(-1)
        num_sentences = int(np.count_nonzero(lengths))
        # Copies, as views would keep the whole batch in memory.
        predictions[batch.index[i]] = ClassificationPrediction(
          label=self.labels[int(log_probs[i].argmax())],
          probabilities=dict(zip(self.labels, np.exp(log_probs[i]).tolist(), strict=True)),
          word_weights=[word_weights[i, n, :, : lengths[n]].copy() for n in range(num_sentences)],
          sentence_weights=sentence_weights[i, :, :num_sentences].copy(),
        )
    return jax.tree.map(lambda *x: float(sum(x)), *totals), predictions


def initializer(model: Classifier) -> Callable[[int], Any]:
  """Returns seed -> initial parameters, which depend on the seed alone."""
  batch = _dummy_batch()

  @jit_once
  def init(rng: jax.Array) -> Any:
    return model.init(rng, jnp.asarray(batch.source), jnp.asarray(batch.source_mask))['params']

  return lambda seed: init(jax.random.key(seed))


def _dummy_batch(sentences: int = 2) -> LabelledBatch:
  """One document with the given number of sentences of two words, for tracing."""
  shape = (1, sentences, 2)
  return LabelledBatch(np.zeros(shape, np.int32), np.ones(shape, bool), np.zeros(1, np.int32), np.zeros(1, np.int32))


def _sums(outputs, batch: LabelledBatch, smoothing: float = 0.0):
  """Sums over the documents of a batch, as `cross_entropy` returns them: 'tokens' is the number of documents."""
  mask = batch.index >= 0
  return cross_entropy(outputs.logits[:, None], batch.label[:, None], mask[:, None], smoothing)


def _loss(model: Classifier, training: Training) -> Loss:
  """Cross entropy of the labels, plus auxiliary losses of CLASSIFIER_LOSSES."""
  auxiliary = auxiliary_losses(training.auxiliary, table=CLASSIFIER_LOSSES)
  if any(row.uses_weights for row in auxiliary.values()):
    _check_auxiliary(model, training)

  def loss(params, batch, rngs, running, update):
    rngs = rngs and {name: rng for name, rng in rngs.items() if name in ('dropout', 'attention')}
    outputs = model.apply({'params': params}, batch.source, batch.source_mask, rngs is None, rngs=rngs)
    sums = _sums(outputs, batch, training.label_smoothing if rngs else 0.0)
    values = {name: row.fn(outputs, batch, running) for name, row in auxiliary.items()}
    if not values:
      return sums
    total = sums['loss'] + sum(row.contribution(values[name], update) for name, row in auxiliary.items())
    metrics = {name: fn(outputs, batch) for row in auxiliary.values() for name, fn in row.metrics.items()}
    return {'cross_entropy': sums['loss'], **sums, **metrics, **values, 'loss': total}

  return Loss(loss)


def _check_auxiliary(model: Classifier, training: Training) -> None:
  """Raises UserError for a model without the weights that the losses of CLASSIFIER_LOSSES need."""
  if not model.single_level:
    raise UserError(
      f'training.auxiliary={training.auxiliary!r} needs a classifier that pools all words of a document at once; '
      f'expected config.model.classifier=flat; {DISABLE_HINT}'
    )
  if not POOLINGS[parse(model.pooling)[0]].has_learned_weights:
    learned = ' or '.join(name for name, cls in POOLINGS.items() if cls.has_learned_weights)
    raise UserError(
      f'training.auxiliary={training.auxiliary!r} needs learned weights; expected '
      f'config.model.pooling={learned}; {DISABLE_HINT}'
    )
