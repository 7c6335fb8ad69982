"""First states of a recurrent decoder, as functions of its layers and the encoded source.

The layers are one stack, or several, the lowest first; the result has the states of each stack.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

from attention_jax.errors import UserError
from attention_jax.models.encoded import Encoded, FinalStates
from attention_jax.modules.recurrent import RECURRENCES, RecurrentStack, State


def learned(stacks: Sequence[RecurrentStack], encoded: Encoded) -> list[tuple[State, ...]]:
  """A learned map of the last states of all layers and directions of the encoder, or of another summary.

  Zeros if the stacks have no bridge.
  """
  return [stack.start(encoded.final) for stack in stacks]


def backward(stacks: Sequence[RecurrentStack], encoded: Encoded) -> list[tuple[State, ...]]:
  """s_0 = tanh(W h_1), h_1 the output of the highest backward layer at the first token. Bahdanau et al. 2015, A.2.2.

  Every layer of the decoder has its own W; the cell of an LSTM is V h_1.

  Raises:
    UserError: if no layer of the encoder reads backward.
  """
  states = encoded.states or FinalStates()
  if not states.backward:
    raise UserError(
      f"initial='backward' needs an encoder that reads backward, such as birnn; got {states.describe_encoder()}"
    )
  return [stack.start(states.backward[-1][0]) for stack in stacks]


def copied(stacks: Sequence[RecurrentStack], encoded: Encoded) -> list[tuple[State, ...]]:
  """The last states of the encoder, layer by layer. Sutskever et al. 2014; Luong et al. 2015, section 2.

  Raises:
    UserError: unless the encoder has one direction, with the layers, arrays per state and features of the decoder.
      Recurrences with equally many arrays, such as 'simple' and 'gru', are not distinguished.
  """
  states = encoded.states or FinalStates()
  layers = states.forward or states.backward
  lowest = stacks[0]
  num_layers = sum(stack.layers for stack in stacks)
  expected = [lowest.features] * RECURRENCES[lowest.kind].states
  actual = [[array.shape[-1] for array in state] for state in layers]
  if (states.forward and states.backward) or actual != [expected] * num_layers:
    raise UserError(
      "initial='copied' needs an encoder with one direction and the recurrence, layers and features of the decoder, "
      f'{lowest.kind}, {num_layers} and {lowest.features}; got {states.describe_encoder()}, '
      f'with states of {actual} features'
    )
  remaining = iter(layers)
  return [tuple(itertools.islice(remaining, stack.layers)) for stack in stacks]


INITIAL_STATES: Mapping[str, Callable[[Sequence[RecurrentStack], Encoded], list[tuple[State, ...]]]] = {
  'learned': learned,
  'backward': backward,
  'copied': copied,
}
