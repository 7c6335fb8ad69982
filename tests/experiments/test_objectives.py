"""Losses beside the cross entropy, set on the command line or required by an alignment, are trained and logged."""

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
  """Trains with these config fields, `__` for a dot; returns the records of training and of validation, and the run."""
  flags = [f'--config.{name.replace("__", ".")}={value}' for name, value in fields.items()]
  result = run('train', *tiny_arguments(task, folder, *flags))
  assert result.code == 0, result.err
  records = read_metrics(folder)
  training = [record for record in records if 'train/loss' in record]
  validation = [record for record in records if 'validation/loss' in record]
  return training, validation, open_run(folder)


@pytest.mark.long
def test_auxiliary_losses_are_added_and_the_temperature_is_annealed(task, tmp_path):
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


@pytest.mark.long
def test_hard_attention_gets_its_required_loss(task, tmp_path):
  logged, _, opened = train(
    task, tmp_path / 'run', model__attention__alignment='hard', data__task="tsv(train='train.tsv')"
  )
  assert all(record['train/reinforce'] != 0 and record['train/log_likelihood'] < 0 for record in logged)
  assert opened.config.training.auxiliary == ''
  gradients = {part: attention_gradient(opened, part) for part in ('loss', 'cross_entropy')}
  has_gradient = {part: any(x.any() for x in jax.tree.leaves(gradient)) for part, gradient in gradients.items()}
  assert has_gradient == {'loss': True, 'cross_entropy': False}


def attention_gradient(opened, part: str):
  """Returns the gradient of one part of the loss with respect to the parameters of attention."""
  loss = sequence_loss(opened.model)
  ids = jnp.ones((2, 5), jnp.int32)
  mask = ids > 0
  batch = Batch(ids, mask, ids, mask, ids[:, 0])

  def value(params):
    return loss(params, batch, step_rngs(jax.random.key(0)), {'log_likelihood': -1.0})[part]

  return jax.jit(jax.grad(value))(opened.params)['decoder']['cell']['attention']
