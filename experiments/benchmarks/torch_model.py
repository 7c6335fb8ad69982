"""Recurrent encoder-decoders in plain PyTorch, with what a careful user takes out of their loops taken out."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PAD, BOS, EOS = 0, 1, 2


def _gates(own) -> dict[str, np.ndarray]:
  """Our GRU as PyTorch has it: the bias of the product with the state is that of the new state alone."""
  features = own['kernel'].shape[0]
  inner = np.concatenate([np.zeros(2 * features, np.float32), np.asarray(own['bias'])])
  return {
    'weight_ih': np.asarray(own['inputs']['kernel']).T,
    'weight_hh': np.asarray(own['kernel']).T,
    'bias_ih': np.asarray(own['inputs']['bias']),
    'bias_hh': inner,
  }


class Recurrent(nn.Module):
  """Embeddings, a bidirectional encoder, keys, a bridge to the decoder's first state, and the output layer."""

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
    lengths = (source != PAD).sum(1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(
      self.drop(self.source(source)), lengths, batch_first=True, enforce_sorted=False
    )
    outputs, last = self.encoder(packed)
    memory, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
    memory = self.drop(memory)
    return memory, self.key(memory), source == PAD, torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))


class Luong(Recurrent):
  """A GRU over the whole target, then general attention of all steps at once: nothing is fed back."""

  def __init__(self, source_size, target_size, embedding, features, dropout):
    super().__init__(source_size, target_size, embedding, features, dropout)
    self.decoder = nn.GRU(embedding, features, batch_first=True)
    self.attentional = nn.Linear(2 * features, features, bias=False)

  def loss(self, source, target):
    memory, key, padding, state = self.encode(source)
    entering = F.pad(target[:, :-1], (1, 0), value=BOS)
    states, _ = self.decoder(self.drop(self.target(entering)), state.unsqueeze(0))
    scores = torch.bmm(states, key.transpose(1, 2)).masked_fill(padding.unsqueeze(1), float('-inf'))
    contexts = torch.bmm(torch.softmax(scores, -1), memory)
    real = target != PAD
    joined = torch.cat((contexts[real], states[real]), -1)
    return F.cross_entropy(self.output(self.drop(torch.tanh(self.attentional(joined)))), target[real])


class Bahdanau(Recurrent):
  def __init__(self, source_size, target_size, embedding, features, dropout):
    super().__init__(source_size, target_size, embedding, features, dropout)
    self.query = nn.Linear(features, features, bias=False)
    self.v = nn.Parameter(torch.randn(features) * features**-0.5)
    self.embedded = nn.Linear(embedding, 3 * features)
    self.context = nn.Linear(features, 3 * features, bias=False)
    self.hidden = nn.Linear(features, 3 * features)
    self.deep = nn.Linear(2 * features + embedding, features)

  def recur(self, state, gates, memory, key, padding):
    scores = torch.tanh(key + self.query(state).unsqueeze(1)) @ self.v
    weights = torch.softmax(scores.masked_fill(padding, float('-inf')), -1)
    context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
    reset_x, update_x, new_x = (gates + self.context(context)).chunk(3, -1)
    reset_h, update_h, new_h = self.hidden(state).chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + torch.sigmoid(update_x + update_h) * (state - new), context

  def loss(self, source, target):
    memory, key, padding, state = self.encode(source)
    entering = F.pad(target[:, :-1], (1, 0), value=BOS)
    embedded = self.drop(self.target(entering))
    states, contexts = [], []
    for gates in self.embedded(embedded).unbind(1):
      state, context = self.recur(state, gates, memory, key, padding)
      states.append(state)
      contexts.append(context)
    real = target != PAD
    parts = torch.stack(states, 1)[real], torch.stack(contexts, 1)[real], embedded[real]
    return F.cross_entropy(self.output(self.drop(torch.tanh(self.deep(torch.cat(parts, -1))))), target[real])

  def translate(self, source, beams, longest, alpha=0.6):
    """The ids of each source's best hypothesis; the search ends when all beams of all sources have ended."""
    batch, rows = source.shape[0], torch.arange(source.shape[0]).unsqueeze(1)
    memory, key, padding, state = (x.repeat_interleave(beams, 0) for x in self.encode(source))
    token, done = torch.full((batch * beams,), BOS), torch.zeros(batch, beams, dtype=torch.bool)
    totals, lengths = torch.full((batch, beams), float('-inf')), torch.zeros(batch, beams)
    totals[:, 0] = 0.0
    history = torch.zeros(batch, beams, 0, dtype=torch.long)
    for _ in range(longest):
      embedded = self.target(token)
      state, context = self.recur(state, self.embedded(embedded), memory, key, padding)
      logits = self.output(torch.tanh(self.deep(torch.cat([state, context, embedded], -1))))
      if beams == 1:  # its probability decides nothing
        parents = torch.zeros(batch, 1, dtype=torch.long)
        tokens = torch.where(done, PAD, logits.argmax(-1, keepdim=True))
      else:
        steps = torch.log_softmax(logits, -1).view(batch, beams, -1)
        nothing = torch.full_like(steps, float('-inf'))
        nothing[..., PAD] = 0.0  # what has ended goes on with padding, at no cost
        sums = totals.unsqueeze(-1) + torch.where(done.unsqueeze(-1), nothing, steps)
        _, chosen = sums.view(batch, -1).topk(beams)
        parents, tokens = chosen // logits.shape[-1], chosen % logits.shape[-1]
        totals = sums.view(batch, -1).gather(1, chosen)
        lengths, done = lengths.gather(1, parents), done.gather(1, parents)
        state = state[(rows * beams + parents).view(-1)]
      lengths = torch.where(done, lengths, lengths + 1)
      done = done | (tokens == EOS)
      token = tokens.view(-1)
      history = torch.cat([history.gather(1, parents.unsqueeze(-1).expand_as(history)), tokens.unsqueeze(-1)], -1)
      if done.all():
        break
    best = (totals / ((5 + lengths) / 6) ** alpha).argmax(1) if beams > 1 else torch.zeros(batch, dtype=torch.long)
    found = history[rows[:, 0], best].tolist()
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in found]

  def load_jax_params(self, params):
    """Puts the parameters of our bahdanau2015 here."""
    tensor = lambda x: torch.tensor(np.asarray(x))
    cell, encoder = params['decoder']['cell'], params['encoder']
    layers = {'encoder.{}_l0': 0, 'encoder.{}_l0_reverse': 1}
    state = {}
    for name, i in layers.items():
      own = encoder[f'RecurrentLayer_{i}']['RecurrentCell_0']
      state |= {name.format(part): tensor(x) for part, x in _gates(own).items()}
    step = _gates(cell['stack']['cells_0'])
    state |= {'embedded.weight': tensor(step['weight_ih']), 'embedded.bias': tensor(step['bias_ih'])}
    state |= {'hidden.weight': tensor(step['weight_hh']), 'hidden.bias': tensor(step['bias_hh'])}
    linear = {
      'bridge': cell['stack']['bridges_0_0'],
      'deep': cell['deep'],
      'output': params['output'],
      'context': cell['context_gates'],
    }
    for name, own in linear.items():
      state[f'{name}.weight'] = tensor(own['kernel']).T
      if 'bias' in own:
        state[f'{name}.bias'] = tensor(own['bias'])
    attention = cell['attention']
    state |= {f'{side}.weight': tensor(attention[f'{side}_kernel']['kernel'][0]).T for side in ('query', 'key')}
    state['v'] = tensor(attention['score_params']['v'][0])
    state['source.weight'] = tensor(encoder['embedding']['table']['embedding'])
    state['target.weight'] = tensor(params['embedding']['table']['embedding'])
    self.load_state_dict(state)
