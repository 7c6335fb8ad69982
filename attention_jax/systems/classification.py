"""From documents, or pairs of texts, to labels: the system of classifiers."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import document_shading
from attention_jax.analysis.alignment import entropy
from attention_jax.data import vocab
from attention_jax.data.document_batches import (
  DocumentBatches,
  EncodedDocuments,
  LabelledBatch,
  check_document_buckets,
  cut_document,
  describe_documents,
  encode_documents,
  eval_document_batches,
  largest_bucket,
)
from attention_jax.data.documents import DOCUMENTS, Documents, load_documents, parse_documents
from attention_jax.errors import UserError, choose
from attention_jax.inference.metrics import MetricValue
from attention_jax.kernels import auto
from attention_jax.losses.auxiliary import DISABLE_HINT, AuxiliaryLoss, auxiliary_losses
from attention_jax.losses.sequence import cross_entropy
from attention_jax.models.classifiers import Classifier, ClassifierConfig, build_classifier
from attention_jax.modules.attention import Attention
from attention_jax.modules.pooling import POOLINGS
from attention_jax.specs import Size, bind, check_fields, parse
from attention_jax.systems.base import Config, parse_rows
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import jit_on_mesh, make_mesh, replicate, shard_batch
from attention_jax.training.step import step_rngs

LABELS = 'labels.json'
SELECTABLE_METRICS = {'loss': False, 'accuracy': True}


@dataclasses.dataclass(frozen=True)
class ClassificationData:
  """The fields of `config.data`.

  Attributes:
    task: a spec of data.documents.DOCUMENTS.
    folder: what relative paths in the task start from; where tfds sets are.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    joined: whether a document is one sentence, whatever stands in it.
    buckets: (sentences, words) of documents; each is one compilation. The largest says how much is read: longer
      sentences are cut into several, and what comes behind is left out.
    batch_size: documents of a batch.
  """

  task: str = 'entailment'
  folder: str = 'data'
  vocabulary: str = 'word'
  joined: bool = False
  buckets: tuple[tuple[int, int], ...] = ((2, 20),)
  batch_size: Size = 64


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluation:
  """The fields of `config.evaluation`: documents that are classified at once."""

  batch_size: Size = 128

  def __post_init__(self):
    check_fields(self, 'config.evaluation')


class ClassificationPrediction(NamedTuple):
  """What is said of a document: a label, the probability of each by its name, and weights of what was read.

  words: of each sentence [H, W]; sentences: [H, N].
  """

  label: str
  probabilities: dict[str, float]
  words: list[np.ndarray]
  sentences: np.ndarray


def redundancy(outputs, batch, running) -> jax.Array:
  """Σ over documents of ‖A Aᵀ − I‖², A the weights of the hops. Lin et al. 2017, equation 8."""
  weights = jnp.moveaxis(outputs.words, 1, 2)  # [B, H, N, W]
  weights = weights.reshape(*weights.shape[:2], -1)
  apart = jnp.einsum('bhs,bgs->bhg', weights, weights) - jnp.eye(weights.shape[1])[None]
  return jnp.sum(jnp.where((batch.index >= 0)[:, None, None], apart**2, 0.0))


CLASSIFIER_LOSSES: Mapping[str, AuxiliaryLoss] = {'redundancy': AuxiliaryLoss(redundancy)}


class ClassificationSystem:
  """Any classifier, encoder and pooling on any task of documents, or of pairs of texts."""

  config_groups: Mapping[str, type] = {
    'data': ClassificationData,
    'model': ClassifierConfig,
    'model.attention': Attention,
    'evaluation': ClassificationEvaluation,
  }
  plot_filename = 'attention.html'

  def __init__(
    self,
    config: Config,
    vocabulary: vocab.Vocabulary,
    labels: Sequence[str],
    data: Callable[[], Mapping[str, Documents]],
  ):
    """`data` gives the splits when they are asked for."""
    self.config, self.vocabulary, self.labels, self._data = config, vocabulary, list(labels), data
    self.model = build_classifier(config['model'], len(vocabulary), len(labels))

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'ClassificationSystem':
    documents = load_documents(config['data'])
    spec, train = config['data']['vocabulary'], documents['train']
    vocabulary = vocab.load_stored(spec, folder, 'source') if folder else None
    if vocabulary is None:
      vocabulary = vocab.train(spec, (line for sentences in train.sentences for line in sentences))
    stored = folder and os.path.exists(os.path.join(folder, LABELS))
    labels = _stored_labels(folder) if stored else sorted(set(train.labels))
    return cls(config, vocabulary, labels, lambda: documents)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'ClassificationSystem':
    vocabulary = vocab.load_stored(config['data']['vocabulary'], folder, 'source')
    if vocabulary is None:
      raise UserError(f'{folder}: holds no source vocabulary; was a run started there?')
    return cls(config, vocabulary, _stored_labels(folder), lambda: load_documents(config['data']))

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    bind(config['data']['task'], DOCUMENTS, 'task')
    vocab.parse_kind(config['data']['vocabulary'])
    ClassificationEvaluation(**config['evaluation'])
    if training.objective != 'likelihood':
      raise UserError(f'training.objective is {training.objective!r}; possible for documents: likelihood')
    model = build_classifier(config['model'], 5, 2)
    batch = _smallest(largest_bucket(check_document_buckets(config['data']['buckets']))[0])
    params = jax.eval_shape(lambda: initializer(model)(0))
    make_anneal(training.anneal, params, training.steps)
    jax.eval_shape(_loss(model, training), params, batch, step_rngs(jax.random.key(0)), {})

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def documents(self) -> Mapping[str, Documents]:
    """The splits as text."""
    return self._data()

  @functools.cached_property
  def encoded(self) -> dict[str, EncodedDocuments]:
    """The splits as ids."""
    return {split: self._encode(documents) for split, documents in self.documents.items()}

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, Training(**self.config['training']))

  @property
  def report(self) -> list[str]:
    entries = f'vocabulary {self.config["data"]["vocabulary"]}: {len(self.vocabulary)} entries'
    return [entries, *(describe_documents(split, encoded, self.labels) for split, encoded in self.encoded.items())]

  @property
  def splits(self) -> list[str]:
    return list(self.documents)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.encoded

  @property
  def implementation(self) -> str:
    attention = self.model.attention
    several = auto.describe_choice(attention.resolved_score, attention.resolved_alignment)
    return attention.implementation + f' ({several})' * (attention.implementation == 'auto')

  def save(self, folder: str) -> None:
    self.vocabulary.save(folder, 'source')
    path = os.path.join(folder, LABELS)
    with open(f'{path}.part', 'w', encoding='utf-8') as file:
      json.dump(self.labels, file, ensure_ascii=False)
    os.replace(f'{path}.part', path)

  def initializer(self) -> Callable[[int], Any]:
    return initializer(self.model)

  def batches(self, seed: int) -> DocumentBatches:
    return DocumentBatches(
      self.encoded['train'],
      self._buckets,
      self.config['data']['batch_size'],
      seed,
      jax.process_index(),
      jax.process_count(),
    )

  def check_data(self, log: Callable[[str], None]) -> None:
    for split in self.documents.values() if self.model.takes_pairs else ():
      if not split.pairs or self.config['data']['joined']:
        raise UserError(
          f"{split.name}: the classifier compares pairs of texts; possible: text=('premise', 'hypothesis') in "
          'config.data.task, config.data.joined=False'
        )

  def evaluate(self, params: Any, split: str, *, beams: int | None = None):
    choose(split, self.documents, 'split')
    sums, guesses = self._guess(params, self.encoded[split])
    rows = f'rows:{self.encoded[split].rows}'
    found = {'loss': MetricValue(sums['loss'] / sums['tokens'], 'nat/document', rows)}
    found['accuracy'] = MetricValue(100 * sums['accuracy'] / sums['tokens'], '%', rows)
    nats = [entropy(weights) for guess in guesses for weights in guess.words if weights.any()]
    found['entropy'] = MetricValue(float(np.concatenate(nats).mean()), 'nat', f'words of a sentence|{rows}')
    return found, guesses

  def format_predictions(self, predictions: Sequence[ClassificationPrediction]) -> list[str]:
    return [guess.label for guess in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes a page with documents whose sentences and words are shaded by their weights."""
    if inputs:
      documents, titles, right = self._given(inputs, '--text'), list(inputs), [''] * len(inputs)
    else:
      every = self.documents[choose(split, self.documents, 'split')]
      chosen = parse_rows(rows, split, len(every.labels))
      some = [[column[row] for row in chosen] for column in (every.sentences, every.labels)]
      documents = Documents(*some, every.name, chosen, every.pairs)
      titles, right = [f'{split} {row}' for row in chosen], documents.labels
    _, guesses = self._guess(params, self._encode(documents))
    shaded = []
    for title, label, sentences, guess in zip(titles, right, documents.sentences, guesses, strict=True):
      read, left = self._pieces(sentences, documents.pairs)
      tokens = [tokens for tokens, _ in read]
      words = [self._by_word(of) for of in guess.words] if self.model.takes_pairs else guess.words
      given = title, label, guess.probabilities, tokens, words, guess.sentences, self.model.takes_pairs, left
      shaded.append(document_shading.ShadedDocument(*given))
    document_shading.write(shaded, path)

  def predict_lines(
    self, params: Any, lines: Sequence[str], name: str, first: int = 1
  ) -> list[tuple[str, dict[str, Any]]]:
    """Of each text, or of each pair with a tab between its texts: the label; and probabilities, and where it looked."""
    documents = self._given(lines, name, first)
    _, guesses = self._guess(params, self._encode(documents))
    found = []
    for sentences, guess in zip(documents.sentences, guesses, strict=True):
      read, left = self._pieces(sentences, documents.pairs)
      each = zip(read, guess.words, strict=True)
      parts = [{'tokens': tokens, 'weights': words} for (tokens, _), words in each]
      looked = {'parts': parts, 'weights': guess.sentences, 'unread': left}
      found.append((guess.label, {'label': guess.label, 'probabilities': guess.probabilities} | looked))
    return found

  def _given(self, lines: Sequence[str], name: str, first: int = 1) -> Documents:
    pairs, label = self.model.takes_pairs, self.labels[0]
    return parse_documents(lines, name, self.config['data'], pairs=pairs, label=label, first=first)

  def _by_word(self, weights: np.ndarray) -> np.ndarray:
    """Of a pair of texts: [heads x T, W] -> the mean over heads [T, W]."""
    return weights.reshape(self.config['model']['attention']['heads'], -1, weights.shape[-1]).mean(0)

  @property
  def _buckets(self) -> tuple[tuple[int, int], ...]:
    return check_document_buckets(self.config['data']['buckets'])

  @property
  def _most(self) -> tuple[int, int]:
    return largest_bucket(self._buckets)

  def _pieces(self, sentences: Sequence[str], pairs: bool) -> tuple[list[tuple[list[str], list[int]]], int]:
    return cut_document(sentences, self.vocabulary, self._most, joined=self.config['data']['joined'], pairs=pairs)

  def _encode(self, documents: Documents) -> EncodedDocuments:
    return encode_documents(documents, self.vocabulary, self.labels, self._most, self.config['data']['joined'])

  @functools.cached_property
  def _run(self) -> Callable:
    """(params, batch) -> sums, log-probabilities [B, L], weights: compiled once per shape."""

    def run(params, batch):
      outputs = self.model.apply({'params': params}, batch.source, batch.source_mask)
      return _sums(outputs, batch), jax.nn.log_softmax(outputs.logits), outputs.words, outputs.sentences

    return jit_on_mesh(make_mesh(jax.local_devices()), run)

  def _guess(self, params: Any, encoded: EncodedDocuments) -> tuple[dict[str, float], list[ClassificationPrediction]]:
    mesh = make_mesh(jax.local_devices())
    rows = -(-self.config['evaluation']['batch_size'] // mesh.devices.size) * mesh.devices.size
    params, totals, guesses = replicate(jax.device_get(params), mesh), [], [None] * encoded.rows
    for batch in eval_document_batches(encoded, self._buckets, rows):
      sums, log_probs, words, sentences = jax.device_get(self._run(params, shard_batch(batch, mesh)))
      totals.append(sums)
      for i in np.flatnonzero(batch.index >= 0):
        lengths = batch.source_mask[i].sum(-1)
        there = range(int(np.count_nonzero(lengths)))
        each = dict(zip(self.labels, np.exp(log_probs[i]).tolist(), strict=True))
        of_words = [words[i, n, :, : lengths[n]].copy() for n in there]
        guesses[batch.index[i]] = ClassificationPrediction(
          self.labels[int(log_probs[i].argmax())], each, of_words, sentences[i, :, : len(there)].copy()
        )
    return jax.tree.map(lambda *x: float(sum(x)), *totals), guesses


def initializer(model: Classifier) -> Callable[[int], Any]:
  """seed -> initial parameters, a function of the seed alone."""
  batch = _smallest()
  drawn = jax.jit(lambda rng: model.init(rng, jnp.asarray(batch.source), jnp.asarray(batch.source_mask))['params'])
  return lambda seed: drawn(jax.random.key(seed))


def _smallest(sentences: int = 2) -> LabelledBatch:
  """A batch of one document of so many sentences, by which parameters and shapes are told."""
  nothing, shape = np.zeros(1, np.int32), (1, sentences, 2)
  return LabelledBatch(np.zeros(shape, np.int32), np.ones(shape, bool), nothing, nothing)


def _sums(outputs, batch: LabelledBatch, smoothing: float = 0.0):
  real = batch.index >= 0
  return cross_entropy(outputs.logits[:, None], batch.label[:, None], real[:, None], smoothing)


def _loss(model: Classifier, training: Training) -> Loss:
  """The cross entropy of labels, with auxiliary losses of CLASSIFIER_LOSSES beside it."""
  extra = auxiliary_losses(training.auxiliary, table=CLASSIFIER_LOSSES)
  if extra and not model.single_level:
    possible = f'config.model.classifier=flat; {DISABLE_HINT}'
    raise UserError(f'auxiliary={training.auxiliary!r} is of one level; possible: {possible}')
  if extra and not POOLINGS[parse(model.pooling)[0]].learns:
    possible = ', '.join(name for name, cls in POOLINGS.items() if cls.learns)
    possible = f'pooling={possible}; {DISABLE_HINT}'
    raise UserError(f'auxiliary={training.auxiliary!r} is of weights that are learned; possible: {possible}')

  def loss(params, batch, rngs, running, update):
    rngs = rngs and {name: rng for name, rng in rngs.items() if name in ('dropout', 'attention')}
    outputs = model.apply({'params': params}, batch.source, batch.source_mask, rngs is None, rngs=rngs)
    sums = _sums(outputs, batch, training.label_smoothing if rngs else 0.0)
    beside = {name: row.fn(outputs, batch, running) for name, row in extra.items()}
    if not beside:
      return sums
    total = sums['loss'] + sum(row.contribution(beside[name], update) for name, row in extra.items())
    return {'cross_entropy': sums['loss'], **sums, **beside, 'loss': total}

  return Loss(loss)


def _stored_labels(folder: str) -> list[str]:
  path = os.path.join(folder, LABELS)
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: cannot be read ({error}); was a run started there?') from error
