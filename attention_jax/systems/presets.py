"""Presets: models of papers. A preset sets the structure of a model, and mostly leaves sizes and training to the task.

A preset named after a paper, or after one of the paper's own variants (`luong2015_dot`), is the model of the paper. A
model that changes the equations of the paper has a name that states the change (except `gnmt2016`, whose decoder starts
from a learned map of the encoder's last states; in `gnmt2016_zero_states` and in the paper it starts from zeros):

  deep_tanh: the deep output uses tanh, the GRU applies its reset gate after the product, and the decoder starts from
    a learned map of the last states of both directions.
  mapped: the decoder starts from a learned map of the encoder's last states, which the paper copies.
  birnn: the encoder reads in both directions, and its last states are mapped.
  immediate_reward: each sampled position is rewarded for its word alone.

Training is that of the task, except for auxiliary losses, and for the optimiser and label smoothing of Transformers.
Presets of papers that have another task, or define only a part of the model, mostly have the encoder and decoder of
another preset. docs/papers.md compares each preset with its paper, part by part, and lists the differences without a
name, such as an omitted part.
"""

from collections.abc import Mapping
from typing import NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from attention_jax.data.encoding import MAX_BUCKET_LENGTH
from attention_jax.errors import choose


class Preset(NamedTuple):
  """A row of PRESETS.

  Attributes:
    paper: the paper.
    settings: values of config fields by dotted path. They may contain the sizes that `apply_preset` fills in:
      {features}, size of every layer; {layers}, number of layers of deep recurrent models; {depth}, number of layers of
      GNMT, convolutional models and Transformers; {positions}, length of the longest memory; {heads}, the largest
      divisor of {features} that leaves each head at least 64 features, or 1; {hidden}, width of feed-forward networks,
      4 {features}.
  """

  paper: str
  settings: Mapping[str, str]


NO_SETTINGS: Mapping[str, str] = {}


def _model(encoder: str, decoder: str, score: str = '', alignment: str = 'softmax') -> dict[str, str]:
  attention = {'model.attention.score': score, 'model.attention.alignment': alignment} if score else {}
  return {'model.encoder': encoder, 'model.decoder': decoder, **attention}


def _transformer(features: int | str, layers: int | str, heads: int | str, hidden: int | str, extra: str = '') -> dict:
  """Equal encoder and decoder; embeddings as wide as the layers and tied to the output layer."""
  options = f'features={features}, layers={layers}, heads={heads}, hidden={hidden}{extra}'
  settings = _model(f'transformer({options})', f'transformer({options})', 'scaled_dot')
  attention = {'model.attention.features': str(features), 'model.attention.heads': str(heads)}
  training = {'training.optimizer': 'adam(b2=0.98)', 'training.label_smoothing': '0.1'}
  return settings | attention | training | {'model.embedding': str(features), 'model.output': 'tied'}


def _copying(output: str) -> dict[str, str]:
  """An output layer that copies source words, which needs one vocabulary for both sides."""
  return {'model.output': output, 'data.shared_vocabulary': 'True', 'model.share_embeddings': 'True'}


def _classifier(
  paper: str, classifier: str, encoder: str, pooling: str, extra: Mapping[str, str] = NO_SETTINGS
) -> Preset:
  settings = {'model.classifier': classifier, 'model.encoder': encoder, 'model.pooling': pooling}
  return Preset(paper, settings | {'model.attention.score': 'dot'} | extra)


def _see2017(score: str) -> dict[str, str]:
  return _model(f'birnn(rnn="lstm", {_SIZE})', f'luong(rnn="lstm", {_SIZE})', score) | _copying('pointer_generator')


def _luong2015(variant: str = '', score: str = 'general', alignment: str = 'softmax') -> Preset:
  """Unidirectional encoder, whose last states are copied to the first states of the decoder."""
  decoder = f'luong(rnn="lstm", {_SIZE}, layers={{layers}}, initial="copied")'
  return Preset(f'Luong, Pham & Manning 2015{variant}', _model(_FORWARD_LSTM, decoder, score, alignment))


def _luong2015_birnn(variant: str = '', score: str = 'general', alignment: str = 'softmax') -> Preset:
  """Bidirectional encoder with mapped states. With few sentences, a unidirectional one learns attention late."""
  paper = f'Luong, Pham & Manning 2015{variant}; both directions, mapped states'
  return Preset(paper, _model(_BILSTM, _LUONG, score, alignment))


_SIZE = 'features={features}'
_BIRNN = f'birnn(rnn="gru", {_SIZE})'
_BILSTM = f'birnn(rnn="lstm", {_SIZE}, layers={{layers}})'
_FORWARD_LSTM = f'rnn(rnn="lstm", {_SIZE}, layers={{layers}})'  # can encode the source while it arrives
_BAHDANAU = f'bahdanau(rnn="gru", {_SIZE}, readout={{features}})'
_LUONG = f'luong(rnn="lstm", {_SIZE}, layers={{layers}})'
_STREAMING = f'bahdanau(rnn="lstm", {_SIZE}, readout={{features}}, bridge=False)'
_BACKWARD_LSTM = f'rnn(rnn="lstm", {_SIZE}, layers={{layers}}, direction="backward")'
_LOCATION = 'location(max_positions={positions})'
# Differs from Xu et al. 2015: attention is soft for half of the words, in the paper for half of the pictures. The
# reward of a position is the log-probability of its own word; with the reward of all later words, attention moves to
# the next word and the decoder remembers the current one.
_IMMEDIATE_REWARD = {
  'model.attention.alignment': 'hard(expectation_rate=0.5)',
  'training.auxiliary': 'reinforce(entropy=0.002, discount=0.0)',
}

TRANSLATION: Mapping[str, Preset] = {
  'sutskever2014': Preset(
    'Sutskever, Vinyals & Le 2014',
    _model(_BACKWARD_LSTM, f'plain(rnn="lstm", {_SIZE}, layers={{layers}}, initial="copied")'),
  ),
  # Maps the last states of the encoder to the first of the decoder, where the paper copies them.
  'sutskever2014_mapped': Preset(
    'Sutskever, Vinyals & Le 2014; mapped states',
    _model(_BACKWARD_LSTM, f'plain(rnn="lstm", {_SIZE}, layers={{layers}})'),
  ),
  'cho2014': Preset(
    'Cho et al. 2014, phrase representations',
    _model(f'rnn(rnn="gru_reset_first", {_SIZE})', f'cho({_SIZE}, readout={{features}})'),
  ),
  'bahdanau2015': Preset(
    'Bahdanau, Cho & Bengio 2015, appendix A',
    _model(
      f'birnn(rnn="gru_reset_first", {_SIZE})',
      f'bahdanau(rnn="gru_reset_first", {_SIZE}, readout={{features}}, maxout=True, previous=True, initial="backward")',
      'additive',
    ),
  ),
  # Uses tanh for maxout in the deep output, and applies the GRU's reset gate after the product; its decoder starts from
  # the states of both directions, where the paper maps the backward one alone.
  'bahdanau2015_deep_tanh': Preset(
    'Bahdanau, Cho & Bengio 2015; tanh in the deep output', _model(_BIRNN, _BAHDANAU, 'additive')
  ),
  'luong2015': _luong2015(),
  'luong2015_dot': _luong2015(', dot', 'dot'),
  'luong2015_general': _luong2015(', general'),
  'luong2015_concat': _luong2015(', concat', 'concat'),
  'luong2015_location': _luong2015(', location', _LOCATION),
  'luong2015_local_m': _luong2015(', local-m', alignment='local_m(width=10)'),
  'luong2015_local_p': _luong2015(', local-p', alignment='local_p(width=10)'),
  'luong2015_birnn': _luong2015_birnn(),
  'luong2015_birnn_dot': _luong2015_birnn(', dot', 'dot'),
  'luong2015_birnn_concat': _luong2015_birnn(', concat', 'concat'),
  'luong2015_birnn_location': _luong2015_birnn(', location', _LOCATION),
  'luong2015_birnn_local_m': _luong2015_birnn(', local-m', alignment='local_m(width=10)'),
  'luong2015_birnn_local_p': _luong2015_birnn(', local-p', alignment='local_p(width=10)'),
  # Reads text, where the paper reads speech, with the encoder and decoder of bahdanau2015_deep_tanh.
  'chorowski2015': Preset(
    'Chorowski et al. 2015',
    _model(_BIRNN, _BAHDANAU, 'location_sensitive(channels=10, width=31)', 'smoothed'),
  ),
  # Reads text, where the paper reads pictures; system 'captioning' has a preset of the same name.
  'xu2015_hard_immediate_reward': Preset(
    'Xu et al. 2015, hard; each position rewarded for its own word',
    _model(_BIRNN, f'bahdanau(rnn="lstm", {_SIZE}, readout={{features}})', 'additive') | _IMMEDIATE_REWARD,
  ),
  'tu2016': Preset('Tu et al. 2016, linguistic coverage with fertility', _model(_BIRNN, _BAHDANAU, 'fertility')),
  # The paper has no decoder of its own.
  'martins2016_sparsemax': Preset('Martins & Astudillo 2016', _model(_BIRNN, _BAHDANAU, 'additive', 'sparsemax')),
  'raffel2017': Preset('Raffel et al. 2017', _model(_FORWARD_LSTM, _STREAMING, 'offset_additive', 'monotonic')),
  'chiu2018': Preset('Chiu & Raffel 2018', _model(_FORWARD_LSTM, _STREAMING, 'offset_additive', 'mocha(width=2)')),
  'zhang2018_forward': Preset('Zhang, Ling & Dai 2018', _model(_BILSTM, _LUONG, 'additive', 'forward_agent')),
  'wu2018_hard': Preset(
    'Wu, Shapiro & Cotterell 2018',
    _model(_BILSTM, f'luong(rnn="lstm", {_SIZE}, input_feeding=False)', 'general', 'latent'),
  ),
  # The source has no tags, except those in the data.
  'wu2019_hard_monotonic': Preset(
    'Wu & Cotterell 2019',
    _model(_BILSTM, f'luong(rnn="lstm", {_SIZE}, input_feeding=False)', 'general', 'latent_monotonic'),
  ),
  'gnmt2016': Preset(
    'Wu et al. 2016',
    _model(f'gnmt({_SIZE}, layers={{depth}})', f'gnmt({_SIZE}, layers={{depth}}, current=False)', 'normed_additive'),
  ),
  # Zero first states: attention is the only way from the source to the output.
  'gnmt2016_zero_states': Preset(
    'Wu et al. 2016, no bridge',
    _model(
      f'gnmt({_SIZE}, layers={{depth}})',
      f'gnmt({_SIZE}, layers={{depth}}, current=False, bridge=False)',
      'normed_additive',
    ),
  ),
  # Layers have one width, and there are fewer; see models/convolutional.py for further differences.
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
  # Omits the selective read of the memory.
  'gu2016': Preset('Gu, Lu, Li & Li 2016', _model(_BIRNN, _BAHDANAU, 'additive') | _copying('copynet')),
  # The decoder input and the vocabulary scores use the attentional vector, where the paper feeds the context and has
  # two linear layers.
  'see2017': Preset('See, Liu & Manning 2017', _see2017('additive')),
  # Coverage is trained from the start, where the paper adds it to a trained model.
  'see2017_coverage': Preset(
    'See, Liu & Manning 2017, coverage', _see2017('coverage') | {'training.auxiliary': 'coverage'}
  ),
  # All Transformers apply dropout to embeddings before positions are added, and have separate source embeddings unless
  # the task shares them.
  'transformer2017': Preset(
    'Vaswani et al. 2017, sizes of the task', _transformer('{features}', '{depth}', '{heads}', '{hidden}')
  ),
  'transformer2017_tiny': Preset('Vaswani et al. 2017, sizes of Wu et al. 2021', _transformer(128, 4, 4, 256)),
  'transformer2017_small': Preset('Vaswani et al. 2017, small', _transformer(256, 3, 4, 1024)),
  'transformer2017_base': Preset('Vaswani et al. 2017, base', _transformer(512, 6, 8, 2048)),
  'transformer2017_big': Preset('Vaswani et al. 2017, big', _transformer(1024, 6, 16, 4096)),
  'shaw2018': Preset(
    'Shaw, Uszkoreit & Vaswani 2018',
    _transformer('{features}', '{depth}', '{heads}', '{hidden}', ', position="shaw"'),
  ),
  # The encoder and decoder are those of luong2015_birnn.
  'peters2019_entmax': Preset('Peters, Niculae & Martins 2019', _model(_BILSTM, _LUONG, 'general', 'entmax15')),
}

CLASSIFICATION: Mapping[str, Preset] = {
  'yang2016': _classifier('Yang et al. 2016', 'hierarchical', f'birnn({_SIZE})', 'attention'),
  # Has fewer hops, and no pruned layer.
  'lin2017': _classifier(
    'Lin et al. 2017',
    'flat',
    f'birnn(rnn="lstm", {_SIZE})',
    'attention(hops=8, bias=False)',
    {'training.auxiliary': 'redundancy(weight=0.1)', 'model.hidden': '{features}'},
  ),
  'cheng2016': _classifier(
    'Cheng, Dong & Lapata 2016', 'flat', f'lstmn({_SIZE})', 'mean', {'model.hidden': '{features}'}
  ),
  # Learns its embeddings, and has no attention inside a sentence. The embeddings begin with a scale of 3: with smaller
  # ones every word attends to all words alike, and training does not change that.
  'parikh2016': _classifier('Parikh et al. 2016', 'decomposable(width={features})', 'embedded(scale=3.0)', 'sum'),
}

# All presets learn the image encoder, on a smaller grid, and use tanh in the output layer.
_CAPTIONS = {
  'model.encoder': 'grid(features={features}, layers=1)',
  'model.decoder': 'bahdanau(rnn="lstm", features={features}, readout={features}, gate=True)',
  'model.attention.score': 'additive',
}
CAPTIONING: Mapping[str, Preset] = {
  # The doubly stochastic loss has a weight of 0.001, where the paper has 1.
  'xu2015_soft': Preset(
    'Xu et al. 2015, soft and doubly stochastic',
    _CAPTIONS | {'model.attention.alignment': 'softmax', 'training.auxiliary': 'doubly_stochastic(weight=0.001)'},
  ),
  # As in the paper, the choice between samples and expectation is made once per picture, and entropies are exact. A
  # position is rewarded for its own word and all later ones, where the paper has the whole caption.
  'xu2015_hard': Preset(
    'Xu et al. 2015, hard, section 4.1',
    _CAPTIONS
    | {
      'model.attention.alignment': 'hard_once(expectation_rate=0.5)',
      'training.auxiliary': 'reinforce(entropy=0.002, discount=1.0)',
    },
  ),
  'xu2015_hard_immediate_reward': Preset(
    'Xu et al. 2015, hard; each position rewarded for its own word', _CAPTIONS | _IMMEDIATE_REWARD
  ),
}

GLIMPSING: Mapping[str, Preset] = {
  'mnih2014': Preset('Mnih et al. 2014', {'model.network': 'glimpses', 'model.features': '{features}'}),
  # G_image has one hidden layer, and the first location is random.
  'ba2015': Preset('Ba, Mnih & Kavukcuoglu 2015', {'model.network': 'deep_glimpses', 'model.features': '{features}'}),
  # Nothing is sampled, so that one path is enough.
  'jaderberg2015': Preset(
    'Jaderberg et al. 2015, affine',
    {
      'model.network': 'spatial_transformer',
      'model.features': '{features}',
      'model.samples': '1',
      'evaluation.samples': '1',
    },
  ),
}

RECALL: Mapping[str, Preset] = {
  'graves2014': Preset('Graves, Wayne & Danihelka 2014', {'model.cell': 'turing(features={features})'})
}

# By system.
PRESETS: Mapping[str, Mapping[str, Preset]] = {
  'captioning': CAPTIONING,
  'classification': CLASSIFICATION,
  'glimpsing': GLIMPSING,
  'recall': RECALL,
  'translation': TRANSLATION,
}


def apply_preset(config: ConfigDict, preset: str, *, features: int, layers: int = 1, depth: int = 3) -> ConfigDict:
  """Applies a preset to a config. Call it after the task has set its own fields.

  Args:
    config: the config, which is changed in place.
    preset: a name of PRESETS[config.system].
    features, layers, depth: sizes of the model, see Preset.

  Returns:
    `config`.

  Raises:
    UserError: for an unknown preset, or one of another system.
  """
  settings = PRESETS[config.system][choose(preset, PRESETS[config.system], 'preset')].settings
  if 'attention' in config.model:
    config.model.attention.features = features
  sizes = {
    'features': features,
    'layers': layers,
    'positions': _max_positions(config),
    'depth': depth,
    'heads': max(n for n in range(1, max(1, features // 64) + 1) if features % n == 0),
    'hidden': 4 * features,
  }
  defaults = flatten_dict(config.to_dict(), sep='.')
  values = {field: type(defaults[field])(value.format(**sizes)) for field, value in settings.items()}
  config.update_from_flattened_dict(values)
  return config


def _max_positions(config: ConfigDict) -> int:
  """Length of the longest memory, which limits the sources of a search.

  It is four times the longest source of the buckets, or of those that may be chosen from the data, rounded up to a
  multiple of 32.
  """
  buckets = config.data.get('buckets', (0,)) or (MAX_BUCKET_LENGTH,)
  longest = max(bucket if isinstance(bucket, int) else bucket[0] for bucket in buckets)
  return -(-4 * longest // 32) * 32
