"""Traits of cells, decoders and models."""

import pytest

import attention_jax as aj
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.models.traits import Traits
from tests.models.helpers import build_conv, build_tiny, build_transformer

LATENT = aj.ALIGNMENTS['latent'].latent


@pytest.mark.parametrize(
  ('cell', 'options', 'alignment', 'expected'),
  [
    ('bahdanau', '', 'softmax', Traits(attends_in_recurrence=True)),
    ('bahdanau', 'bridge=False', 'softmax', Traits(attends_in_recurrence=True, starts_without_source=True)),
    ('bahdanau', '', 'hard', Traits(attends_in_recurrence=True, required_loss='reinforce')),
    ('luong', '', 'latent', Traits(attends_in_recurrence=True, latent=LATENT)),
    ('luong', 'input_feeding=False', 'softmax', Traits()),
    ('luong', 'input_feeding=False', 'monotonic', Traits(attends_in_recurrence=True)),
    ('plain', '', 'latent', Traits(attends=False, attends_in_recurrence=True)),
    ('plain', 'bridge=False, feed_context=True', 'softmax', Traits(attends=False, attends_in_recurrence=True)),
  ],
)
def test_traits_depend_on_the_cell_its_options_and_the_alignment(cell, options, alignment, expected):
  model = build_tiny(cell, options, alignment=alignment)
  assert model.traits == model.decoder.traits == model.decoder.cell.traits == expected


@pytest.mark.parametrize(('build', 'packs'), [(build_conv, False), (build_transformer, True)])
def test_layered_decoders_attend_in_recurrence_only_if_the_alignment_is_recurrent(build, packs):
  assert build().traits == Traits(packs=packs)
  assert build(alignment='monotonic').traits == Traits(attends_in_recurrence=True)


def test_an_ensemble_attends_if_one_of_its_models_does():
  assert Ensemble([build_tiny('plain'), build_tiny('bahdanau')]).traits.attends
  assert not Ensemble([build_tiny('plain')] * 2).traits.attends
  assert Ensemble([build_tiny(alignment='latent'), build_tiny()]).traits.latent == LATENT
