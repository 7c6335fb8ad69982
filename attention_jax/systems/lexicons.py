"""The lexicon of a run: made from its training split on first use, and stored in its folder."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import jax

from attention_jax.data.lexicon import Lexicon, load_lexicon, make_lexicon, save_lexicon
from attention_jax.data.tasks import TranslationData
from attention_jax.errors import UserError
from attention_jax.training import data_digests
from attention_jax.training.file_digests import add_file_digests, drop_file_digests

LEXICON_FILE = 'lexicon.npz'


def load_or_make_lexicon(folder: str | None, load_data: Callable[[], TranslationData]) -> Lexicon:
  """Returns the lexicon of a run.

  A stored lexicon is used if it was made from the data of the run, or if the run has stored no digest of its data.
  Otherwise the lexicon is made, and stored unless the folder is read-only. Every process of a run makes the same
  lexicon, and the first one stores it.

  Args:
    folder: the run folder; None for a run without one.
    load_data: returns the data of the run; not called if a stored lexicon can be used.

  Raises:
    UserError: for data other than those of the run, and for a file that cannot be read.
  """
  expected_digest = _training_digest(folder)
  path = folder and Path(folder).expanduser() / LEXICON_FILE
  stored = load_lexicon(path) if path else None
  if stored and expected_digest in (None, stored.digest):
    return stored
  data = load_data()
  digest = data_digests.compute_digests({'train': data.encoded['train'].identity})['train']
  if expected_digest not in (None, digest):
    raise UserError(
      f'{folder} was trained on other data than those that config.data now selects; expected the training data of the '
      'run, from which the lexicon of shortlists is made'
    )
  lexicon = make_lexicon(data.encoded['train'], len(data.source_vocab), len(data.target_vocab), digest)
  if path and jax.process_index() == 0:
    with contextlib.suppress(OSError):  # a read-only folder: it is made again next time
      drop_file_digests(folder, [LEXICON_FILE])
      save_lexicon(path, lexicon)
      add_file_digests(folder, [LEXICON_FILE])
  return lexicon


def _training_digest(folder: str | None) -> str | None:
  """The digest of the training split that a run stored at its start; None if it stored none."""
  path = Path(folder or '').expanduser() / data_digests.DATA_DIGESTS_FILE
  if not folder or not path.is_file():
    return None
  try:
    return json.loads(path.read_text('utf-8')).get('train')
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
