"""Recurrent encoder-decoders in plain PyTorch; whatever does not depend on the recurrence is outside of its loops."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PAD, BOS, EOS = 0, 1, 2


def _gru_weights(params) -> dict[str, np.ndarray]:
  """Converts the parameters of our GRU; in its product with the state only the candidate state has a bias."""
  features = params['kernel'].shape[0]
  state_bias = np.concatenate([np.zeros(2 * features, np.float32), np.asarray(params['bias'])])
  return {
    'weight_ih': np.asarray(params['inputs']['kernel']).T,
    'weight_hh': np.asarray(params['kernel']).T,
    'bias_ih': np.asarray(params['inputs']['bias']),
    'bias_hh': state_bias,
  }


class Recurrent(nn.Module):
  """Base class: embeddings, bidirectional encoder, keys, bridge to the initial decoder state, output layer."""

  def __init__(self, source_size, target_size, embedding, features, dropout):
    super().__init__()
    self.source = nn.Embedding(source_size, embedding)
    self.target = nn.Embedding(target_size, embedding)
    self.encoder = nn.GRU(embedding, features // 2, bidirectional=True, batch_first=True)
    self.bridge = nn.Linear(features, features)
    self.key = nn.Linear(features, features, bias=False)
    self.output = nn.Linear(features, target_size)
    self.drop = nn.Dropout(dropout)

  def encode(self, source):
    """Returns memory [B, S, D], keys [B, S, D], padding [B, S] (True = padding), and the initial state [B, D]."""
    lengths = (source != PAD).sum(1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(
      self.drop(self.source(source)), lengths, batch_first=True, enforce_sorted=False
    )
    outputs, last = self.encoder(packed)
    memory, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
    memory = self.drop(memory)
    state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))
    return memory, self.key(memory), source == PAD, state


class Luong(Recurrent):
  """A GRU over the whole target, then general attention of all steps in parallel: no input feeding."""

  def __init__(self, source_size, target_size, embedding, features, dropout):
    super().__init__(source_size, target_size, embedding, features, dropout)
    self.decoder = nn.GRU(embedding, features, batch_first=True)
    self.attentional = nn.Linear(2 * features, features, bias=False)

  def loss(self, source, target):
    """Returns the mean cross-entropy of the target tokens; ids [B, S] and [B, T], 0 for padding."""
    memory, key, padding, state = self.encode(source)
    inputs = F.pad(target[:, :-1], (1, 0), value=BOS)
    states, _ = self.decoder(self.drop(self.target(inputs)), state.unsqueeze(0))
    scores = torch.bmm(states, key.transpose(1, 2)).masked_fill(padding.unsqueeze(1), float('-inf'))
    contexts = torch.bmm(torch.softmax(scores, -1), memory)
    mask = target != PAD
    joined = torch.cat((contexts[mask], states[mask]), -1)
    features = self.drop(torch.tanh(self.attentional(joined)))
    return F.cross_entropy(self.output(features), target[mask])


class Bahdanau(Recurrent):
  """A GRU with additive attention at every step, and a deep output layer."""

  def __init__(self, source_size, target_size, embedding, features, dropout):
    super().__init__(source_size, target_size, embedding, features, dropout)
    self.query = nn.Linear(features, features, bias=False)
    self.v = nn.Parameter(torch.randn(features) * features**-0.5)
    self.token_gates = nn.Linear(embedding, 3 * features)
    self.context_gates = nn.Linear(features, 3 * features, bias=False)
    self.state_gates = nn.Linear(features, 3 * features)
    self.deep = nn.Linear(2 * features + embedding, features)

  def recur(self, state, gates, memory, key, padding):
    """Returns the next state [B, D] and the context [B, D].

    Args:
      state: [B, D].
      gates: the contribution of the token to the reset gate, the update gate and the candidate state [B, 3 D].
      memory, key, padding: as `encode` returns them.
    """
    scores = torch.tanh(key + self.query(state).unsqueeze(1)) @ self.v
    weights = torch.softmax(scores.masked_fill(padding, float('-inf')), -1)
    context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
    reset_x, update_x, new_x = (gates + self.context_gates(context)).chunk(3, -1)
    reset_h, update_h, new_h = self.state_gates(state).chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + torch.sigmoid(update_x + update_h) * (state - new), context

  def loss(self, source, target):
    """Returns the mean cross-entropy of the target tokens; ids [B, S] and [B, T], 0 for padding."""
    memory, key, padding, state = self.encode(source)
    inputs = F.pad(target[:, :-1], (1, 0), value=BOS)
    embedded = self.drop(self.target(inputs))
    states = []
    contexts = []
    for gates in self.token_gates(embedded).unbind(1):
      state, context = self.recur(state, gates, memory, key, padding)
      states.append(state)
      contexts.append(context)
    mask = target != PAD
    joined = torch.cat((torch.stack(states, 1)[mask], torch.stack(contexts, 1)[mask], embedded[mask]), -1)
    features = self.drop(torch.tanh(self.deep(joined)))
    return F.cross_entropy(self.output(features), target[mask])

  def translate(self, source, beams, longest, alpha=0.6):
    """Beam search; it ends when all beams of all sources have ended, or after `longest` steps.

    Args:
      source: ids [B, S].
      beams: beam size, 1 for greedy search.
      longest: maximum number of tokens of an output, EOS included.
      alpha: exponent of the length penalty.

    Returns:
      The ids of the best hypothesis of each source, without EOS.
    """
    batch = source.shape[0]
    rows = torch.arange(batch).unsqueeze(1)
    memory, key, padding, state = (x.repeat_interleave(beams, 0) for x in self.encode(source))
    token = torch.full((batch * beams,), BOS)
    done = torch.zeros(batch, beams, dtype=torch.bool)
    lengths = torch.zeros(batch, beams)
    totals = torch.full((batch, beams), float('-inf'))
    totals[:, 0] = 0.0
    history = torch.zeros(batch, beams, 0, dtype=torch.long)
    for _ in range(longest):
      embedded = self.target(token)
      state, context = self.recur(state, self.token_gates(embedded), memory, key, padding)
      logits = self.output(torch.tanh(self.deep(torch.cat([state, context, embedded], -1))))
      if beams == 1:  # its log-probability is not needed
        parents = torch.zeros(batch, 1, dtype=torch.long)
        tokens = torch.where(done, PAD, logits.argmax(-1, keepdim=True))
      else:
        log_probs = torch.log_softmax(logits, -1).view(batch, beams, -1)
        only_padding = torch.full_like(log_probs, float('-inf'))
        only_padding[..., PAD] = 0.0  # a finished hypothesis continues with padding at log-probability 0
        sums = totals.unsqueeze(-1) + torch.where(done.unsqueeze(-1), only_padding, log_probs)
        _, best = sums.view(batch, -1).topk(beams)
        parents = best // logits.shape[-1]
        tokens = best % logits.shape[-1]
        totals = sums.view(batch, -1).gather(1, best)
        lengths = lengths.gather(1, parents)
        done = done.gather(1, parents)
        state = state[(rows * beams + parents).view(-1)]
      lengths = torch.where(done, lengths, lengths + 1)
      done = done | (tokens == EOS)
      token = tokens.view(-1)
      history = torch.cat([history.gather(1, parents.unsqueeze(-1).expand_as(history)), tokens.unsqueeze(-1)], -1)
      if done.all():
        break
    # With one beam totals stay 0, so that it is the best.
    best_beam = (totals / ((5 + lengths) / 6) ** alpha).argmax(1)
    hypotheses = history[rows[:, 0], best_beam].tolist()
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in hypotheses]

  def load_jax_params(self, params):
    """Loads the parameters of our bahdanau2015_deep_tanh."""
    cell = params['decoder']['cell']
    encoder = params['encoder']
    attention = cell['attention']
    state = {}
    for i, direction in enumerate(('', '_reverse')):
      weights = _gru_weights(encoder[f'RecurrentLayer_{i}']['RecurrentCell_0'])
      state |= {f'encoder.{name}_l0{direction}': _to_tensor(weight) for name, weight in weights.items()}
    weights = _gru_weights(cell['stack']['cells_0'])
    state['token_gates.weight'] = _to_tensor(weights['weight_ih'])
    state['token_gates.bias'] = _to_tensor(weights['bias_ih'])
    state['state_gates.weight'] = _to_tensor(weights['weight_hh'])
    state['state_gates.bias'] = _to_tensor(weights['bias_hh'])
    linear = {
      'bridge': cell['stack']['bridges_0_0'],
      'deep': cell['deep'],
      'output': params['output'],
      'context_gates': cell['context_gates'],
    }
    for name, layer in linear.items():
      state[f'{name}.weight'] = _to_tensor(layer['kernel']).T
      if 'bias' in layer:
        state[f'{name}.bias'] = _to_tensor(layer['bias'])
    for name in ('query', 'key'):
      state[f'{name}.weight'] = _to_tensor(attention[f'{name}_kernel']['kernel'][0]).T
    state['v'] = _to_tensor(attention['score_params']['v'][0])
    state['source.weight'] = _to_tensor(encoder['embedding']['table']['embedding'])
    state['target.weight'] = _to_tensor(params['embedding']['table']['embedding'])
    self.load_state_dict(state)


def _to_tensor(array) -> torch.Tensor:
  return torch.tensor(np.asarray(array))
