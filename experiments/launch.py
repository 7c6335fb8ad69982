"""What every program shares: a user's mistake is one line and exit code 2, never a traceback."""

import difflib
import errno
import io
import itertools
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
from absl import flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import tuple_parser

from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError, choose

FLAGS = flags.FLAGS
_SEVERAL = '; several with commas between them speak as one'
DISK = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
HELP = ('-h', '-help', '--help', '--helpfull', '--helpshort')
SEARCH_FLAGS = ('beams', 'alpha', 'beta', 'gamma', 'max_length', 'replace_unknown')  # flags of define_search_flags
KINDS = {
  int: ('a whole number', flags.IntegerParser()),
  float: ('a number', flags.FloatParser()),
  bool: ('true or false', flags.BooleanParser()),
  tuple: ('a tuple', tuple_parser.TupleParser()),
}


def define_run_flags(allow_ensemble: bool = False) -> None:
  """The flags of programs that open a run that was trained, or `allow_ensemble` that speak as one."""
  more = _SEVERAL if allow_ensemble else ''
  flags.DEFINE_string('workdir', None, f'the folder of a trained run{more}')
  which = 'best, latest, average (the mean of the last ones, training.keep) or a step that is kept'
  flags.DEFINE_string('checkpoint', 'best', which + more)
  flags.DEFINE_string('dtype', '', 'to compute in, float32 or bfloat16; by default as in the config')


def define_search_flags() -> None:
  """The flags of programs that search with a run; each of them is a field of config.evaluation."""
  flags.DEFINE_integer('beams', None, 'hypotheses kept by the search; 1 is greedy; by default as in the config', 1)
  flags.DEFINE_float('alpha', None, 'of the length penalty ((5 + length) / 6)^alpha; by default as in the config', 0)
  flags.DEFINE_float('beta', None, 'of the coverage penalty; by default as in the config', 0)
  flags.DEFINE_float('gamma', None, 'of the end-of-sentence normalisation; by default as in the config', 0)
  flags.DEFINE_integer('max_length', None, 'tokens of an output at most; by default as in the config', 1)
  unknown = 'write the source word with the heaviest weight for an unknown one; by default as in the config'
  flags.DEFINE_bool('replace_unknown', None, unknown)


def search_overrides() -> dict[str, Any]:
  """The fields of config.evaluation that flags of `define_search_flags` say."""
  given = {name: FLAGS[name].value for name in SEARCH_FLAGS}
  return {name: value for name, value in given.items() if value is not None}


def launch(main: Callable[[], None]) -> None:
  """Parses the flags and calls main(). Exits with 2 and one line where the user can mend it."""
  flags.DEFINE_string('variants', None, 'a Python file of your own that is run first and adds rows to tables')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(encoding='utf-8')  # as it is read, whatever the locale
  _remember_compiled()
  logging.set_verbosity(logging.ERROR)
  warnings.filterwarnings('ignore', category=UserWarning)
  try:
    if any(arg in HELP for arg in sys.argv[1:]):
      return _print_help()
    _parse(sys.argv)
    _add_variants()
    main()
    sys.stdout.flush()
  except UserError as error:
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:  # the reader of our output has gone, as `head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except Exception as error:
    said = _of_disk(error) or _of_devices()
    if not said:
      raise
    print(f'error: {said}', file=sys.stderr)
    sys.exit(2)


def _of_disk(error: Exception) -> str:
  """What a user can mend about the disk, '' if that is not the matter. Libraries say it in errors of several types."""
  if isinstance(error, PermissionError) and error.filename:
    return f'{error.filename}: {error.strerror}'
  what = next((reason for reason in DISK if reason in str(error)), '')
  path = re.search(r"""['"]([^'"]*/[^'"]*)['"]""", str(error))
  return what and f'{path[1] if path else "the disk"}: {what}'


def _of_devices() -> str:
  """The same of devices."""
  asked = jax.config.jax_platforms
  return '' if not asked or _has_devices() else f'JAX_PLATFORMS={asked}: jax finds no such device here; possible: cpu'


def _has_devices() -> bool:
  try:
    return bool(jax.devices())
  except Exception:  # whatever a backend raises that is not there
    return False


def _remember_compiled() -> None:
  """What took a second or more to compile is kept in the user's cache, or in JAX_COMPILATION_CACHE_DIR."""
  if not jax.config.jax_compilation_cache_dir:
    jax.config.update('jax_compilation_cache_dir', cache_folder('compiled'))


def require_flag(name: str) -> str:
  """The value of a flag that must be given."""
  value = FLAGS[name].value
  if not value:
    raise UserError(f'--{name} is missing; --help lists the flags')
  return value


def check_output_path(path: str, flag: str) -> str:
  """`path`, where a file can be written that does not exist yet."""
  path = os.path.expanduser(path)
  folder = os.path.dirname(path) or '.'
  if os.path.exists(path):
    raise UserError(f'{path} exists and is not overwritten; possible: another --{flag}')
  if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
    raise UserError(f"--{flag}={path}: '{folder}' is no folder that can be written to")
  return path


def load_config(path: str) -> ConfigDict:
  """What get_config(preset) of 'FILE:PRESET' returns, or get_config() where no preset is given.

  Raises: UserError naming the file, and the line where something is wrong in it.
  """
  path, *preset = path.split(':', 1)
  if not os.path.isfile(path):
    raise UserError(_no_file(path))
  config = _run_file(path, lambda names: names['get_config'](*preset), 'a config file defines get_config(preset)')
  if not isinstance(config, ConfigDict):
    raise UserError(f'{path}: get_config returned {config!r}; possible: a changed systems.config.default_config()')
  return config


def _run_file(path: str, use: Callable[[dict[str, Any]], Any], defines: str) -> Any:
  """use(names) of a user's own Python file. Raises: UserError with the line where something is wrong in it."""
  try:
    return use(runpy.run_path(path))
  except UserError:
    raise
  except SyntaxError as error:
    raise UserError(f'{error.filename}:{error.lineno}: {error.msg}') from error
  except Exception as error:  # whatever it raises
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f'{path}:{lines[-1]}' if lines else path
    raise UserError(f'{where}: {type(error).__name__}: {error}; {defines}') from error


def _add_variants() -> None:
  """Runs the file of --variants, whose rows have names from then on."""
  if not (path := FLAGS.variants):
    return
  if not os.path.isfile(path):
    raise UserError(f'--variants={path}: no such file')
  _run_file(path, lambda names: None, "it adds rows to tables: attention_jax.SCORES['mine'] = attention_jax.Row(fn)")


def _no_file(path: str) -> str:
  folder, name = os.path.dirname(path) or '.', os.path.basename(path)
  files = sorted(f for f in os.listdir(folder) if f.endswith('.py') and f[0] != '_') if os.path.isdir(folder) else []
  near = difflib.get_close_matches(name, files, n=1)
  hint = f" (did you mean '{os.path.join(folder, near[0])}'?)" if near else ''
  return f"no config file '{path}'{hint}; possible in {folder}: {', '.join(files) or 'none'}"


def _parse(argv: list[str]) -> None:
  if 'config' in FLAGS:
    _check_config(argv)
  try:
    if rest := FLAGS(argv)[1:]:
      raise UserError(f"unexpected argument '{rest[0]}'; flags are written --name=value")
  except flags.UnrecognizedFlagError as error:
    mine = [flag.name for flag in _flags()]
    near = difflib.get_close_matches(error.flagname, mine, n=1)
    hint = f' (did you mean --{near[0]}?)' if near else ''
    raise UserError(f'unknown flag --{error.flagname}{hint}; possible: {", ".join(sorted(mine))}') from None
  except flags.Error as error:
    raise UserError(str(error)) from None


def _check_config(argv: list[str]) -> None:
  """Says what is wrong with --config and its fields; ml_collections would say it in several lines, or not at all."""
  config, seen = None, set()
  for arg, after in itertools.pairwise([*argv[1:], '']):
    name, given, value = arg.lstrip('-').partition('=')
    value = value if given else after
    if not arg.startswith('-'):
      continue
    if name == 'config':
      config = load_config(value)
    elif name.startswith(('config.', 'noconfig.')):
      if config is None:
        raise UserError(f'{arg}: write --config=FILE:PRESET before it')
      kind = _check_field(config, name.removeprefix('no'), value, given)
      if kind is tuple and name in seen:
        raise UserError(f'--{name} is given twice, and tuples would be put together; possible: once')
      seen.add(name)


def _check_field(config: ConfigDict, name: str, value: str, given: str) -> type:
  """The type of a field. Raises: UserError where there is none of this name, or the value is not of its type."""
  found: Any = config
  path, *parts = name.split('.')
  for part in parts:
    if not isinstance(found, ConfigDict):
      raise UserError(f'--{name}: {path} is {found!r} and has no fields')
    choose(part, found, f'field of {path}:')
    found, path = found[part], f'{path}.{part}'
  if isinstance(found, ConfigDict):
    raise UserError(f'--{name} is a group of fields; possible: --{name}.FIELD with {", ".join(found)}')
  if type(found) in KINDS and (given or not isinstance(found, bool)):
    kind, parser = KINDS[type(found)]
    try:
      parser.parse(value)
    except (ValueError, TypeError):
      raise UserError(f"{name} is {kind} like {found!r}, got '{value}'") from None
  return type(found)


def _flags() -> list[flags.Flag]:
  """The flags of this program: not those of absl."""
  return [flag for module in (sys.argv[0], __name__) for flag in FLAGS.get_flags_for_module(module)]


def _print_help() -> None:
  print(sys.modules['__main__'].__doc__)
  for flag in _flags():
    default = '' if flag.default in (None, False, []) else f' (default: {flag.default_as_str})'
    print(f'  --{flag.name}: {flag.help}{default}')
