"""Tasks: what a config can name. A row of TASKS turns a folder and options into the splits of a corpus."""

import collections
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data import vocab
from attention_jax.data.batching import BATCH_UNITS
from attention_jax.data.encoding import EncodedCorpus, assign_buckets, check_buckets, describe_corpus, encode
from attention_jax.data.text import Corpus, Links, from_pairs, parallel_paths, read_parallel, read_tsv
from attention_jax.errors import UserError, choose
from attention_jax.specs import bind

SPLITS = ('train', 'validation', 'test', 'unseen')


class TranslationData(NamedTuple):
  """What `load` returns: vocabularies, the splits as text and as ids, and a report for the person who started it."""

  source_vocab: vocab.Vocabulary
  target_vocab: vocab.Vocabulary
  corpora: dict[str, Corpus]
  encoded: dict[str, EncodedCorpus]
  report: list[str]


def dates(folder: str) -> dict[str, Corpus]:
  """Dates as people write them -> ISO 8601, with character links; built on first use, stored under `folder`."""
  from attention_jax.data.builders import dates as builder

  corpora = {}
  for split in SPLITS:
    columns = builder.load(split, folder or '.')
    corpus = from_pairs(columns['source'], columns['target'], columns['links'], level='char', name=f'dates {split}')
    corpora[split] = corpus._replace(links=[_sure(links) for links in corpus.links], possible=corpus.links)
  return corpora


def records(folder: str, *, form: str = 'sentence', seed: int = 0) -> dict[str, Corpus]:
  """Records of people and a question about them -> the answer, with word links; generated, nothing is stored."""
  from attention_jax.data.builders import records as builder

  corpora = {}
  for split in SPLITS:
    rows = list(builder.generate(split, form, seed))
    columns = ([row[field] for row in rows] for field in ('source', 'target', 'links'))
    corpora[split] = from_pairs(*columns, level='word', name=f'records {split}')
  return corpora


def _sure(links: Links) -> Links:
  """The links of target characters that have one; a character read from a whole span may look at any part of it."""
  spans = collections.Counter(target for _, target in links)
  return tuple((source, target) for source, target in links if spans[target] == 1)


def text(
  folder: str,
  *,
  train: Any,
  validation: Any = None,
  test: Any = None,
  unseen: Any = None,
  source: str | None = None,
  target: str | None = None,
) -> dict[str, Corpus]:
  """Parallel files, plain or .gz. A split is two paths, or a prefix that `source` and `target` complete."""

  def read(split: str, given: Any) -> Corpus:
    if isinstance(given, str):
      if not (isinstance(source, str) and isinstance(target, str)):
        raise UserError(f"task 'text': {split}={given!r} is a prefix and needs source and target such as 'en' and 'de'")
      return read_parallel(*parallel_paths(_under(folder, given), source, target))
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(path, str) for path in given):
      return read_parallel(*(_under(folder, path) for path in given))
    raise UserError(f"task 'text': {split} is a prefix or a pair of (source, target) paths, got {given!r}")

  return _each_split(read, train, validation, test, unseen)


def tsv(
  folder: str,
  *,
  train: str,
  validation: str | None = None,
  test: str | None = None,
  unseen: str | None = None,
  level: str = 'word',
) -> dict[str, Corpus]:
  """Tables of source TAB target [TAB links], plain or .gz. `level`: what the links count, words or characters."""
  return _each_split(lambda split, path: read_tsv(_under(folder, path), level), train, validation, test, unseen)


def tfds(folder: str, *, name: str, source: str | None = None, target: str | None = None) -> dict[str, Corpus]:
  """A translation set in tfds format under `folder`. The languages stand in its name (`.../de-en`) or are given."""
  from attention_jax.data import translation_sets

  return translation_sets.read(folder, name, source, target)


TASKS: Mapping[str, Callable[..., dict[str, Corpus]]] = {
  'dates': dates,
  'records': records,
  'text': text,
  'tsv': tsv,
  'tfds': tfds,
}


def _under(folder: str, path: str) -> str:
  return os.path.join(folder, os.path.expanduser(path))


def _each_split(read: Callable[[str, Any], Corpus], *given: Any) -> dict[str, Corpus]:
  return {split: read(split, path) for split, path in zip(SPLITS, given, strict=True) if path is not None}


def load_corpora(config: Mapping[str, Any]) -> dict[str, Corpus]:
  """The splits of the task that `config['task']` names, from `config['folder']`; 'train' is always among them."""
  _, row, options = bind(config['task'], TASKS, 'task')
  return row(os.path.expanduser(config['folder'] or ''), **options)


def load_vocabularies(config: Mapping[str, Any], run_folder: str) -> tuple[vocab.Vocabulary, vocab.Vocabulary]:
  """The source and target vocabularies that a run stored. Raises: UserError when it has none."""
  found = {side: vocab.load_stored(config['vocabulary'], run_folder, side) for side in _sides(config)}
  if missing := [side for side, vocabulary in found.items() if vocabulary is None]:
    raise UserError(f'{run_folder}: holds no {" and no ".join(missing)} vocabulary; was a run started there?')
  return _both(found)


def check(config: Mapping[str, Any]) -> None:
  """Raises UserError for what is wrong with a config whatever its files hold."""
  bind(config['task'], TASKS, 'task')
  vocab.parse_kind(config['vocabulary'])
  check_buckets(config['buckets'])
  choose(config['batch_unit'], BATCH_UNITS, 'batch unit')


def load(config: Mapping[str, Any], run_folder: str | None) -> TranslationData:
  """Reads the task of a config, makes or restores the run's vocabularies, and encodes every split.

  Args:
    config: task (a spec of TASKS), folder (what relative paths start from), vocabulary (a spec of VOCABULARIES),
      shared_vocabulary (one for both sides), buckets.
    run_folder: where the vocabularies are stored, and taken from when they are there; None stores nothing.

  Raises: UserError for whatever is wrong with the config or the files.
  """
  buckets, level = check_buckets(config['buckets']), vocab.parse_kind(config['vocabulary'])
  corpora = load_corpora(config)
  sides = _sides(config)
  found = {side: vocab.load_stored(config['vocabulary'], run_folder, side) if run_folder else None for side in sides}
  report = []
  for side, columns in sides.items():
    origin = 'stored'
    if found[side] is None:
      lines = itertools.chain(*(getattr(corpora['train'], column) for column in columns))
      found[side], origin = vocab.train(config['vocabulary'], lines), 'made from the training split'
      if run_folder:
        found[side].save(run_folder, side)
    report.append(f'{side} vocabulary {config["vocabulary"]}: {len(found[side])} entries, {origin}')
  source_vocab, target_vocab = _both(found)
  encoded = {split: encode(corpus, source_vocab, target_vocab) for split, corpus in corpora.items()}
  for split, corpus in corpora.items():
    report += describe_corpus(split, corpus, encoded[split], buckets, (len(source_vocab), len(target_vocab)))
    if np.all(assign_buckets(encoded[split], buckets) < 0):
      raise UserError(f'{report[-1]}; possible: longer config.data.buckets than {buckets}')
    if corpus.links is not None and encoded[split].links is None:
      report.append(f'{split}: links between {corpus.level}s are not used with a {level} vocabulary')
      corpora[split] = corpus._replace(links=None, possible=None)
  return TranslationData(source_vocab, target_vocab, corpora, encoded, report)


def save_vocabularies(
  config: Mapping[str, Any], source_vocab: vocab.Vocabulary, target_vocab: vocab.Vocabulary, run_folder: str
) -> None:
  """Stores both where `load` finds them again."""
  for side in _sides(config):
    (target_vocab if side == 'target' else source_vocab).save(run_folder, side)


def _sides(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
  """The vocabularies a config asks for, and the columns of the corpus that each one covers."""
  if config['shared_vocabulary']:
    return {'shared': ('source', 'target')}
  return {'source': ('source',), 'target': ('target',)}


def _both(found: Mapping[str, vocab.Vocabulary]) -> tuple[vocab.Vocabulary, vocab.Vocabulary]:
  return found.get('shared') or found['source'], found.get('shared') or found['target']


def get_split(data: TranslationData, split: str) -> tuple[Corpus, EncodedCorpus]:
  """One split as text and as ids. Raises: UserError naming the splits there are."""
  choose(split, data.corpora, 'split')
  return data.corpora[split], data.encoded[split]
