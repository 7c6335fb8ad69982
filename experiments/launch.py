"""What every program shares: a user's mistake is one line and exit code 2, never a traceback."""

import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable

from absl import flags, logging

from attention_jax.errors import UserError

FLAGS = flags.FLAGS


def define_run(help: str = 'the folder of a trained run') -> None:
  """The flags of programs that open a run that was trained."""
  flags.DEFINE_string('workdir', None, help)
  flags.DEFINE_enum('checkpoint', 'best', ['best', 'latest'], 'which checkpoint of the run')


def launch(main: Callable[[], None]) -> None:
  """Parses the flags and calls main(). Exits with 2 and one line where the user can mend it."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  logging.set_verbosity(logging.ERROR)
  warnings.filterwarnings('ignore', category=UserWarning)
  try:
    rest = _parse(sys.argv)
    if rest:
      raise UserError(f"unexpected argument '{rest[0]}'; flags are written --name=value")
    main()
  except UserError as error:
    sys.exit(_say(error))
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:  # the reader of our output has gone, as `head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def required(name: str) -> str:
  """The value of a flag that must be given."""
  value = FLAGS[name].value
  if not value:
    raise UserError(f'--{name} is missing; --help lists the flags')
  return value


def _say(error: Exception) -> int:
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  return 2


def _parse(argv: list[str]) -> list[str]:
  if any(arg in ('--help', '-h', '--helpfull', '--helpshort') for arg in argv[1:]):
    print(sys.modules['__main__'].__doc__.strip(), '\n')
    print(FLAGS.get_help(include_special_flags=False) if len(argv) < 3 else FLAGS.main_module_help())
    sys.exit(0)
  try:
    return FLAGS(argv)[1:]
  except UserError:
    raise
  except flags.UnrecognizedFlagError as error:
    mine = [n for n in FLAGS if FLAGS.find_module_defining_flag(n) in (sys.argv[0], '__main__', 'experiments.launch')]
    near = difflib.get_close_matches(error.flagname, mine, n=1)
    hint = f' (did you mean --{near[0]}?)' if near else ''
    raise UserError(f'unknown flag --{error.flagname}{hint}; possible: {", ".join(sorted(mine))}') from None
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError, SyntaxError) as error:
    raise UserError(_config_error(argv, error)) from None


def _config_error(argv: list[str], error: Exception) -> str:
  """What is wrong with a --config flag, as far as it can be told; ml_collections' own words otherwise."""
  for arg in argv:
    if found := re.match(r'--?config(?:=|$)([^:]*)', arg):
      path = found.group(1)
      if not os.path.isfile(path):
        folder = os.path.dirname(path) or '.'
        files = sorted(f for f in os.listdir(folder) if f.endswith('.py')) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(path), files, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ''
        return f"no config file '{path}'{hint}; possible in {folder}: {', '.join(f for f in files if f[0] != '_')}"
  return str(error)
