"""Readings of a trained translation model: of new lines, or of rows of a split."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax.analysis.alignment import merge_weights
from attention_jax.analysis.analyses import Subject, analyse, parse_analysis
from attention_jax.analysis.interventions import AnalysedPair, edited_model
from attention_jax.analysis.reading import WEIGHTS, Reading, ReadingRequest
from attention_jax.data import tasks
from attention_jax.data.encoding import EncodedCorpus, assign_buckets, encode
from attention_jax.data.splits import SPLITS
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.data.word_positions import split_words
from attention_jax.decoding.predictor import Predictor
from attention_jax.decoding.scoring import PairScorer, ScoredPair
from attention_jax.errors import UserError, choose
from attention_jax.functional.edits import check_indices, resolve_edit
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.modules.embedding import oov_to_unk
from attention_jax.systems.base import parse_rows
from attention_jax.systems.text_evaluation import TeacherForcedScorer
from attention_jax.tokens import EOS, SPECIAL_TOKENS

END = SPECIAL_TOKENS[EOS]


def check_request(request: ReadingRequest) -> None:
  """Checks the fields of a request that can be checked without a run, before data are read.

  Raises:
    UserError: for rows that are not numbers, an unknown split, an invalid analysis or edit, fewer than one hypothesis,
      and analyses with merged words.
  """
  choose(request.split, SPLITS, 'split')
  for row in request.rows:
    if not row.strip().isdecimal():
      raise UserError(f"row '{row}' is not in split '{request.split}'; expected a number from 0")
  if request.hypotheses < 1:
    raise UserError(f'hypotheses must be at least 1, got {request.hypotheses}')
  if request.words and request.analyses:
    raise UserError(f'analyses are of tokens, and cannot be merged to words, got words and {request.analyses[0]!r}')
  for spec in request.analyses:
    parse_analysis(spec)
  if request.edit:
    resolve_edit(request.edit)


@dataclasses.dataclass(frozen=True)
class Reader:
  """Computes readings of one model.

  Attributes:
    model, params: the trained model.
    source_vocab, target_vocab: vocabularies of the run.
    buckets: buckets of the run.
  """

  model: EncoderDecoder
  params: Any
  source_vocab: Vocabulary
  target_vocab: Vocabulary
  buckets: Sequence[Sequence[int]]

  def read_lines(self, predictor: Predictor, beams: int, request: ReadingRequest) -> list[Reading]:
    """Returns the readings of the best hypotheses of each input, without analyses and weights of layers.

    Args:
      predictor: translates the inputs.
      beams: beams of the search.
      request: the inputs.

    Raises:
      UserError: for an empty line, for a line without a hypothesis, such as one that is too long for the model, and for
        more hypotheses than beams.
    """
    if request.hypotheses > beams:
      raise UserError(f'hypotheses must be at most {beams}, the beam size, got {request.hypotheses}')
    if not all(line.strip() for line in request.inputs):
      raise UserError('an empty line has no attention weights; expected a line of text')
    readings = []
    for line, prediction in zip(request.inputs, predictor(request.inputs, beams=beams), strict=True):
      if not prediction.hypotheses:
        raise UserError(f'no output for {line!r}: it is too long, or no hypothesis has a finite probability')
      source_tokens = [*prediction.tokens, END]
      for hypothesis in prediction.hypotheses[: request.hypotheses]:
        matrices = {WEIGHTS: np.asarray(hypothesis.weights)}
        target_tokens = [*hypothesis.tokens, END][: len(hypothesis.weights)]  # a truncated hypothesis has no EOS
        readings.append(
          Reading(line, line, hypothesis.text, source_tokens, target_tokens, matrices, score=hypothesis.score)
        )
    return readings

  def read_rows(self, corpus: Corpus, request: ReadingRequest) -> list[Reading]:
    """Returns the readings of rows of a split, with their gold links, without analyses and weights of layers.

    Args:
      corpus: the split.
      request: its name and the rows.

    Raises:
      UserError: for rows that do not exist, or fit no bucket, and for several hypotheses.
    """
    if request.hypotheses > 1:
      raise UserError(f'hypotheses must be 1 for rows, which are read with their reference, got {request.hypotheses}')
    numbers = parse_rows(request.rows, request.split, len(corpus.source))
    selected = _select(corpus, numbers)
    ids = encode(selected, self.source_vocab, self.target_vocab)
    has_bucket = assign_buckets(ids, self.buckets) >= 0
    if not has_bucket.all():
      row = numbers[int(has_bucket.argmin())]
      raise UserError(f"row {row} of split '{request.split}' fits no bucket; see config.data.buckets")
    scores = TeacherForcedScorer(self.model, self.buckets, len(numbers))(self.params, ids)
    sure_ids = encode(selected._replace(possible=None), self.source_vocab, self.target_vocab)
    readings = []
    columns = (numbers, selected.source, selected.target, scores.weights)
    for i, (row, source, target, weights) in enumerate(zip(*columns, strict=True)):
      gold = None if ids.links is None else ids.row_links(i)
      sure = None if ids.links is None or selected.possible is None else sure_ids.row_links(i)
      source_tokens = [*self.source_vocab.tokenize(source), END]
      target_tokens = [*self.target_vocab.tokenize(target), END]
      matrices = {WEIGHTS: np.asarray(weights)}
      name = f'{request.split} {row}'
      readings.append(Reading(name, source, target, source_tokens, target_tokens, matrices, gold, sure=sure))
    return readings

  def complete(self, readings: Sequence[Reading], request: ReadingRequest) -> list[Reading]:
    """Adds layers and analyses, or merges tokens to words, if requested; all weights are then those of teacher forcing.

    Raises:
      UserError: as `check_request`; for an empty target, and for lengths, layers or an analysis that the model rejects.
    """
    if not (request.layers or request.analyses or request.words):
      return list(readings)
    check_request(request)
    if empty := [reading.source for reading in readings if not reading.target]:
      raise UserError(f'the target of {empty[0]!r} is empty; expected a target with a token')
    corpus = Corpus([reading.source for reading in readings], [reading.target for reading in readings])
    vocabularies = (self.source_vocab, self.target_vocab)
    scored = PairScorer(self.model, self.params, *vocabularies, self.buckets)(corpus, request.layers)
    encoded = encode(corpus, *vocabularies)
    completed = [
      self._complete(reading, pair, self._pair(encoded, row), request.analyses)
      for row, (reading, pair) in enumerate(zip(readings, scored, strict=True))
    ]
    return [self._merge_words(reading) for reading in completed] if request.words else completed

  def _merge_words(self, reading: Reading) -> Reading:
    """Sums weights over the tokens of a source word, and averages them over those of a target word."""
    source_words = self.source_vocab.word_ids(reading.source)
    target_words = self.target_vocab.word_ids(reading.target)

    def merge(links):
      if links is None:
        return None
      pairs = {(source_words[s], target_words[t]) for s, t in links}
      return sorted(pair for pair in pairs if min(pair) >= 0)

    def words(text, word_ids):  # up to the last word that has a token, as in `merge_weights`
      return [*split_words(text)[: max(word_ids, default=-1) + 1], END]

    return reading._replace(
      source_tokens=words(reading.source, source_words),
      target_tokens=words(reading.target, target_words),
      matrices={name: merge_weights(x, source_words, target_words) for name, x in reading.matrices.items()},
      gold=merge(reading.gold),
      sure=merge(reading.sure),
    )

  def _complete(self, reading: Reading, scored: ScoredPair, pair: AnalysedPair, analyses: Sequence[str]) -> Reading:
    target_tokens = [*scored.tokens, END]
    subject = Subject(pair, reading.source_tokens, target_tokens, scored.weights)
    return reading._replace(
      target_tokens=target_tokens,
      matrices={WEIGHTS: scored.weights} | _name_layers(scored.layer_weights),
      measurements={spec: analyse(spec, subject) for spec in analyses},
    )

  def _pair(self, encoded: EncodedCorpus, row: int) -> AnalysedPair:
    """The model, and the ids of a row without padding; target ids that the model cannot emit become UNK."""
    source = encoded.source[encoded.source_offsets[row] : encoded.source_offsets[row + 1]]
    target = encoded.target[encoded.target_offsets[row] : encoded.target_offsets[row + 1]]
    emittable = oov_to_unk(jnp.asarray(target), self.model.output_size(len(source)))
    return AnalysedPair(self.model, self.params, jnp.asarray(source), emittable)


def read(system: Any, params: Any, request: ReadingRequest) -> list[Reading]:
  """Returns the readings of the best hypotheses of each input, or of the reference of each row.

  Args:
    system: a TranslationSystem.
    params: parameters of its model.
    request: which readings to compute.

  Raises:
    UserError: as `check_request` and the methods of Reader, for a model that does not attend without analyses, and for
      an edit that does not apply to the model or to the tokens.
  """
  check_request(request)
  if not (system.model.traits.attends or request.analyses):
    raise UserError(
      'the decoder of this model does not attend: it has no weights, and needs analyses such as leave_one_out'
    )
  if request.edit:
    system = _edited_system(system, request.edit)
  reader = Reader(system.model, params, system.source_vocab, system.target_vocab, system.buckets)
  if request.inputs:
    readings = reader.read_lines(system.cached_predictor(params), system.config.evaluation.beams, request)
  else:
    readings = reader.read_rows(tasks.get_split(system.data, request.split)[0], request)
  if request.edit and readings:
    longest_target = max(len(reading.target_tokens) for reading in readings)
    shortest_source = min(len(reading.source_tokens) for reading in readings)
    check_indices(request.edit, longest_target, shortest_source)
  return reader.complete(readings, request)


@functools.lru_cache(maxsize=1)
def _edited_system(system: Any, edit: str) -> Any:
  """The system with edited weights. The last one is cached, so that its search is compiled once for many readings."""
  return system.with_model(edited_model(system.model, edit))


def _select(corpus: Corpus, rows: Sequence[int]) -> Corpus:
  """The corpus of the rows with these numbers, and their links."""
  columns = {
    name: None if values is None else [values[row] for row in rows]
    for name, values in (
      ('source', corpus.source),
      ('target', corpus.target),
      ('links', corpus.links),
      ('possible', corpus.possible),
    )
  }
  return Corpus(level=corpus.level, name=corpus.name, **columns)


def _name_layers(layers: np.ndarray | None) -> dict[str, np.ndarray]:
  """The weights [L, N, T, S] of layers and heads by name; empty without them."""
  if layers is None:
    return {}
  has_heads = layers.shape[1] > 1
  return {
    f'layer {layer}, head {head}' if has_heads else f'layer {layer}': weights
    for layer, heads in enumerate(layers)
    for head, weights in enumerate(heads)
  }
