"""Measures a claim of the literature from its finished sweep: the tables and the picture of its page in docs/claims/.

python -m experiments.ablate --config=lab/configs/scaled_dot.py --workdir=runs/claims/scaled_dot --workers=2
python -m lab.claims --claim=scaled_dot --workdir=runs/claims/scaled_dot --hardware='2 cores'
"""

import jax
from absl import flags

from attention_jax.errors import choose
from attention_jax.training.paths import run_path
from experiments.launch import launch, require_flag

flags.DEFINE_string('claim', None, 'the claim, a key of claim_pages.CLAIMS')
flags.DEFINE_string('workdir', None, 'the folder of the finished sweep of the claim')
flags.DEFINE_string('hardware', None, "hardware on which the sweep was run, such as '2 cores'")


def main() -> None:
  """Measures the claim --claim from the sweep in --workdir."""
  jax.config.update('jax_platforms', 'cpu')
  from lab.claim_pages import CLAIMS, measure_claim

  claim = CLAIMS[choose(require_flag('claim'), CLAIMS, 'claim')]
  measure_claim(claim, run_path(require_flag('workdir')), require_flag('hardware'), print)


if __name__ == '__main__':
  launch(main)
