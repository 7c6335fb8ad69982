"""What training minimises beside the cross entropy is chosen on the command line, logged and remembered."""

import jax
import jax.numpy as jnp
import pytest

from attention_jax.data.batching import Batch
from attention_jax.losses.sequence import sequence_loss
from attention_jax.systems.runs import open_run
from attention_jax.training.step import step_rngs
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import run, tiny_arguments


def train(task, folder, **fields):
  """The records of a run that has these fields, and the run."""
  ran = run(
    'train', *tiny_arguments(task, folder, *(f'--config.{name.replace("__", ".")}={x}' for name, x in fields.items()))
  )
  assert ran.code == 0, ran.err
  records = read_metrics(folder)
  return [r for r in records if 'train/loss' in r], [r for r in records if 'validation/loss' in r], open_run(folder)


def test_links_guide_and_a_temperature_falls(task, tmp_path):
  spec = 'temperature: linear(peak=2.0, end=0.5)'
  logged, validated, opened = train(
    task,
    tmp_path / 'run',
    model__attention__alignment='gumbel_annealed',
    training__anneal=spec,
    training__auxiliary='guided(weight=0.5) + coverage',
    evaluation__beams=1,
    data__task="tsv(train='train.tsv', validation='dev.tsv')",
  )
  for record in logged:
    total = record['train/cross_entropy'] + 0.5 * record['train/guided'] + record['train/coverage']
    assert record['train/loss'] == pytest.approx(total, rel=1e-5)
  assert 'validation/guided' not in validated[0]
  temperature = opened.params['decoder']['cell']['attention']['alignment_params']['temperature']
  assert temperature == pytest.approx([2.0 - 1.5 * min(opened.step + 1, 4) / 4])


def test_draws_are_rewarded_without_being_told_to(task, tmp_path):
  alone = "tsv(train='train.tsv')"
  logged, _, opened = train(task, tmp_path / 'run', model__attention__alignment='hard', data__task=alone)
  assert all(record['train/reinforce'] != 0 and record['train/log_likelihood'] < 0 for record in logged)
  assert opened.config['training']['auxiliary'] == ''
  loss, ids, real = sequence_loss(opened.model), jnp.ones((2, 5), jnp.int32), jnp.ones((2, 5), bool)
  value = lambda params, part: loss(
    params, Batch(ids, real, ids, real, ids[:, 0]), step_rngs(jax.random.key(0)), {'log_likelihood': -1.0}
  )[part]
  gradient = jax.jit(jax.grad(value), static_argnums=1)
  found = {part: gradient(opened.params, part)['decoder']['cell']['attention'] for part in ('loss', 'cross_entropy')}
  learns = {part: any(x.any() for x in jax.tree.leaves(gradients)) for part, gradients in found.items()}
  assert learns == {'loss': True, 'cross_entropy': False}
