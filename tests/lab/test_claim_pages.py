"""Claims have a sweep with distinct settings; measured ones have records, a small picture and a page with a verdict."""

import itertools
import re

import pytest

from attention_jax.sweeps.resolve import Base, check_baseline, check_metrics, resolve
from attention_jax.systems.experiment import check_config
from experiments.config_files import PROJECT, load_config, load_sweep
from lab.claim_pages import CLAIMS
from lab.records import block_names
from tests.sampled_cases import sample_cases

SWEEPS = sorted(path.stem for path in (PROJECT / 'lab' / 'configs').glob('[a-z]*.py'))
PAGES = PROJECT / 'docs' / 'claims'
INDEX = (PAGES / 'README.md').read_text('utf-8')
MEASURED = {name: claim for name, claim in CLAIMS.items() if (PAGES / f'{claim.page}.md').exists()}
OTHER_FORMS = [('luong_grid', 'multi30k'), ('luong_grid', 'multi30k_small'), ('alignments', 'dates')]
OTHER_FORMS += [('alignments', 'dates_full')]
VERDICTS = ('holds', 'holds partly', 'does not hold here')
MAX_BYTES = 60_000  # of a picture


@pytest.mark.parametrize(
  ('name', 'form'), sample_cases([*itertools.product(SWEEPS, ['small', 'full']), *OTHER_FORMS], 2)
)
def test_settings_of_a_sweep_are_distinct_and_the_last_one_is_valid(name, form):
  path = f'{PROJECT}/lab/configs/{name}.py:{form}'
  sweep = load_sweep(path)
  base = Base(path, {}, lambda path: load_config(path).to_dict())
  assert sweep.seeds >= 3 and sweep.question.endswith('?')
  resolved = [resolve(base, setting) for setting in sweep.settings]
  assert len({setting.id for setting in resolved}) == len(sweep.settings)
  check_baseline(resolved, sweep.baseline)
  check_metrics(resolved, sweep.metrics)
  check_config(resolved[-1].config)


def test_every_sweep_belongs_to_a_claim_and_claims_without_a_page_are_listed():
  assert {claim.sweep for claim in CLAIMS.values()} == set(SWEEPS)
  missing = {claim.sweep for claim in CLAIMS.values() if claim not in MEASURED.values()}
  assert set(re.findall(r'\(`lab/configs/(\w+)\.py`\) \| not measured yet \|', INDEX)) == missing


@pytest.mark.parametrize('name', MEASURED)
def test_pages_are_complete(name):
  claim = CLAIMS[name]
  text = (PAGES / f'{claim.page}.md').read_text('utf-8')
  assert f'claims/{name}' in block_names(text) and '<!-- conditions: ' in text
  assert f'--config=lab/configs/{claim.sweep}.py' in text and f'--claim={name}' in text
  assert (PAGES / f'{claim.page}.png').stat().st_size < MAX_BYTES and f'({claim.page}.png)' in text
  verdict = re.search(r'\*\*Verdict: ([^.]+)\.\*\*', text)[1]
  assert verdict in VERDICTS
  assert re.search(rf'\({claim.page}\.md\) \| {verdict} \|', INDEX)
