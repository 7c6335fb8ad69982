"""Resolving settings to configs: types, spec options, identity, and mistakes that are all reported at once."""

import re

import pytest

from attention_jax.errors import UserError, UserErrors
from attention_jax.sweeps.resolve import (
  PLAIN_STRINGS,
  Base,
  check_baseline,
  check_metrics,
  config_id,
  resolve,
  resolve_settings,
)
from attention_jax.sweeps.space import parse_grid, parse_setting
from attention_jax.systems.config import describe_config
from attention_jax.systems.registry import SYSTEMS
from tests.sweeps.helpers import PATH, base_config, make_base

# setting -> part of the message
MISTAKES = [
  ({'score': 'dot'}, "unknown field of config: 'score' (did you mean 'model.attention.score'?)"),
  ({'training.stps': '1'}, "unknown field of config.training: 'stps' (did you mean 'steps'?)"),
  ({'training': '1'}, 'config.training is a group of fields'),
  ({'training.steps.x': '1'}, 'config.training.steps is 100 and has no fields'),
  ({'training.steps': '1.5'}, 'config.training.steps must be a whole number, got 1.5'),
  ({'data.shared_vocabulary': '2'}, 'config.data.shared_vocabulary must be True or False, got 2'),
  ({'data.buckets': '((1,2)'}, 'config.data.buckets must be a tuple'),
  ({'model.attention.score': 3}, 'config.model.attention.score must be a string, got 3'),
  ({'seeds': '3'}, 'config.seeds is set by --seeds; it cannot be varied'),
  ({'training.seed': '3'}, 'config.training.seed is set by --seeds'),
  ({'system': 'recall'}, 'config.system is that of the config file'),
  ({'model.attention.score': 'dott'}, "unknown score 'dott' (did you mean 'dot'?)"),
  ({'model.attention.heads': '3'}, 'heads must be at least 1 and divide features'),
  ({'training.schedule.pek': '1'}, "unknown option of schedule 'cosine': 'pek' (did you mean 'peak'?)"),
  ({'data.folder.foo': '1'}, "config.data.folder is 'data' and has no fields, got 'data.folder.foo'"),
  ({'training.frozen': 'encoder', 'training.frozen.foo': '1'}, "config.training.frozen is 'encoder' and has no fields"),
  ({'training.select': 'bleu'}, "unknown metric in training.select: 'bleu'"),
]


@pytest.mark.parametrize(('setting', 'message'), MISTAKES)
def test_a_mistake_in_a_setting_is_reported_in_one_line(setting, message):
  with pytest.raises(UserError) as error:
    resolve_settings(make_base(), [setting])
  assert message in str(error.value) and len(error.value.lines) == 1


@pytest.mark.parametrize('system', SYSTEMS)
def test_strings_are_spec_strings_or_plain(system):
  for group, fields in describe_config(system).items():
    for name, field in fields.items():
      if field.type == 'str':
        is_spec = re.search(r'\bspecs?\b', field.meaning) is not None
        assert is_spec != (f'{group}.{name}'.lstrip('.') in PLAIN_STRINGS), (group, name)


def test_unknown_fields_in_a_config_file_raise():
  config = base_config()
  config['model']['attention']['widht'] = 3
  with pytest.raises(UserError, match=r'unknown fields in configs/.*: model\.attention\.widht'):
    resolve_settings(Base(PATH, {}, lambda path: config), [{}])


def test_a_baseline_is_one_of_the_settings():
  resolved = [resolve(make_base(), {'model.attention.score': score}) for score in ('dot', 'general')]
  check_baseline(resolved, None)
  check_baseline(resolved, {'model.attention.score': 'dot', 'training.steps': '100'})
  check_baseline(resolved, {'model.attention.score': 'additive'}, has_earlier_settings=True)
  for baseline in ({'training.steps': 100}, {'model.attention.score': 'additive'}, {'model.attention.scor': 'dot'}):
    with pytest.raises(UserError, match=r'--baseline: .* matches [02] settings, expected one of: score=dot; score=gen'):
      check_baseline(resolved, baseline)


def test_metrics_of_the_report_are_those_of_a_setting():
  resolved = [resolve(make_base(), {'evaluation.metrics': metrics}) for metrics in (('bleu',), ('ter',))]
  check_metrics(resolved, ('bleu', 'ter', 'loss', 'alignment_error_rate', 'entropy'))
  check_metrics(resolved, ('chrf',), has_earlier_settings=True)
  with pytest.raises(UserError, match=r"unknown metric of the report 'bleuu' \(did you mean 'bleu'\?\)"):
    check_metrics(resolved, ('ter', 'bleuu'))


def test_every_mistake_is_reported_once_with_its_settings():
  settings = [
    {'model.attention.score': 'dott', 'model.attention.alignment': 'softmax'},
    {'model.attention.score': 'dott', 'model.attention.alignment': 'sparsemax'},
    {'model.attention.score': 'dot', 'training.steps': 'x', 'training.clip': 'y'},
  ]
  with pytest.raises(UserErrors) as error:
    resolve_settings(make_base(), settings)
  first, second, third = error.value.lines
  assert first.endswith('(setting score=dott, alignment=softmax and 1 more)') and "'dott'" in first
  assert 'config.training.steps' in second and 'config.training.clip' in third


def test_values_get_the_types_of_their_fields():
  texts = {'training.steps': '7', 'training.clip': '2', 'data.shared_vocabulary': 'TRUE', 'data.buckets': '[(3, 4)]'}
  config = resolve(make_base(), texts | {'model.dropout': 1e-1}).config
  assert config.training.steps == 7 and config.training.clip == 2.0
  assert isinstance(config.training.clip, float) and config.data.shared_vocabulary is True
  assert config.data.buckets == ((3, 4),) and config.model.dropout == 0.1


def test_a_text_in_quotes_is_its_content():
  settings = [
    *parse_grid('training.frozen="encoder, decoder",encoder,,"it\'s"'),
    parse_setting('training.anneal="a: cosine; b: linear"'),
    parse_setting('data.task=tsv(train="a, b.tsv")'),
  ]
  texts = [value for setting in settings for value in resolve(make_base(), setting).setting.values()]
  assert texts == ['encoder, decoder', 'encoder', '', "it's", 'a: cosine; b: linear', 'tsv(train="a, b.tsv")']


def test_an_option_of_a_spec_is_varied():
  resolved = resolve(make_base(), {'training.schedule.peak': '0.003', 'training.schedule.warmup': '5'})
  assert resolved.config.training.schedule == 'cosine(peak=0.003, warmup=5)'
  assert resolved.overrides == {'training.schedule': 'cosine(peak=0.003, warmup=5)'}
  assert resolved.setting == {'training.schedule.peak': 0.003, 'training.schedule.warmup': 5}
  setting = {'training.schedule.peak': '0.003', 'training.schedule': 'linear'}  # in any order
  resolved = resolve(make_base(), setting)
  assert resolved.config.training.schedule == 'linear(peak=0.003)'
  assert list(resolved.setting.items()) == [('training.schedule.peak', 0.003), ('training.schedule', 'linear')]
  assert resolve(make_base(), dict(reversed(setting.items()))).id == resolved.id


def test_overrides_of_the_command_line_apply_to_every_preset_and_must_be_its_fields():
  configs = {
    'f.py:a': base_config(),
    'f.py:b': base_config(model__embedding=16, training__steps=9),
    'f.py:c': {'system': 'recall', 'model': {'cell': 'turing'}},
  }
  base = Base('f.py:a', {'training.steps': 50}, configs.__getitem__)
  resolved = resolve(base, {'preset': 'b'})
  assert resolved.path == 'f.py:b' and resolved.config.model.embedding == 16
  assert resolved.config.training.steps == 50 and resolved.overrides == {'training.steps': 50}
  with pytest.raises(UserError, match=r"^f\.py:c: unknown field of config\.model: 'embedding'; expected one of: cell$"):
    resolve(base._replace(overrides={'model.embedding': 50}), {'preset': 'c'})


@pytest.mark.long
def test_settings_with_the_same_config_are_one():
  default = base_config()['model']['attention']['alignment']
  resolved = resolve_settings(make_base(), [{}, {'model.attention.alignment': default}, {'model.embedding': '16'}])
  assert len(resolved) == 2 and resolved[0].path == PATH


def test_the_id_depends_on_what_changes_results():
  same = [{}, {'training.log_every': '7'}, {'training.keep': '9'}]
  ids = {resolve(make_base(), setting).id for setting in same}
  assert len(ids) == 1
  assert resolve(make_base(), {'training.steps': '99'}).id not in ids
  assert config_id({'a': (1, (2, 3)), 'seeds': 1}) == config_id({'seeds': 4, 'a': [1, [2, 3]], 'mesh.fsdp': 2})
