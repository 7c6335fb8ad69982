"""The decoder of Cho et al. 2014, which reads one fixed vector of the source at every step."""

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.models.cells import Plain, max_of_pairs
from attention_jax.models.encoded import Encoded, FinalStates
from attention_jax.models.steps import CellCarry, DecoderOutput, FixedMemory, StepTrace
from attention_jax.modules.linear import ConcatDense, Dense
from attention_jax.specs import Size

UNSUPPORTED_OPTIONS = (
  'bridge',
  'feed_context',
  'initial',
  'layers',
  'residual',
  'rnn',
)  # options of `plain` that `cho` does not have


class Cho(Plain):
  """RNN encoder-decoder with the vector c = tanh(V h_N) in every gate and in the output. Cho et al. 2014, appendix A.1.

  h_0 = tanh(V' c); r = σ(W_r y + U_r h + C_r c); z = σ(W_z y + U_z h + C_z c); h' = tanh(W y + r * (U h + C c));
  h_t = z * h_{t-1} + (1 - z) * h'; the features for the output layer are maxout(O_h h_t + O_y y + O_c c), where h_N is
  the last output of the highest forward layer of the encoder and y the embedding of the previous token.

  Of the other attributes, those of Plain, only `features` and `dtype` are used; the recurrence has no dropout.

  Attributes:
    rnn: always 'gru': the equations above are a GRU with C c added to each product U h.
    readout: width of the maxout layer.
  """

  rnn: str = 'gru'
  readout: Size = 512

  @property
  def width(self) -> int:
    return self.readout

  def setup(self):
    for name in UNSUPPORTED_OPTIONS:
      value = getattr(self, name)
      if value != getattr(type(self), name):
        raise UserError(
          f'cho: option {name} is fixed by the paper, got {value!r}; expected one of the options: features, readout'
        )
    gates = 3 * self.features
    self.summary = Dense(self.features, dtype=self.dtype)
    self.first = Dense(self.features, dtype=self.dtype)
    self.inputs = Dense(gates, dtype=self.dtype)
    self.recurrent = Dense(gates, use_bias=False, dtype=self.dtype)
    self.context_gates = Dense(gates, use_bias=False, dtype=self.dtype)
    self.deep = ConcatDense(2 * self.readout, use_bias=True, dtype=self.dtype)

  def remember(self, encoded: Encoded) -> FixedMemory:
    states = encoded.states or FinalStates()
    if not states.forward:
      raise UserError(f'cho: the encoder must read forward, such as rnn; got {states.describe_encoder()}')
    return FixedMemory(jnp.tanh(self.summary(states.forward[-1][0])), encoded.mask)

  def start(self, encoded: Encoded, memory: FixedMemory) -> CellCarry:
    return CellCarry(jnp.tanh(self.first(memory.vector)), (), self.context_gates(memory.vector))

  def project_inputs(self, embeddings: jax.Array) -> jax.Array:
    return self.inputs(embeddings)

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: FixedMemory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    h = carry.states
    x_reset, x_update, x_new = jnp.split(inputs, 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(self.recurrent(h) + carry.feed, 3, axis=-1)
    reset = jax.nn.sigmoid(x_reset + h_reset)
    update = jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + reset * h_new)
    h = (update * h + (1 - update) * new).astype(h.dtype)
    return carry._replace(states=h), StepTrace(h)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: FixedMemory, deterministic: bool
  ) -> DecoderOutput:
    output = super().compute_outputs(traces, embeddings, memory, deterministic)
    return output._replace(features=max_of_pairs(self.deep(traces.state, embeddings, output.context)))
