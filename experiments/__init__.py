"""Floor 5: the programs. absl flags live here and nowhere else."""

import os
import sys

_PAGES = 'GLIBC_TUNABLES', 'glibc.malloc.hugetlb'

# An update makes and frees arrays of many MB. In pages of 4 KB that takes up to a tenth of its time on CPUs, and the C
# library takes larger ones only where it was told so before it began. So `python -m experiments.NAME`, and nothing else
# that imports this, begins once more; who has said anything of it is left alone.
if sys.platform == 'linux' and sys.argv[0] == '-m' and _PAGES[1] not in (_given := os.environ.get(_PAGES[0], '')):
  os.environ[_PAGES[0]] = ':'.join(filter(None, (_given, f'{_PAGES[1]}=1')))
  os.execv(sys.executable, sys.orig_argv)
