"""Tasks of pairs of texts: a row of TASKS turns a folder and options into the splits of a corpus."""

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from attention_jax.atomic import write_text
from attention_jax.data import vocab
from attention_jax.data.batching import BATCH_UNITS
from attention_jax.data.encoding import (
  Buckets,
  EncodedSplit,
  assign_buckets,
  check_buckets,
  choose_buckets,
  describe_corpus,
  encode_split,
)
from attention_jax.data.files import join_path, open_file, report_read_errors
from attention_jax.data.pairs import read_pairs, split_by_source
from attention_jax.data.splits import SPLITS
from attention_jax.data.text import (
  NORMALIZATIONS,
  Corpus,
  Links,
  check_text,
  describe_repetitions,
  existing_path,
  from_pairs,
  from_texts,
  normalize_corpus,
  parallel_paths,
  read_parallel,
  read_tsv,
)
from attention_jax.errors import UserError, choose, run_user_file
from attention_jax.specs import Count, Fraction, Probability, Size, bind, check_fields

BUCKETS_FILE = 'buckets.json'


@dataclasses.dataclass(frozen=True)
class TranslationDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of data.tasks.TASKS.
    folder: folder that relative paths of the task start from; for the task 'prepared', the prepared data set itself;
      also where tfds data sets, such as dates, are stored.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    shared_vocabulary: whether source and target have one vocabulary.
    normalization: Unicode normal form of all text, 'NFC', 'NFKC' or 'none': data, sources to translate, and the
      hypotheses and references of metrics.
    buckets: maximum (source, target) lengths, the end-of-sentence token included. In training, a pair is padded to the
      smallest bucket that holds it; each bucket is one compilation. () chooses at most three from the lengths of the
      training split, see encoding.choose_buckets, which are stored with the run.
    max_left_out: largest share of the pairs of a split that fit no bucket; they are left out of training and loss. A
      larger share is an error.
    batch_size, batch_unit: size of a batch, in rows ('sentences') or in tokens ('tokens'): rows times the longer side
      of the bucket, padding included. By tokens, the number of rows is a multiple of 8, at least 8.
    packed: whether a row of a training batch holds several pairs, as segments; all rows have the lengths of the largest
      bucket. For Transformers; evaluation has one pair in a row in any case.
  """

  task: str = 'dates'
  folder: str = 'data'
  vocabulary: str = 'char'
  shared_vocabulary: bool = False
  normalization: str = 'none'
  buckets: tuple[tuple[int, int], ...] = ((42, 11),)
  max_left_out: Probability = 0.5
  batch_size: Size = 128
  batch_unit: str = 'sentences'
  packed: bool = False

  def __post_init__(self):
    check_fields(self, 'config.data')


class TranslationData(NamedTuple):
  """The data of a run.

  Attributes:
    source_vocab: the vocabulary of the source.
    target_vocab: the vocabulary of the target.
    buckets: those of the config, or those chosen from the training split, smallest area first.
    corpora: the splits as text.
    encoded: the splits as ids, in memory or on disk.
    report: lines that describe vocabularies and splits.
  """

  source_vocab: vocab.Vocabulary
  target_vocab: vocab.Vocabulary
  buckets: Buckets
  corpora: dict[str, Corpus]
  encoded: dict[str, EncodedSplit]
  report: list[str]


def dates(folder: str) -> dict[str, Corpus]:
  """Dates in many notations -> ISO 8601, with character links; generated on first use, stored under `folder`."""
  from attention_jax.data.builders import dates as builder

  corpora = {}
  for split in SPLITS:
    columns = builder.load(split, folder or '.')
    corpus = from_pairs(columns['source'], columns['target'], columns['links'], level='char', name=f'dates {split}')
    corpora[split] = corpus._replace(links=[_sure_links(links) for links in corpus.links], possible=corpus.links)
  return corpora


def records(folder: str, *, form: str = 'sentence', seed: int = 0) -> dict[str, Corpus]:
  """Records of people and a question about them -> the answer, with word links; generated, nothing is stored.

  Args:
    folder: not used.
    form: the form of the answers, a key of builders.records.FORMS.
    seed: seed of the records.

  Raises:
    UserError: for an unknown form.
  """
  from attention_jax.data.builders import records as builder

  corpora = {}
  for split in SPLITS:
    rows = list(builder.generate(split, form, seed))
    columns = ([row[field] for row in rows] for field in ('source', 'target', 'links'))
    corpora[split] = from_pairs(*columns, level='word', name=f'records {split}')
  return corpora


def numbers(folder: str) -> dict[str, Corpus]:
  """Numbers in English, German and French words -> digits; generated, nothing is stored. `folder` is not used."""
  from attention_jax.data.builders import numbers as builder

  corpora = {}
  for split in builder.SIZES:
    sources, targets = zip(*builder.generate(split), strict=True)
    corpora[split] = from_pairs(sources, targets, name=f'numbers {split}')
  return corpora


def _sure_links(links: Links) -> Links:
  """Returns the links of target characters that have one link. Several mean that any of these positions is correct."""
  num_links = collections.Counter(target for _, target in links)
  return tuple((source, target) for source, target in links if num_links[target] == 1)


def text(
  folder: str,
  *,
  train: Any,
  validation: Any = None,
  test: Any = None,
  unseen: Any = None,
  source: str | None = None,
  target: str | None = None,
  links: str | None = None,
  level: str = 'word',
) -> dict[str, Corpus]:
  """Parallel files, plain or .gz.

  Args:
    folder: the folder that relative paths start from.
    train, validation, test, unseen: the files of each split: a prefix, which `source` and `target` complete to two
      paths, or a pair of paths (source, target).
    source, target: suffixes of the files of a prefix, such as 'en' and 'de'; required if a split is a prefix.
    links: suffix of files of gold links in Pharaoh format, such as 'links'; a prefix without such a file has no links.
    level: the unit that links connect, a key of text.LINK_LEVELS.

  Raises:
    UserError: if a split is neither a prefix nor a pair of paths, for a prefix without `source` and `target`, for a
      pair of paths with `links`, and as `read_parallel` does.
  """

  def read(split: str, paths: Any) -> Corpus:
    source_path, target_path = text_paths(folder, split, paths, source, target)
    return read_parallel(source_path, target_path, text_links_path(folder, split, paths, links), level)

  return _read_splits(read, train, validation, test, unseen)


def text_paths(folder: str, split: str, paths: Any, source: str | None, target: str | None) -> tuple[str, str]:
  """Returns the source path and the target path of a split of the task `text`.

  Args:
    folder: the folder that relative paths start from.
    split: the name of the split, for errors.
    paths: the option of that name, see `text`.
    source, target: see `text`.

  Raises:
    UserError: if `paths` is neither a prefix nor a pair of paths, and for a prefix without `source` and `target`.
  """
  if isinstance(paths, str):
    if not (isinstance(source, str) and isinstance(target, str)):
      raise UserError(f"task 'text': {split}={paths!r} is a prefix and needs source and target such as 'en' and 'de'")
    return parallel_paths(join_path(folder, paths), source, target)
  if isinstance(paths, tuple | list) and len(paths) == 2 and all(isinstance(path, str) for path in paths):
    return join_path(folder, paths[0]), join_path(folder, paths[1])
  raise UserError(f"task 'text': {split} must be a prefix or a pair of (source, target) paths, got {paths!r}")


def text_links_path(folder: str, split: str, paths: Any, links: str | None) -> str | None:
  """Returns the path of the links of a split of the task `text`; None if it has none.

  Args:
    folder, split, paths: see `text_paths`.
    links: see `text`.

  Raises:
    UserError: for a pair of paths with `links`.
  """
  if isinstance(paths, str):
    return existing_path(join_path(folder, paths), links)
  if links is not None:
    raise UserError(f"task 'text': links={links!r} needs prefixes, got the pair of paths {split}={paths!r}")
  return None


def tsv(
  folder: str,
  *,
  train: str,
  validation: str | None = None,
  test: str | None = None,
  unseen: str | None = None,
  columns: tuple[int, ...] = (),
  level: str = 'word',
) -> dict[str, Corpus]:
  """Tables of source TAB target [TAB links], plain or .gz.

  Args:
    folder: the folder that relative paths start from.
    train, validation, test, unseen: the table of each split.
    columns: numbers of the columns of source, target and, optionally, links, from 1; others are not read. By default
      the table has two columns, or three.
    level: the unit that links connect, a key of text.LINK_LEVELS.

  Raises:
    UserError: as `read_tsv` does.
  """
  return _read_splits(
    lambda split, path: read_tsv(join_path(folder, path), level, columns), train, validation, test, unseen
  )


def pairs(
  folder: str,
  *,
  path: str = 'fra.txt',
  normalize: str = 'pytorch',
  max_length: Count = 10,
  prefixes: tuple[str, ...] = (),
  reverse: bool = False,
  validation: Fraction = 0.1,
  test: Fraction = 0.1,
  seed: Count = 0,
) -> dict[str, Corpus]:
  """One table of sentence TAB translation, such as those of manythings.org/anki, filtered as in well-known tutorials.

  Args:
    folder: the folder that `path` starts from.
    path: the table, plain or .gz; further columns are not read.
    normalize: a key of pairs.NORMALIZERS.
    max_length: maximum length of either side in words, the end-of-sentence token included; 0 for no limit.
    prefixes: prefixes of the normalised first column, of which a pair must have one; () for all pairs.
    reverse: whether the second column is the source.
    validation, test: share of the distinct sources in these splits. No source is in two splits.
    seed: seed of the choice of these sources.
  """
  corpus = read_pairs(join_path(folder, path), normalize, max_length, prefixes, reverse)
  return split_by_source(corpus, {'validation': validation, 'test': test}, seed)


def tfds(folder: str, *, name: str, source: str | None = None, target: str | None = None) -> dict[str, Corpus]:
  """A translation set in tfds format under `folder`; its languages are read from its name (`.../de-en`) by default.

  Args:
    folder: the folder of tfds data sets; '' for the current folder.
    name: the name of the data set.
    source, target: the languages; None reads them from the name. They are set together, or neither is.

  Raises:
    UserError: as translation_sets.read does.
  """
  from attention_jax.data import translation_sets

  return translation_sets.read(folder, name, source, target)


def huggingface(folder: str, *, path: str, source: str, target: str) -> dict[str, Corpus]:
  """A data set of Hugging Face on a disk: what `save_to_disk` wrote, Parquet files, or JSON lines, plain or .gz.

  Args:
    folder: the folder that `path` starts from.
    path: a file, or a folder with the files of all splits, see hugging_face.split_files.
    source, target: columns of texts, or fields of the column 'translation', such as 'de' and 'en'.

  Raises:
    UserError: as `split_files` and `iter_text_pairs` of hugging_face do, and as `from_texts` does.
  """
  from attention_jax.data import hugging_face

  path = join_path(folder, path)
  return hugging_face.read(path, hugging_face.split_files(path), source, target)


def python(
  folder: str, *, path: str, name: str, splits: tuple[str, ...] = ('train', 'validation', 'test')
) -> dict[str, Corpus]:
  """Pairs that a function of a Python file yields: `def pairs(split): yield source, target`, or dictionaries.

  The function is called once for each split whenever the data are read, and must yield the same each time: a run
  stores digests of the pairs, and resuming with others is an error.

  Args:
    folder: the folder that `path` starts from.
    path: the file, which is executed.
    name: the name of the function. It takes the name of a split, and yields (source, target), or dictionaries with the
      keys 'source' and 'target'.
    splits: the splits that it has.

  Raises:
    UserError: for a file that cannot be read, and for an error in it, with its line; without such a function; for
      anything but pairs of texts, with the number of the example; for a split without examples.
  """
  path = join_path(folder, path)
  with report_read_errors(path), open_file(path):
    pass
  for split in splits:
    choose(split, SPLITS, "split of task 'python':")

  def read(names: Mapping[str, Any]) -> dict[str, Corpus]:
    functions = {key: value for key, value in names.items() if callable(value) and not key.startswith('__')}
    pairs = functions[choose(name, functions, f'function of {path}:')]
    return {
      split: from_texts(_text_pairs(pairs(split), f'{path}: {name}({split!r})'), f'{path} {split}') for split in splits
    }

  return run_user_file(path, read, f'expected {name}(split), which yields (source, target)')


def _text_pairs(examples: Iterable[Any], where: str) -> Iterator[tuple[str, str]]:
  """Yields what a function of the task `python` yields, checked."""
  number = 0
  for number, example in enumerate(examples, 1):
    pair = [example.get(side) for side in ('source', 'target')] if isinstance(example, Mapping) else example
    if not isinstance(pair, tuple | list) or len(pair) != 2:
      raise UserError(f'{where}, example {number}: expected (source, target), got {example!r:.200}')
    source, target = (
      check_text(text, side, f'{where}, example {number}')
      for text, side in zip(pair, ('source', 'target'), strict=True)
    )
    yield source, target
  if not number:
    raise UserError(f'{where} yields no example; leave this split out of the option splits if there are none')


def prepared(folder: str) -> dict[str, Corpus]:
  """A data set that `experiments.prepare` wrote to `folder`: its training split stays on disk."""
  from attention_jax.data.prepared import read_prepared

  return read_prepared(folder)


TASKS: Mapping[str, Callable[..., dict[str, Corpus]]] = {
  'dates': dates,
  'records': records,
  'numbers': numbers,
  'text': text,
  'tsv': tsv,
  'pairs': pairs,
  'tfds': tfds,
  'huggingface': huggingface,
  'python': python,
  'prepared': prepared,
}


def _read_splits(read: Callable[[str, Any], Corpus], *paths: Any) -> dict[str, Corpus]:
  """Reads the splits whose paths, in the order of SPLITS, are set."""
  return {split: read(split, path) for split, path in zip(SPLITS, paths, strict=True) if path is not None}


def load_corpora(config: TranslationDataConfig) -> dict[str, Corpus]:
  """Returns the splits of the task `config.task` from `config.folder`; 'train' is always among them.

  Raises:
    UserError: for an unknown task or an invalid option, without a training split, and as the task does.
  """
  name, row, options = bind(config.task, TASKS, 'task')
  corpora = row(os.path.expanduser(config.folder or ''), **options)
  if 'train' not in corpora:
    raise UserError(f'task {name!r} needs train, got None')
  return corpora


def load_vocabularies(config: TranslationDataConfig, run_folder: str) -> tuple[vocab.Vocabulary, vocab.Vocabulary]:
  """Returns the source and target vocabularies that a run stored.

  Raises:
    UserError: if the folder lacks one of them, and as `vocab.load_stored` does.
  """
  by_side = {side: vocab.load_stored(config.vocabulary, run_folder, side) for side in columns_by_side(config)}
  if missing := [side for side, vocabulary in by_side.items() if vocabulary is None]:
    raise UserError(f'{run_folder}: contains no {" and no ".join(missing)} vocabulary; expected a run folder')
  return _source_and_target(config, by_side)


def check(config: TranslationDataConfig) -> None:
  """Checks a config without reading files.

  Raises:
    UserError: for an invalid task, vocabulary, bucket, batch unit or normalization.
  """
  bind(config.task, TASKS, 'task')
  vocab.parse_kind(config.vocabulary)
  if config.buckets:
    check_buckets(config.buckets)
  choose(config.batch_unit, BATCH_UNITS, 'batch unit')
  choose(config.normalization, NORMALIZATIONS, 'normalization')


def load(config: TranslationDataConfig, run_folder: str | None) -> TranslationData:
  """Reads the task of a config, trains or restores the vocabularies of the run, and encodes every split.

  Args:
    config: the group `data` of the config.
    run_folder: the run folder whose stored vocabularies are used; None for a new run. Vocabularies that it lacks are
      read from the folder of a prepared data set, or trained for any other task.

  Raises:
    UserError: for anything that is wrong with the config or the files.
  """
  buckets = check_buckets(config.buckets) if config.buckets else ()
  kind = vocab.parse_kind(config.vocabulary)
  corpora = {split: normalize_corpus(corpus, config.normalization) for split, corpus in load_corpora(config).items()}
  by_side, report = _load_or_train_vocabularies(config, corpora['train'], run_folder)
  source_vocab, target_vocab = _source_and_target(config, by_side)
  encoded = {split: encode_split(corpus, source_vocab, target_vocab) for split, corpus in corpora.items()}
  buckets = buckets or choose_buckets(encoded['train'])
  for split, corpus in corpora.items():
    report += describe_corpus(split, corpus, encoded[split], buckets, (len(source_vocab), len(target_vocab)))
    _check_fits(encoded[split], buckets, report[-1])
    if split != 'train' and (unknown := vocab.unknown_characters(source_vocab, corpus.source)):
      report.append(f'{split}: sources have {vocab.format_characters(unknown)}')
    if corpus.links is not None and encoded[split].links is None:
      report.append(f'{split}: links between {corpus.level}s are not used with a {kind} vocabulary')
      corpora[split] = corpus._replace(links=None, possible=None)
  report += describe_repetitions(corpora)
  return TranslationData(source_vocab, target_vocab, buckets, corpora, encoded, report)


def _load_or_train_vocabularies(
  config: TranslationDataConfig, train: Corpus, run_folder: str | None
) -> tuple[dict[str, vocab.Vocabulary], list[str]]:
  """The vocabulary of each side, and a line of report for each."""
  spec = config.vocabulary
  prepared_folder = None
  if train.prepared is not None:
    train.prepared.table.check_settings(vocabulary_settings(config))
    prepared_folder = str(train.prepared.table.folder)
  by_side = {}
  report = []
  for side, columns in columns_by_side(config).items():
    lines = itertools.chain(*(getattr(train, column) for column in columns))
    vocabulary, origin = vocab.load_or_train(spec, side, lines, run_folder, prepared_folder)
    by_side[side] = vocabulary
    report.append(f'{side} vocabulary {spec}: {len(vocabulary)} entries, {origin}')
  return by_side, report


def _check_fits(encoded: EncodedSplit, buckets: Buckets, description: str) -> None:
  """Raises UserError, which begins with a description of the split, if no row fits a bucket."""
  if np.all(assign_buckets(encoded, buckets) < 0):
    raise UserError(f'{description}; enlarge config.data.buckets={buckets}')


def save_vocabularies(
  config: TranslationDataConfig, source_vocab: vocab.Vocabulary, target_vocab: vocab.Vocabulary, run_folder: str
) -> list[str]:
  """Stores both vocabularies where `load` reads them; returns the names of the files.

  Args:
    config: as in `load`; its `shared_vocabulary` decides which files are written.
    source_vocab: the vocabulary of the source, or of both sides if it is shared.
    target_vocab: the vocabulary of the target; not used if the vocabulary is shared.
    run_folder: the folder that the files are written to.
  """
  names = []
  for side in columns_by_side(config):
    path = (target_vocab if side == 'target' else source_vocab).save(run_folder, side)
    names.append(os.path.basename(path))
  return names


def save_buckets(config: TranslationDataConfig, buckets: Buckets, run_folder: str) -> list[str]:
  """Stores the buckets of a run, unless its config has them, where `load_buckets` reads them.

  Args:
    config: as in `load`.
    buckets: the buckets.
    run_folder: the folder that the file is written to.

  Returns:
    The names of the files.
  """
  if config.buckets:
    return []
  write_text(epath.Path(run_folder) / BUCKETS_FILE, json.dumps(buckets) + '\n')
  return [BUCKETS_FILE]


def load_buckets(config: TranslationDataConfig, run_folder: str) -> Buckets:
  """Returns the buckets of a run: those of its config, or those that it stored.

  Raises:
    UserError: if the stored file is missing or damaged.
  """
  if config.buckets:
    return check_buckets(config.buckets)
  path = epath.Path(run_folder) / BUCKETS_FILE
  try:
    return check_buckets(json.loads(path.read_text()))
  except (OSError, ValueError) as error:
    raise UserError(f'cannot read the buckets of the run in {path}: {" ".join(str(error).split())}') from error


def vocabulary_settings(config: TranslationDataConfig) -> dict[str, Any]:
  """Returns the fields of the config that the ids of a prepared data set depend on."""
  names = ('vocabulary', 'shared_vocabulary', 'normalization')
  return {f'config.data.{name}': getattr(config, name) for name in names}


def columns_by_side(config: TranslationDataConfig) -> dict[str, tuple[str, ...]]:
  """Returns the side of each vocabulary, 'source' and 'target' or 'shared', and the columns of the corpus it covers."""
  if config.shared_vocabulary:
    return {'shared': ('source', 'target')}
  return {'source': ('source',), 'target': ('target',)}


def _source_and_target(
  config: TranslationDataConfig, by_side: Mapping[str, vocab.Vocabulary]
) -> tuple[vocab.Vocabulary, vocab.Vocabulary]:
  shared = by_side.get('shared')
  source, target = shared or by_side['source'], shared or by_side['target']
  if normalize := NORMALIZATIONS[config.normalization]:
    source, target = (vocab.NormalizedVocabulary(vocabulary, normalize) for vocabulary in (source, target))
  return source, target


def get_split(data: TranslationData, split: str) -> tuple[Corpus, EncodedSplit]:
  """Returns one split as text and as ids.

  Raises:
    UserError: for a split that the data does not have; the message lists those that it has.
  """
  choose(split, data.corpora, 'split')
  return data.corpora[split], data.encoded[split]
