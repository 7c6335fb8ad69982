"""Presets: a preset is a paper. What it says of the structure; sizes and training are the task's."""

from collections.abc import Mapping
from typing import NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import choose


class Preset(NamedTuple):
  """A row of PRESETS: the paper, and values for fields of a config by their dotted paths.

  In the values {features} is the size of every layer, {layers} the number of layers of deep models, {positions} the
  longest memory. Of GNMT, convolutions and Transformers {depth} is the number of layers; {heads} is that of heads with
  64 features each, and {hidden} the width of feed-forward networks, four times that of the layers.
  """

  paper: str
  settings: Mapping[str, str]


NO_SETTINGS: Mapping[str, str] = {}


def _model(encoder: str, decoder: str, score: str = '', alignment: str = 'softmax') -> dict[str, str]:
  attention = {'model.attention.score': score, 'model.attention.alignment': alignment} if score else {}
  return {'model.encoder': encoder, 'model.decoder': decoder, **attention}


def _transformer(features: int | str, layers: int | str, heads: int | str, hidden: int | str, more: str = '') -> dict:
  """Both sides alike, embeddings as wide as the layers and tied to the output layer."""
  size = f'features={features}, layers={layers}, heads={heads}, hidden={hidden}{more}'
  settings = _model(f'transformer({size})', f'transformer({size})', 'scaled_dot')
  attention = {'model.attention.features': str(features), 'model.attention.heads': str(heads)}
  training = {'training.optimizer': 'adam(b2=0.98)', 'training.label_smoothing': '0.1'}
  return settings | attention | training | {'model.embedding': str(features), 'model.output': 'tied'}


def _copying(output: str) -> dict[str, str]:
  """An output layer that says words of the source; both sides have one vocabulary."""
  return {'model.output': output, 'data.shared_vocabulary': 'True', 'model.share_embeddings': 'True'}


def _classifier(
  paper: str, classifier: str, encoder: str, pooling: str, more: Mapping[str, str] = NO_SETTINGS
) -> Preset:
  settings = {'model.classifier': classifier, 'model.encoder': encoder, 'model.pooling': pooling}
  return Preset(paper, settings | {'model.attention.score': 'dot'} | more)


def _see(score: str) -> dict[str, str]:
  return _model(f'birnn(rnn="lstm", {_SIZE})', f'luong(rnn="lstm", {_SIZE})', score) | _copying('pointer_generator')


_SIZE = 'features={features}'
_BIRNN = f'birnn(rnn="gru", {_SIZE})'
_BILSTM = f'birnn(rnn="lstm", {_SIZE}, layers={{layers}})'
_ONWARD = f'rnn(rnn="lstm", {_SIZE}, layers={{layers}})'  # one direction: it can be read while the source arrives
_BAHDANAU = f'bahdanau(rnn="gru", {_SIZE}, readout={{features}})'
_LUONG = f'luong(rnn="lstm", {_SIZE}, layers={{layers}})'
_STREAM = f'bahdanau(rnn="lstm", {_SIZE}, readout={{features}}, bridge=False)'
_HARD = {
  'model.attention.alignment': 'hard(expected=0.5)',
  'training.auxiliary': 'reinforce(entropy=0.002, discount=0.0)',
}

# Where all of them differ from their papers: the decoder starts from a learned map of the encoder's last states
# (sutskever2014 and luong2015 copy them; bahdanau2015 maps the backward one alone), and training is the task's.
# bahdanau2015 besides: tanh for maxout in the deep output, and the GRU's reset gate after the product. luong2015:
# the encoder reads in both directions, without which its attention is late to learn from as few sentences as ours.
# see2017: the decoder is fed the attentional vector, which is also what the vocabulary is scored with, where the paper
# feeds the context and has two linear layers. see2017_coverage: coverage is there from the start, where the paper adds
# it to a model that has been trained. gu2016 reads no memory selectively.
# gehring2017 has layers of one width, and fewer of them; see models/convolutional.py for what else differs.
# lin2017 has fewer hops and no layer that prunes; parikh2016 learns its embeddings, which are three times as large at
# first (smaller ones look everywhere alike, and stay there), and attends to no sentence itself. xu2015_soft and
# xu2015_hard learn their own, smaller grid, and read out by tanh; doubly stochastic counts a thousandth of the paper's.
# Hard attention is soft for half of the words where it is for half of the pictures, and a look is rewarded by its own
# word where it is by all words to come: else it goes to what is told next, and what is told now is remembered.
# The Transformers drop embeddings before positions are added, and have source embeddings of their own.
# martins2016_sparsemax had no decoder of its own, peters2019_entmax's is that of Luong et al.; xu2015_hard and
# chorowski2015 read words and letters here, where the papers have pictures (the system captioning has them too) and
# speech; wu2019_hard_monotonic adds no tags to its source but those that stand in the data.
TRANSLATION: Mapping[str, Preset] = {
  'sutskever2014': Preset(
    'Sutskever, Vinyals & Le 2014',
    _model(
      f'rnn(rnn="lstm", {_SIZE}, layers={{layers}}, direction="backward")',
      f'plain(rnn="lstm", {_SIZE}, layers={{layers}})',
    ),
  ),
  'bahdanau2015': Preset('Bahdanau, Cho & Bengio 2015', _model(_BIRNN, _BAHDANAU, 'additive')),
  'luong2015': Preset('Luong, Pham & Manning 2015', _model(_BILSTM, _LUONG, 'general')),
  'luong2015_dot': Preset('Luong et al. 2015, dot', _model(_BILSTM, _LUONG, 'dot')),
  'luong2015_general': Preset('Luong et al. 2015, general', _model(_BILSTM, _LUONG, 'general')),
  'luong2015_concat': Preset('Luong et al. 2015, concat', _model(_BILSTM, _LUONG, 'concat')),
  'luong2015_location': Preset(
    'Luong et al. 2015, location', _model(_BILSTM, _LUONG, 'location(max_positions={positions})')
  ),
  'luong2015_local_m': Preset('Luong et al. 2015, local-m', _model(_BILSTM, _LUONG, 'general', 'local_m(width=10)')),
  'luong2015_local_p': Preset('Luong et al. 2015, local-p', _model(_BILSTM, _LUONG, 'general', 'local_p(width=10)')),
  'chorowski2015': Preset(
    'Chorowski et al. 2015',
    _model(_BIRNN, _BAHDANAU, 'location_sensitive(channels=10, width=31)', 'smoothed'),
  ),
  'xu2015_hard': Preset(
    'Xu et al. 2015, hard',
    _model(_BIRNN, f'bahdanau(rnn="lstm", {_SIZE}, readout={{features}})', 'additive') | _HARD,
  ),
  'tu2016': Preset('Tu et al. 2016, linguistic coverage with fertility', _model(_BIRNN, _BAHDANAU, 'fertility')),
  'martins2016_sparsemax': Preset('Martins & Astudillo 2016', _model(_BIRNN, _BAHDANAU, 'additive', 'sparsemax')),
  'raffel2017': Preset('Raffel et al. 2017', _model(_ONWARD, _STREAM, 'offset_additive', 'monotonic')),
  'chiu2018': Preset('Chiu & Raffel 2018', _model(_ONWARD, _STREAM, 'offset_additive', 'mocha(width=2)')),
  'zhang2018_forward': Preset('Zhang, Ling & Dai 2018', _model(_BIRNN, _BAHDANAU, 'additive', 'forward_agent')),
  'wu2018_hard': Preset(
    'Wu, Shapiro & Cotterell 2018',
    _model(_BILSTM, f'luong(rnn="lstm", {_SIZE}, input_feeding=False)', 'general', 'latent'),
  ),
  'wu2019_hard_monotonic': Preset(
    'Wu & Cotterell 2019',
    _model(_BILSTM, f'luong(rnn="lstm", {_SIZE}, input_feeding=False)', 'general', 'latent_monotonic'),
  ),
  'gnmt2016': Preset(
    'Wu et al. 2016',
    _model(f'gnmt({_SIZE}, layers={{depth}})', f'gnmt({_SIZE}, layers={{depth}}, current=False)', 'normed_additive'),
  ),
  'gehring2017': Preset(
    'Gehring et al. 2017',
    _model(
      f'conv({_SIZE}, layers={{depth}}, width=3, max_positions={{positions}})',
      f'conv({_SIZE}, layers={{depth}}, width=3)',
      'dot',
    )
    | {'model.embedding': '{features}'},
  ),
  'vinyals2015': Preset(
    'Vinyals, Fortunato & Jaitly 2015',
    _model(f'rnn(rnn="lstm", {_SIZE})', f'luong(rnn="lstm", {_SIZE}, input_feeding=False)', 'additive')
    | _copying('pointer'),
  ),
  'gu2016': Preset('Gu, Lu, Li & Li 2016', _model(_BIRNN, _BAHDANAU, 'additive') | _copying('copynet')),
  'see2017': Preset('See, Liu & Manning 2017', _see('additive')),
  'see2017_coverage': Preset(
    'See, Liu & Manning 2017, coverage', _see('coverage') | {'training.auxiliary': 'coverage'}
  ),
  'transformer2017': Preset(
    'Vaswani et al. 2017, as large as the task has it', _transformer('{features}', '{depth}', '{heads}', '{hidden}')
  ),
  'transformer2017_tiny': Preset('Vaswani et al. 2017, sizes of Wu et al. 2021', _transformer(128, 4, 4, 256)),
  'transformer2017_small': Preset('Vaswani et al. 2017, small', _transformer(256, 3, 4, 1024)),
  'transformer2017_base': Preset('Vaswani et al. 2017, base', _transformer(512, 6, 8, 2048)),
  'transformer2017_big': Preset('Vaswani et al. 2017, big', _transformer(1024, 6, 16, 4096)),
  'shaw2018': Preset(
    'Shaw, Uszkoreit & Vaswani 2018',
    _transformer('{features}', '{depth}', '{heads}', '{hidden}', ', position="shaw"'),
  ),
  'peters2019_entmax': Preset('Peters, Niculae & Martins 2019', _model(_BILSTM, _LUONG, 'general', 'entmax15')),
}

CLASSIFICATION: Mapping[str, Preset] = {
  'yang2016': _classifier('Yang et al. 2016', 'hierarchical', f'birnn({_SIZE})', 'attention'),
  'lin2017': _classifier(
    'Lin et al. 2017',
    'flat',
    f'birnn(rnn="lstm", {_SIZE})',
    'attention(hops=8, bias=False)',
    {'training.auxiliary': 'redundancy(weight=0.1)', 'model.hidden': '{features}'},
  ),
  'parikh2016': _classifier('Parikh et al. 2016', 'decomposable(width={features})', 'embedded(scale=3.0)', 'sum'),
}

_CAPTIONS = {
  'model.encoder': 'grid(features={features}, layers=1)',
  'model.decoder': 'bahdanau(rnn="lstm", features={features}, readout={features}, gate=True)',
  'model.attention.score': 'additive',
}
CAPTIONING: Mapping[str, Preset] = {
  'xu2015_soft': Preset(
    'Xu et al. 2015, soft and doubly stochastic', _CAPTIONS | {'training.auxiliary': 'doubly_stochastic(weight=0.001)'}
  ),
  'xu2015_hard': Preset('Xu et al. 2015, hard', _CAPTIONS | _HARD),
}

GLIMPSING: Mapping[str, Preset] = {'mnih2014': Preset('Mnih et al. 2014', {'model.features': '{features}'})}

RECALL: Mapping[str, Preset] = {
  'graves2014': Preset('Graves, Wayne & Danihelka 2014', {'model.cell': 'turing(features={features})'})
}

# By the system that they are of.
PRESETS: Mapping[str, Mapping[str, Preset]] = {
  'captioning': CAPTIONING,
  'classification': CLASSIFICATION,
  'glimpsing': GLIMPSING,
  'recall': RECALL,
  'translation': TRANSLATION,
}


def apply_preset(config: ConfigDict, preset: str, *, features: int, layers: int = 1, depth: int = 3) -> ConfigDict:
  """Sets the fields of `config` that the paper `preset` has a say in. Call it when the task has set its own.

  Raises: UserError for an unknown preset, or one of another system, naming the presets.
  """
  settings = PRESETS[config.system][choose(preset, PRESETS[config.system], 'preset')].settings
  # Sources longer than every bucket are still searched, at up to four times that length (and in steps of 32).
  longest = max(bucket if isinstance(bucket, int) else bucket[0] for bucket in config.data.get('buckets', (0,)))
  positions = -(-4 * longest // 32) * 32
  if 'attention' in config.model:
    config.model.attention.features = features
  sizes = {'features': features, 'layers': layers, 'positions': positions}
  heads = max(n for n in range(1, max(1, features // 64) + 1) if features % n == 0)
  sizes |= {'depth': depth, 'heads': heads, 'hidden': 4 * features}
  known = flatten_dict(config.to_dict(), sep='.')
  sized = {k: type(known[k])(v.format(**sizes)) for k, v in settings.items()}
  config.update_from_flattened_dict(sized)
  return config
