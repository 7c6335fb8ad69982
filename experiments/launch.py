"""Shared start of every program. User errors are printed, one per line, without a traceback; the exit status is 2."""

import atexit
import errno
import gc
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags
from absl import logging as absl_logging
from flax.traverse_util import flatten_dict
from ml_collections import config_flags

from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError, run_user_file
from attention_jax.specs import MAX_REPEATS
from experiments.config_files import check_config_arguments, resolve_config_arguments

FLAGS = flags.FLAGS
DISK_ERRORS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
MEMORY_ERRORS = ('RESOURCE_EXHAUSTED', 'bad_alloc', 'Out of memory')
# Upper limit of --max_length: every step of a search has an entry in arrays that are allocated at its start.
MAX_LENGTH = 100_000
HELP_FLAGS = ('-h', '-help', '--help', '--helpfull', '--helpshort')
SEARCH_FLAGS = (
  'beams',
  'alpha',
  'beta',
  'gamma',
  'length_penalty',
  'no_repeat_ngram_size',
  'min_length',
  'max_length',
  'replace_unknown',
)  # flags of define_search_flags


def define_config(help_text: str) -> None:
  """Defines the flag --config. It reads the command line at once, so that its errors end the program here."""
  try:
    config_flags.DEFINE_config_file('config', None, help_text)
  except flags.Error as error:  # a --flagfile that cannot be read
    _exit_with_errors([_flag_message(error)])


def define_run_flags(allow_ensemble: bool = False) -> None:
  """Defines the flags of programs that open a trained run, or with `allow_ensemble` several of them as an ensemble."""
  several = '; several, separated by commas, form an ensemble' if allow_ensemble else ''
  checkpoint_help = (
    'best, latest, average (the mean of the last training.keep checkpoints), the step of a checkpoint, or a file of '
    'weights (.safetensors)'
  )
  flags.DEFINE_string('workdir', None, f'the folder of a trained run{several}')
  flags.DEFINE_string('checkpoint', 'best', f'{checkpoint_help}{several}')
  flags.DEFINE_string('dtype', '', 'dtype of the computation, float32 or bfloat16; by default that of the config')


def define_search_flags() -> None:
  """Defines the flags that override fields of config.evaluation which control the search."""
  unknown_help = 'replace an unknown word with the source word of largest weight; by default as in the config'
  flags.DEFINE_integer('beams', None, 'beam size, 1 for greedy search; by default as in the config', 1, MAX_REPEATS)
  flags.DEFINE_float('alpha', None, 'exponent of the length penalty; by default as in the config', 0)
  flags.DEFINE_float('beta', None, 'weight of the coverage penalty; by default as in the config', 0)
  flags.DEFINE_float('gamma', None, 'weight of the end-of-sentence normalisation; by default as in the config', 0)
  flags.DEFINE_string(
    'length_penalty',
    None,
    'wu2016 for ((5 + length) / 6)^alpha, power for length^alpha; by default as in the config',
  )
  flags.DEFINE_integer(
    'no_repeat_ngram_size', None, 'no sequence of n tokens occurs twice; 0 allows all; by default as in the config', 0
  )
  flags.DEFINE_integer(
    'min_length', None, 'minimum number of tokens of an output, without the end; by default as in the config', 0
  )
  flags.DEFINE_integer(
    'max_length', None, 'maximum number of tokens of an output; by default as in the config', 1, MAX_LENGTH
  )
  flags.DEFINE_bool('replace_unknown', None, unknown_help)


def search_overrides() -> dict[str, Any]:
  """Returns the fields of config.evaluation that the flags of `define_search_flags` override."""
  values = {name: FLAGS[name].value for name in SEARCH_FLAGS}
  return {name: value for name, value in values.items() if value is not None}


def launch(main: Callable[..., None], takes_positional: bool = False) -> None:
  """Parses the flags and calls main().

  Prints a line for each mistake and exits with status 2 after an error that the user can correct; exits with 130 after
  an interrupt, and with 0 if the reader of the output closes it.

  Args:
    main: the program; it reads its arguments from FLAGS.
    takes_positional: whether main takes the arguments that are not flags, as a list; for other programs they are an
      error.
  """
  flags.DEFINE_list('plugins', [], 'Python files that run first and add scores, encoders, metrics and others')
  _open_closed_streams()
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(encoding='utf-8')  # like the input, whatever the locale
  _enable_compilation_cache()
  # Tracing creates many objects that live on. With the default thresholds, a tenth of its time goes to collections.
  gc.set_threshold(100_000, 50, 100)
  atexit.register(gc.freeze)  # otherwise all these objects are searched for cycles at the end, for half a second
  absl_logging.set_verbosity(absl_logging.FATAL)  # orbax logs errors that it raises as well
  logging.getLogger('asyncio').disabled = True  # when orbax aborts the other arrays after an error
  warnings.filterwarnings('ignore', category=UserWarning)
  try:
    if any(argument in HELP_FLAGS for argument in sys.argv[1:]):
      _print_help()
      return
    positional = _parse_flags(sys.argv)
    if positional and not takes_positional:
      raise UserError(f"unexpected argument '{positional[0]}'; flags are written --name=value")
    _run_plugins()
    main(*([positional] if takes_positional else []))
    sys.stdout.flush()
  except UserError as error:
    _exit_with_errors(error.lines)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:  # the reader of the output has closed it, as `head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except Exception as error:
    message = _disk_error(error) or _memory_error(error) or _device_error()
    if not message:
      raise
    _exit_with_errors([message])


def require_flag(name: str) -> str:
  """Returns the value of a required flag. Raises UserError if it is missing or empty."""
  value = FLAGS[name].value
  if not value:
    raise UserError(f'--{name} is missing; --help lists the flags')
  return value


def config_path() -> str:
  """Returns the file and preset of --config."""
  return config_flags.get_config_filename(FLAGS['config'])


def config_overrides() -> dict[str, Any]:
  """Returns the fields of the config that flags set: {'training.steps': 300}."""
  names = config_flags.get_override_values(FLAGS['config'])
  values = flatten_dict(FLAGS.config.to_dict(), sep='.')
  return {name: values[name] for name in names}


def program_command(name: str) -> list[str]:
  """Returns the command that starts another program in the way in which this one was started.

  Args:
    name: name of the program to start, such as 'train'.
  """
  is_console_script = any(os.path.basename(word) in ('attention-jax', 'attention_jax.cli') for word in sys.orig_argv)
  return [sys.executable, '-m', *(['attention_jax.cli', name] if is_console_script else [f'experiments.{name}'])]


def check_output_folder(path: str, flag: str) -> Path:
  """Checks that a new folder can be written; it may end with a slash. Arguments and errors: see `check_output_path`."""
  return Path(check_output_path(str(Path(path)), flag))


def check_output_path(path: str, flag: str) -> str:
  """Checks that a new file or folder can be written.

  Args:
    path: the file or folder; '~' stands for the home folder.
    flag: the name of the flag that set it.

  Returns:
    The path with '~' expanded.

  Raises:
    UserError: if the path exists, or its parent folder does not exist or is not writable.
  """
  path = os.path.expanduser(path)
  folder = os.path.dirname(path) or '.'
  if os.path.exists(path):
    raise UserError(f'{path} exists; choose another --{flag}')
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise UserError(f"--{flag}={path}: '{folder}' is not a writable folder")
  return path


def _exit_with_errors(messages: Sequence[str]) -> NoReturn:
  for message in messages:
    print(f'error: {message}', file=sys.stderr)
  sys.exit(2)


def _disk_error(error: Exception) -> str:
  """Returns the message for a full or read-only disk or a file without permission, '' for any other error.

  Libraries wrap these errors in exceptions of several types, so the text is searched.
  """
  if isinstance(error, PermissionError) and error.filename:
    return f'{error.filename}: {error.strerror}'
  reason = next((reason for reason in DISK_ERRORS if reason in str(error)), '')
  if not reason:
    return ''
  path = re.search(r"""['"]([^'"]*/[^'"]*)['"]""", str(error))
  return f'{path[1] if path else "the disk"}: {reason}'


def _memory_error(error: Exception) -> str:
  """Returns the message for memory that could not be allocated, '' for any other error."""
  text = ' '.join(str(error).split())
  if not isinstance(error, MemoryError) and not any(reason in text for reason in MEMORY_ERRORS):
    return ''
  fields = 'the batch size, the buckets, the beams, the samples, the maximum length or the sizes of the model'
  return f'out of memory: {text[:200].rstrip(".") or "an allocation failed"}; lower {fields}'


def _open_closed_streams() -> None:
  """Opens the null device in place of standard streams that the caller has closed, which are None."""
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # noqa: SIM115 - open until the end


def _device_error() -> str:
  """Returns the message for a JAX_PLATFORMS that this machine does not have, '' if there is nothing to report."""
  platforms = jax.config.jax_platforms
  if not platforms or _has_devices():
    return ''
  return f'JAX_PLATFORMS={platforms}: jax finds no such device on this machine; JAX_PLATFORMS=cpu works on any machine'


def _has_devices() -> bool:
  try:
    return bool(jax.devices())
  except Exception:  # a missing backend may raise anything
    return False


def _enable_compilation_cache() -> None:
  """Stores compiled programs in the user's cache folder, or in that of JAX_COMPILATION_CACHE_DIR.

  It stores programs that took at least 0.1 seconds to compile, or the limit JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS.
  By default jax stores only those that took a second or more: few of the programs of small models.
  """
  if not jax.config.jax_compilation_cache_dir:
    jax.config.update('jax_compilation_cache_dir', cache_folder('compiled'))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def _run_plugins() -> None:
  """Runs the files of --plugins, which add rows to tables."""
  from attention_jax.systems.plugins import set_plugins

  paths = [os.path.expanduser(path) for path in FLAGS.plugins]
  for path in paths:
    if not os.path.isfile(path):
      raise UserError(f'--plugins={path}: no such file')
    run_user_file(
      path,
      use=lambda names: None,
      purpose="a plug-in adds rows to tables: attention_jax.SCORES['name'] = attention_jax.Row(fn)",
    )
  set_plugins(paths)


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; returns the other arguments."""
  if 'config' in FLAGS:
    arguments = resolve_config_arguments(argv[1:])
    check_config_arguments(arguments)
    argv = [argv[0], *arguments]
  try:
    positional = FLAGS(argv)[1:]
  except flags.UnrecognizedFlagError as error:
    names = sorted(flag.name for flag in _program_flags())
    raise UserError(f'{error} (flags of this program: {", ".join(names)})') from None
  except (flags.Error, ValueError) as error:  # a ValueError for --noFLAG=VALUE
    raise UserError(_flag_message(error)) from None
  for flag in _program_flags():
    if flag.default is None and flag.value == '':
      raise UserError(f'--{flag.name}= is empty; expected a value, or no --{flag.name}')
  return positional


def _flag_message(error: Exception) -> str:
  return str(error).removeprefix('ERROR:: ')


def _program_flags() -> list[flags.Flag]:
  """Returns the flags of this program, without those of absl."""
  modules = (sys.argv[0], __name__, 'experiments.distributed', 'lab.topologies')
  return [flag for module in modules for flag in FLAGS.get_flags_for_module(module)]


def _print_help() -> None:
  print(sys.modules['__main__'].__doc__)
  for flag in _program_flags():
    default = '' if flag.default in (None, False, '', []) else f' (default: {flag.default_as_str})'
    print(f'  --{flag.name}: {flag.help}{default}')
