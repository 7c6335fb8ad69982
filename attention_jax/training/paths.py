"""Paths of run folders, on a file system or in a bucket, checked before anything is created in them."""

import contextlib
import logging
import os

from etils import epath

from attention_jax.errors import UserError

BUCKETS = 'gs://'  # the prefix of buckets that orbax writes to


def is_in_bucket(path: epath.PathLike) -> bool:
  """Returns whether a path is in a bucket."""
  return os.fspath(path).startswith(BUCKETS)


def absolute(folder: epath.PathLike) -> epath.Path:
  """Returns the absolute path of a folder, which is a URL already or on a file system."""
  return epath.Path(folder if is_in_bucket(folder) else os.path.abspath(folder))


def run_path(folder: epath.PathLike) -> epath.Path:
  """Returns the path of a run folder, '~' expanded.

  Args:
    folder: the folder, which need not exist; its bucket must.

  Raises:
    UserError: for a name that can be no folder: '', '-', '@NAME', the home of an unknown user, one that is too long,
      has a null character or is in a folder that may not be accessed; for a URL other than gs://BUCKET/FOLDER, for a
      bucket that does not exist or cannot be read, and for an object of a bucket.
  """
  name = os.fspath(folder)
  if is_in_bucket(name):
    return _bucket_path(name)
  if name.startswith('s3://'):
    raise UserError(f"'{name}': orbax does not write to S3; expected gs:// or a folder of a mounted bucket")
  if '://' in name or name.startswith(('http:', 'https:', 'file:')):
    raise UserError(f"'{name}' is a URL; expected a folder of a file system, or of a bucket: gs://BUCKET/FOLDER")
  if name.startswith('@'):
    raise UserError(f"'{name}' names a ready-made model, which is only read; expected a folder")
  if not name:
    raise UserError("'' is the name of no folder; expected '.' for the current one")
  if name == '-':
    raise UserError("'-' stands for no folder; expected the path of one")
  try:
    path = epath.Path(os.path.expanduser(name))
    if str(path).startswith('~'):
      raise RuntimeError('could not determine the home directory')
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      os.stat(path)  # unlike `exists`, raises for every name that the file system does not accept
    return path
  except (OSError, ValueError, RuntimeError) as error:
    reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
    shown = name if len(name) <= 80 else f'{name[:40]}...{name[-20:]}'
    raise UserError(f'cannot use {shown!r} as a folder: {reason}') from error


def _bucket_path(name: str) -> epath.Path:
  bucket, _, folder = name.removeprefix(BUCKETS).partition('/')
  if not bucket or not folder.strip('/'):
    raise UserError(f"'{name}' names no folder of a bucket; expected gs://BUCKET/FOLDER")
  path = epath.Path(name.rstrip('/'))
  try:
    import fsspec

    # Other processes write to the bucket too: lists of its objects are not kept.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
    logging.getLogger('gcsfs').setLevel(logging.CRITICAL)  # it raises the errors that it logs
    exists = epath.Path(BUCKETS + bucket).exists()
    is_object = path.is_file()
  except ImportError as error:
    raise UserError(f'{name} needs the package gcsfs: pip install "attention_jax[gcs]"') from error
  except Exception as error:  # gcsfs raises errors of its own, of aiohttp and of google.auth
    raise UserError(f'cannot use {name}: {" ".join(str(error).split())[:300] or type(error).__name__}') from error
  if not exists:
    raise UserError(f'cannot use {name}: there is no bucket {bucket!r}, or it may not be read')
  if is_object:
    raise UserError(f'cannot use {name}: it is an object of the bucket; expected a folder')
  return path
