# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention, from one sum to a translation model
#
# Every formula below is also code that runs, and numbers or plots show most of the claims. The functions are those that
# the models of `attention_jax` train with. Running all cells takes a few minutes on a CPU.
#
# `docs/attention_basics.py` is the same lesson as a script; the notebook is made from it:
# `cd docs && jupytext --to ipynb --execute attention_basics.py`.
#
# Sections: the bottleneck (1), five steps (2), an example with numbers (3), score functions (4), what popular formulas
# hide (5), global and local (6), soft and hard (7), Bahdanau and Luong (8), self-attention and the Transformer (9),
# pictures (10), documents (11), GNMT (12), reading a weight matrix (13), exercises (14).
#
# Notation, as everywhere in this package: a **query** `[D]` attends to a **memory**: keys `[S, D]` and values
# `[S, V]`.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import attention_jax as aj
from attention_jax import analysis
from attention_jax.analysis import interventions
from attention_jax.functional.edits import replace_weights
from attention_jax.models.encoder_decoder import ModelConfig, build

STEPS = int(os.environ.get('LESSON_STEPS', '500'))  # updates of each model that is trained here
IS_TRAINED = STEPS >= 400  # claims about trained models are checked only then


def show_weights(axes, weights, rows, columns, title):
  """Draws weights [T, S] from 0 (white) to 1 (dark)."""
  axes.imshow(np.asarray(weights), 'Blues', vmin=0, vmax=1, aspect='auto')
  axes.set_xticks(range(len(columns)), columns)
  axes.set_yticks(range(len(rows)), rows)
  axes.set_title(title, fontsize=9)


# %% [markdown]
# ## 1. The bottleneck
#
# An encoder-decoder without attention passes the source on as **one vector of fixed size** (Sutskever et al. 2014;
# Cho et al. 2014). The longer the source, the more this vector has to hold. With attention, the decoder reads all
# states of the encoder at each step (Bahdanau et al. 2015), and the memory grows with the source.
#
# To see it, two models learn to copy sequences of 2 to 16 symbols. Encoder, width and training are the same; only the
# second one attends.

# %%
SYMBOLS, FIRST_ID, LONGEST = 10, 4, 16  # ids below 4 are special tokens


def sample_batch(rng, rows=64):
  """Sequences of random symbols [B, S], and their mask."""
  lengths = rng.integers(2, LONGEST + 1, rows)
  return rng.integers(FIRST_ID, FIRST_ID + SYMBOLS, (rows, LONGEST)), np.arange(LONGEST) < lengths[:, None]


def train_copier(decoder, alignment='softmax'):
  """Trains a model that copies its source; returns the model and its parameters."""
  attention = aj.Attention('additive', alignment, features=32)
  config = ModelConfig(encoder='birnn(features=64)', decoder=decoder, embedding=16, attention=attention)
  model = build(config, FIRST_ID + SYMBOLS, FIRST_ID + SYMBOLS)
  rng = np.random.default_rng(0)
  ids, mask = sample_batch(rng)
  params = jax.jit(model.init)(jax.random.key(0), ids, mask, ids)['params']
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(4e-3, max(STEPS, 1))))

  def loss(params, ids, mask):
    logits = model.apply({'params': params}, ids, mask, ids).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    return jnp.where(mask, losses, 0.0).sum() / mask.sum()

  @jax.jit
  def update(params, state, ids, mask):
    gradient = jax.grad(loss)(params, ids, mask)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for _ in range(STEPS):
    params, state = update(params, state, *sample_batch(rng))
  return model, params


def accuracy_by_length(model, params):
  """Share of correct symbols for each length of the source, of newly drawn sequences (short ones may repeat)."""
  ids, mask = sample_batch(np.random.default_rng(1), 512)
  outputs = jax.jit(model.apply)({'params': params}, ids, mask, ids)
  correct = np.asarray(outputs.logits.argmax(-1) == ids)
  lengths = mask.sum(1)
  return {length: correct[lengths == length][:, :length].mean() for length in range(2, LONGEST + 1)}


plain = train_copier('plain(rnn="gru", features=64)')
attentive = train_copier('bahdanau(features=64, readout=32)')
accuracy = {'one vector': accuracy_by_length(*plain), 'attention': accuracy_by_length(*attentive)}

figure, axes = plt.subplots(figsize=(5, 2.6))
for name, by_length in accuracy.items():
  axes.plot(list(by_length), list(by_length.values()), marker='.', label=name)
axes.set(xlabel='symbols in the source', ylabel='share copied correctly', ylim=(0, 1.05))
axes.legend()
# %%
if IS_TRAINED:
  assert accuracy['attention'][LONGEST] > 0.95
  assert accuracy['one vector'][LONGEST] < accuracy['one vector'][3] - 0.1

# %% [markdown]
# With a wider vector or longer training, the share of correct symbols falls at a greater length, but it still falls.
# What attention adds is not a better vector, but as many vectors as there are source positions.

# %% [markdown]
# ## 2. The five steps of general attention
#
# Everything called attention is these five steps. What differs from paper to paper is the function of step 1, the
# function of step 2, where the query comes from, and where the result goes.

# %%
query = jnp.array([0.5, -1.0, 2.0])  # [D]
keys = jax.random.normal(jax.random.key(0), (4, 3))  # [S, D]
values = jax.random.normal(jax.random.key(1), (4, 2))  # [S, V]
mask = jnp.array([True, True, True, False])  # the last position is padding

scores = aj.scores.dot(query, keys)  # 1. compare the query with every key: [S]
weights = aj.alignments.softmax(scores, mask)  # 2. normalise the scores: [S], 0 where masked, sum 1
weighted = weights[:, None] * values  # 3. multiply every value by its weight: [S, V]
context = weighted.sum(0)  # 4. add them up: [V]
output = jnp.tanh(jnp.concatenate([context, query]))  # 5. use the context together with the query

print('scores ', scores)
print('weights', weights)
print('context', context)

# %% [markdown]
# `aj.attend` does steps 1 to 4 for all queries of a batch, with any score and any alignment:

# %%
attended = aj.attend(query[None], keys, values, mask, score='dot', alignment='softmax')
np.testing.assert_allclose(attended.context[0], context, rtol=1e-6)
np.testing.assert_allclose(attended.weights[0], weights, rtol=1e-6)

# %% [markdown]
# ## 3. An example with numbers
#
# A decoder state `[10, 5, 10]` attends to four encoder states by their dot products. With numbers this large, softmax
# is almost a maximum: the second state gets all the weight, and the context **is** the second state.

# %%
decoder_state = jnp.array([10.0, 5.0, 10.0])
encoder_states = jnp.array([[0, 1, 1], [5, 0, 1], [1, 1, 0], [0, 5, 1]], jnp.float32)

scores = [sum(float(q) * float(k) for q, k in zip(decoder_state, state, strict=True)) for state in encoder_states]
assert scores == [15, 60, 15, 35]
weights = np.exp(np.array(scores) - max(scores))
weights /= weights.sum()
context = sum(w * np.asarray(state) for w, state in zip(weights, encoder_states, strict=True))
print('weights', weights.round(4), 'context', context.round(4))

attended = aj.attend(decoder_state[None], encoder_states, encoder_states, score='dot')
np.testing.assert_allclose(attended.weights[0], [0, 1, 0, 0], atol=1e-6)
np.testing.assert_allclose(attended.context[0], [5, 0, 1], atol=1e-6)

# %% [markdown]
# Two more examples that are often shown in lectures: the softmax of `[12, -1, 0.4, 5, 2]`, and the query
# `[5, 1, 20]` with four annotations (encoder states), whose scores are so large that their exponentials overflow.
# Softmax is the same when a constant is subtracted from all scores, so programs subtract the largest one.

# %%
everywhere = jnp.ones(5, bool)
print('softmax', aj.alignments.softmax(jnp.array([12.0, -1.0, 0.4, 5.0, 2.0]), everywhere))

annotations = jnp.array([[3.0, 12.0, 45.0], [59.0, 2.0, 5.0], [1.0, 43.0, 5.0], [4.0, 3.0, 45.3]])
scores = aj.scores.dot(jnp.array([5.0, 1.0, 20.0]), annotations)
np.testing.assert_allclose(scores, [927, 397, 148, 929], rtol=1e-5)
with np.errstate(over='ignore'):
  assert np.isinf(np.exp(np.float32(scores[0])))
weights = aj.alignments.softmax(scores, everywhere[:4])
np.testing.assert_allclose(weights, [1 / (1 + np.exp(2)), 0, 0, 1 / (1 + np.exp(-2))], atol=1e-3)
print('weights', weights, 'context', weights @ annotations)

# %% [markdown]
# Weights of exactly 0 and 1 have a price: their **gradient** is 0 as well, and the model does not learn where to
# attend. A temperature τ, which divides the scores before softmax, keeps the gradient. This is why scores are scaled
# (section 4).

# %%
example_scores = jnp.array([15.0, 60.0, 15.0, 35.0])
temperatures = np.geomspace(1, 200, 60)


def weights_at(temperature):
  return aj.alignments.softmax(example_scores, jnp.ones(4, bool), temperature=jnp.float32(temperature))


def slope_at(temperature):
  def softmax(scores):
    return aj.alignments.softmax(scores, jnp.ones(4, bool), temperature=jnp.float32(temperature))

  return jnp.abs(jax.jacobian(softmax)(example_scores)).max()


figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout='constrained')
axes[0].semilogx(temperatures, jax.vmap(weights_at)(temperatures), label=['15', '60', '15 (again)', '35'])
axes[0].set(xlabel='temperature', ylabel='weight')
axes[0].legend(title='score', fontsize=7)
axes[1].semilogx(temperatures, jax.vmap(slope_at)(temperatures))
axes[1].set(xlabel='temperature', ylabel='largest slope of a weight')
assert slope_at(1.0) < 1e-9 < 1e-3 < slope_at(20.0)

# %% [markdown]
# ## 4. Score functions
#
# | name | e = f(query q, key k) | paper |
# | --- | --- | --- |
# | `dot` | q · k | Luong et al. 2015 |
# | `scaled_dot` | q · k / √D | Vaswani et al. 2017 |
# | `general` | kᵀ W q | Luong et al. 2015 |
# | `additive` | v · tanh(W q + U k) | Bahdanau et al. 2015 |
# | `concat` | v · tanh(W [q; k]) | Luong et al. 2015 |
# | `cosine` | β cos(q, k) | Graves et al. 2014 |
# | `location` | (W q)ₛ, without any key | Luong et al. 2015 |
#
# `list(aj.SCORES)` has all of them. Here are the weights of each for the same queries and keys, with parameters that
# were not trained.

# %%
D, T, S = 8, 6, 9
queries = jax.random.normal(jax.random.key(2), (T, D))
keys = jax.random.normal(jax.random.key(3), (S, D))
names = list(aj.SCORES)
figure, all_axes = plt.subplots(3, 5, figsize=(9, 4.5), layout='constrained')
for axes in all_axes.flat:
  axes.axis('off')
for name, axes in zip(names, all_axes.flat, strict=False):
  params = aj.init_params(jax.random.key(4), score=name, query=D, key=D, features=16)
  count = sum(x.size for x in jax.tree.leaves(params))
  attend = jax.jit(lambda params, name=name: aj.attend(queries, keys, keys, score=name, params=params).weights)
  show_weights(axes, attend(params), range(T), range(S), f'{name}\n{count} parameters')

# %% [markdown]
# **Why √D?** The dot product of two vectors of independent entries with variance 1 has variance D. Without the
# division, wide vectors have large scores, and softmax is almost a maximum, with the vanishing gradient of section 3.

# %%
widths = np.array([2, 8, 32, 128, 512])
deviations = {'dot': [], 'scaled_dot': []}
entropies = {'dot': [], 'scaled_dot': []}
for width in widths:
  wide_queries = jax.random.normal(jax.random.key(5), (256, width))
  wide_keys = jax.random.normal(jax.random.key(6), (32, width))
  for name, scale in (('dot', 1.0), ('scaled_dot', width**-0.5)):
    scores = scale * (wide_queries @ wide_keys.T)
    deviations[name].append(float(scores.std()))
    entropies[name].append(float(analysis.entropy(jax.nn.softmax(scores)).mean()))

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout='constrained')
for name in deviations:
  axes[0].loglog(widths, deviations[name], marker='.', label=name)
  axes[1].semilogx(widths, entropies[name], marker='.', label=name)
axes[0].loglog(widths, np.sqrt(widths), 'k:', label='√D')
axes[0].set(xlabel='width D', ylabel='standard deviation of scores')
axes[0].legend()
axes[1].set(xlabel='width D', ylabel='entropy of weights (nats)')
np.testing.assert_allclose(deviations['dot'], np.sqrt(widths), rtol=0.15)
np.testing.assert_allclose(deviations['scaled_dot'], 1, rtol=0.15)

# %% [markdown]
# ## 5. What popular formulas hide
#
# **A stack is not a sum.** Articles write additive attention as `w · tanh([W_a h_dec; W_b h_enc])`, where the
# brackets stack both projections. tanh acts on each entry alone, so this is `w₁ · tanh(W_a h_dec) + w₂ · tanh(W_b
# h_enc)`. The first term is the same for every position, so that softmax does not change with it: **the weights do
# not depend on the query**.

# %%
W_dec = 0.5 * jax.random.normal(jax.random.key(7), (5, D))
W_enc = 0.5 * jax.random.normal(jax.random.key(8), (5, D))
w = jax.random.normal(jax.random.key(9), (10,))


def stacked(query, key):
  """w · tanh([W_a h_dec; W_b h_enc])"""
  return jax.vmap(lambda k: w @ jnp.tanh(jnp.concatenate([W_dec @ query, W_enc @ k])))(key)


def summed(query, key):
  """v · tanh(W_a h_dec + W_b h_enc), Bahdanau et al. 2015"""
  return jax.vmap(lambda k: w[:5] @ jnp.tanh(W_dec @ query + W_enc @ k))(key)


figure, axes = plt.subplots(1, 2, figsize=(8, 2.2), layout='constrained')
for axis, score in zip(axes, (stacked, summed), strict=True):
  weights = aj.attend(queries[:2], keys, keys, score=score).weights
  show_weights(axis, weights, ['query 1', 'query 2'], range(S), score.__doc__)
  gradient = jax.grad(lambda q, score=score: aj.attend(q[None], keys, keys, score=score).weights[0, 0])(queries[0])
  print(score.__name__, 'largest slope of a weight by the query:', float(jnp.abs(gradient).max()))
  if score is stacked:
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
  else:
    assert abs(weights[0] - weights[1]).max() > 0.005

# %% [markdown]
# The intended formula has the **sum** inside of tanh. Bahdanau et al. 2015 write v · tanh(W s + U h) with two
# matrices. Luong et al. 2015 write v · tanh(W [h_t; h_s]): there the states are stacked **before** the product, and
# W = [W₁ W₂] is two matrices side by side, so this is the same sum.
#
# **One matrix over a sum ties both projections.** `v · tanh(W (h_dec + h_enc))` is a third formula. It has one matrix
# for two roles: exchanging query and key changes nothing.

# %%
params = aj.init_params(jax.random.key(10), score='concat', query=D, key=D, features=5)['score']
concat = aj.scores.concat(queries[0], keys, **params)
by_halves = jnp.tanh((queries[0] @ params['w'][:D])[None] + keys @ params['w'][D:]) @ params['v']
np.testing.assert_allclose(concat, by_halves, rtol=1e-5, atol=1e-6)


def tied(a, b):
  return w[:5] @ jnp.tanh(W_dec @ (a + b))


def untied(a, b):
  return w[:5] @ jnp.tanh(W_dec @ a + W_enc @ b)


np.testing.assert_allclose(tied(queries[0], keys[0]), tied(keys[0], queries[0]), rtol=1e-6)
assert abs(untied(queries[0], keys[0]) - untied(keys[0], queries[0])) > 1e-3

# %% [markdown]
# ## 6. Global and local
#
# Global attention compares the query with all S positions. Local attention (Luong et al. 2015) reads a window: the
# positions at a distance of at most `width` from the step itself (`local_m`), or from a centre that the query predicts
# (`local_p`, with a Gaussian on top), which need not be a whole number.

# %%
steps, positions = 12, 12
flat_queries = jnp.ones((steps, D))
long_keys = 0.5 * jax.random.normal(jax.random.key(11), (positions, D))
figure, all_axes = plt.subplots(1, 3, figsize=(9, 2.8), layout='constrained')
for axes, alignment in zip(all_axes, ['softmax', 'local_m(width=2)', 'local_p(width=2)'], strict=True):
  params = aj.init_params(jax.random.key(12), score='dot', alignment=alignment, query=D, key=D, features=8)
  attended = aj.attend(flat_queries, long_keys, long_keys, score='dot', alignment=alignment, params=params)
  show_weights(axes, attended.weights, range(steps), range(positions), alignment)
  if alignment.startswith('local_m'):
    outside = abs(np.arange(positions)[None, :] - np.arange(steps)[:, None]) > 2
    assert np.all(np.asarray(attended.weights)[outside] == 0)

# %% [markdown]
# ## 7. Soft and hard
#
# Soft attention is the **expectation** of the value under the weights. Hard attention (Xu et al. 2015) **samples**
# one position. The mean of many samples is the soft context. A single sample has no gradient for the scores, so hard
# attention is trained by other means (REINFORCE, or a sum over positions). Between both are sparse alignments such as
# `sparsemax` (Martins & Astudillo 2016), which set small weights to exactly 0 and can be differentiated.

# %%
scores = jnp.array([1.5, 1.0, 0.2, -1.0])
everywhere = jnp.ones(4, bool)
cells = jnp.array([1.0, 2.0, 3.0, 4.0])
soft = aj.alignments.softmax(scores, everywhere)
samples = jax.random.categorical(jax.random.key(13), scores, shape=(4000,))
running_mean = jnp.cumsum(cells[samples]) / jnp.arange(1, 4001)

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout='constrained')
axes[0].semilogx(np.arange(1, 4001), running_mean, label='mean of samples')
axes[0].axhline(float(soft @ cells), color='k', linestyle=':', label='soft')
axes[0].set(xlabel='samples', ylabel='context')
axes[0].legend()
names = ('softmax', 'entmax15', 'sparsemax', 'hardmax')
weights_by_name = {name: np.asarray(getattr(aj.alignments, name)(scores, everywhere)) for name in names}
show_weights(axes[1], np.stack(list(weights_by_name.values())), names, range(4), 'weights of the same scores')
assert abs(float(running_mean[-1] - soft @ cells)) < 0.05
assert (weights_by_name['sparsemax'] == 0).any() and (weights_by_name['softmax'] > 0).all()
for name in ('softmax', 'hardmax'):
  slope = jax.grad(lambda s, name=name: getattr(aj.alignments, name)(s, everywhere) @ cells)(scores)
  print(name, 'gradient of the context:', slope)

# %% [markdown]
# ## 8. Bahdanau and Luong side by side
#
# | | Bahdanau et al. 2015 | Luong et al. 2015 |
# | --- | --- | --- |
# | query | the state **before** the step, s of t-1 | the state **after** the step, s of t |
# | context goes | into the same step of the recurrence | into the attentional vector, with input feeding: next step |
# | score | additive | dot, general, concat or location |
# | order | attend → recurrence → output | recurrence → attend → output |
# | encoder | one bidirectional layer | the top of a stack in one direction |
#
# One step of each with the same numbers; `cell` is a plain recurrent cell.

# %%
states = 0.6 * jax.random.normal(jax.random.key(14), (5, 6))  # encoder states [S, D]
state = 0.6 * jax.random.normal(jax.random.key(15), (6,))
word = 0.6 * jax.random.normal(jax.random.key(16), (6,))
kernels = 0.4 * jax.random.normal(jax.random.key(17), (5, 6, 6))
additive = aj.init_params(jax.random.key(18), score='additive', query=6, key=6, features=6)


def cell(state, *inputs):
  return jnp.tanh(state @ kernels[0] + sum(x @ kernel for x, kernel in zip(inputs, kernels[1:3], strict=False)))


def bahdanau_step(state, word):
  attended = aj.attend(state[None], states, states, score='additive', params=additive)  # with s_{t-1}
  state = cell(state, word, attended.context[0])
  return state, attended.weights[0]


def luong_step(state, word):
  state = cell(state, word)
  attended = aj.attend(state[None], states, states, score='dot')  # with s_t
  attentional = jnp.tanh(attended.context[0] @ kernels[3] + state @ kernels[4])  # tanh(W [c; s])
  return state, attentional, attended.weights[0]


other_word = -word
bahdanau_change = bahdanau_step(state, word)[1] - bahdanau_step(state, other_word)[1]
luong_change = luong_step(state, word)[2] - luong_step(state, other_word)[2]
print('change of the weights by the input word: Bahdanau', abs(bahdanau_change).max(), 'Luong', abs(luong_change).max())
assert abs(bahdanau_change).max() == 0  # the query is older than the input of the step
assert abs(luong_change).max() > 0.001

# %% [markdown]
# ## 9. Self-attention and the Transformer
#
# In self-attention the queries are the positions of the sequence itself: each position reads all others in one step,
# where a recurrent network needs as many steps as the positions are apart. Multi-head attention (Vaswani et al. 2017)
# does so several times with projections to a few features, so that one position can read several things. With a causal
# mask (`past`), a position reads only itself and the positions before it.

# %%
x = jax.random.normal(jax.random.key(19), (1, 6, 8))  # [B, S, D]
attention = aj.Attention('scaled_dot', features=8, heads=2)


def self_attend(module, x, mask):
  return module.parallel(x, module.remember(x, mask))


full = jnp.ones((1, 6, 6), bool)
causal = aj.causal_mask(6)[None]
variables = attention.init(jax.random.key(20), x, full, method=self_attend)
outputs = {name: attention.apply(variables, x, m, method=self_attend) for name, m in (('all', full), ('past', causal))}
figure, all_axes = plt.subplots(1, 4, figsize=(9, 2.4), layout='constrained')
for axes, (name, head) in zip(all_axes, [('all', 0), ('all', 1), ('past', 0), ('past', 1)], strict=True):
  show_weights(axes, outputs[name].weights[0, head], range(6), range(6), f'{name}, head {head}')
assert np.all(np.triu(np.asarray(outputs['past'].weights[0, 0]), 1) == 0)

# %% [markdown]
# Self-attention without a causal mask does not depend on the order: permuted inputs give the same outputs, permuted.
# That is why Transformers add **positions** to their inputs.

# %%
order = jnp.array([3, 1, 5, 0, 4, 2])
permuted = attention.apply(variables, x[:, order], full, method=self_attend).context
np.testing.assert_allclose(permuted, outputs['all'].context[:, order], rtol=1e-4, atol=1e-5)
waves = jnp.sin(jnp.arange(6.0)[:, None] / 10.0 ** (jnp.arange(8.0) / 4)[None, :])
placed = attention.apply(variables, x + waves[None], full, method=self_attend).context
moved = attention.apply(variables, x[:, order] + waves[None], full, method=self_attend).context
assert abs(moved - placed[:, order]).max() > 0.01

# %% [markdown]
# ## 10. Pictures
#
# A picture is a memory too: its positions are the cells of a grid (Xu et al. 2015). Here each cell is described by
# its mean colour, and a query for red finds the red square. In a captioner, the query is the state of the decoder,
# and the cells are the outputs of a convolutional network.

# %%
picture = np.full((48, 48, 3), 0.9, np.float32)
picture[6:20, 26:40] = [0.9, 0.1, 0.1]
picture[28:42, 8:22] = [0.1, 0.2, 0.9]
grid = picture.reshape(6, 8, 6, 8, 3).mean((1, 3)).reshape(36, 3)  # [S, 3], 36 cells
colours = {'red': [1.0, -1.0, -1.0], 'blue': [-1.0, -1.0, 1.0], 'bright': [1.0, 1.0, 1.0]}
attended = aj.attend(6 * jnp.array(list(colours.values())), jnp.asarray(grid), jnp.asarray(grid), score='dot')
figure, all_axes = plt.subplots(1, 4, figsize=(9, 2.4))
all_axes[0].imshow(picture)
for axes, name, weights in zip(all_axes[1:], colours, attended.weights, strict=True):
  axes.imshow(picture)
  axes.imshow(np.asarray(weights).reshape(6, 6), 'gray', alpha=0.6, extent=(-0.5, 47.5, 47.5, -0.5))
  axes.set_title(name)
row, column = divmod(int(attended.weights[0].argmax()), 6)
assert 6 <= 8 * row + 4 < 20 and 26 <= 8 * column + 4 < 40

# %% [markdown]
# ## 11. Documents
#
# A classifier has no decoder, so its query is a **learned vector**: which words matter for the label? Hierarchical
# attention (Yang et al. 2016) does it twice, first over the words of each sentence, then over the sentences. With
# word vectors in which one feature is the strength of the opinion of a word, a query for this feature is enough:

# %%
document = [['the', 'room', 'was', 'small'], ['service', 'was', 'really', 'excellent'], ['we', 'came', 'by', 'train']]
judgement = {'small': -1.5, 'really': 0.8, 'excellent': 3.0}
vectors = jnp.array([[[judgement.get(word, 0.0), 0.1] for word in sentence] for sentence in document])
learned_query = jnp.array([1.2, 0.0])
sentence_vectors, word_weights = [], []
for sentence in vectors:
  attended = aj.attend(learned_query[None], jnp.abs(sentence), sentence, score='dot')
  sentence_vectors.append(attended.context[0])
  word_weights.append(attended.weights[0])
sentences = jnp.stack(sentence_vectors)
sentence_weights = aj.attend(learned_query[None], jnp.abs(sentences), sentences, score='dot').weights[0]
figure, axes = plt.subplots(figsize=(7, 1.8))
axes.axis('off')
for row, (sentence, weights) in enumerate(zip(document, word_weights, strict=True)):
  axes.text(0, -row, f'{sentence_weights[row]:.2f}', family='monospace')
  for column, (token, weight) in enumerate(zip(sentence, weights, strict=True)):
    ink = 'white' if weight > 0.6 else 'black'
    axes.text(1 + column, -row, token, color=ink, bbox={'facecolor': plt.cm.Blues(float(weight)), 'edgecolor': 'none'})
axes.set(xlim=(0, 6), ylim=(-3, 1), title='weights of sentences (left) and of words')
assert sentence_weights.argmax() == 1 and word_weights[1].argmax() == 3

# %% [markdown]
# ## 12. GNMT
#
# The translation system of Wu et al. 2016 stacks eight layers of LSTM with residual connections. Only the **lowest**
# layer of the decoder attends, and its context goes to all layers, so that the layers can run on different devices.
# Its search ranks hypotheses by
#
# log p / ((5 + T) / 6)^α + β Σₛ log min(Σₜ wₜₛ, 1),
#
# a length penalty and a **coverage penalty**: a source word without attention is a word that was probably not
# translated.

# %%
complete = jnp.array([[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]])
repeating = jnp.array([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.8, 0.2, 0.0]])


def coverage_penalty(weights, beta=0.2):
  return beta * jnp.log(jnp.clip(weights.sum(0), 1e-3, 1.0)).sum()


def length_penalty(tokens, alpha=0.6):
  return ((5 + tokens) / 6) ** alpha


for name, weights in (('complete', complete), ('repeating', repeating)):
  print(f'{name:10}', 'coverage', analysis.coverage(weights), 'penalty', float(coverage_penalty(weights)))
assert coverage_penalty(complete) > coverage_penalty(repeating)
print('a log-probability of -6 in 3 tokens:', -6 / length_penalty(3), 'in 12 tokens:', -6 / length_penalty(12))

# %% [markdown]
# ## 13. Reading a weight matrix, and when not to believe it
#
# A row is a target token, a column a source token, and each row sums to 1. A diagonal means the same order; a dark
# column is a source token that many steps read; a pale row is a step that attends to all positions alike.
# The model of section 1 was not trained on alignments. It learned the diagonal from the outputs alone:

# %%
model, params = attentive
ids, mask = sample_batch(np.random.default_rng(2), 64)
row = int(np.flatnonzero(mask.sum(1) == 10)[0])
ids = jnp.asarray(ids[row, :10], jnp.int32)
pair = interventions.AnalysedPair(model, params, ids, ids)
outputs = jax.jit(model.apply)({'params': params}, ids[None], jnp.ones((1, 10), bool), ids[None])
weights = outputs.weights[0]
symbols = [str(i - FIRST_ID) for i in ids.tolist()]
lost = jax.jit(lambda m: analysis.leave_one_out(lambda mask: interventions.target_log_probs(pair, mask), m))(
  jnp.ones(10, bool)
)
figure, all_axes = plt.subplots(1, 2, figsize=(8, 3.2), layout='constrained')
show_weights(all_axes[0], weights, symbols, symbols, 'weights')
show_weights(
  all_axes[1], lost / max(float(lost.max()), 1e-6), symbols, symbols, 'log-probability lost without a symbol'
)
print('entropy of each row:', analysis.entropy(weights).round(2))
if IS_TRAINED:
  assert np.mean(np.asarray(weights.argmax(1)) == np.arange(10)) > 0.7

# %% [markdown]
# **Weights are not effects.** Three ways in which they mislead, the first two of which are checked here:
#
# 1. A large weight on a **short value** adds little. The norm of what is added is the better picture (Kobayashi et
#    al. 2020).

# %%
values = jnp.array([[0.01, 0.0], [3.0, 4.0]])
weights_of_two = jnp.array([[0.9, 0.1]])
added = analysis.weighted_norms(weights_of_two, values)
print('weights', weights_of_two[0], 'norms of what is added', added[0])
assert added[0, 1] > 10 * added[0, 0]

# %% [markdown]
# 2. **Other weights may give the same output** (Jain & Wallace 2019). Where values are alike, permuting the weights
#    changes nothing, and weights far from the learned ones have the same output. Where values differ, such weights may
#    not exist. Below, the weights of one step of the trained model are permuted, and its output distribution is
#    compared. In a model that copies, weights matter; in a classifier of documents, they often do not.

# %%
alike = jnp.ones((4, 1)) * jnp.array([[0.3, -0.2, 0.5]])


def readout(w):
  return jax.nn.softmax(w @ alike)


learned = jnp.array([0.85, 0.05, 0.05, 0.05])
fake = analysis.adversarial_weights(readout, learned, jnp.ones(4, bool), jax.random.key(0))
print('equal values: learned', learned, 'adversarial', fake.weights, 'divergence', float(fake.divergence))
assert fake.divergence > 0.3 and fake.output_change < 0.05


def output_of_step(step):
  def outputs(row):
    rows = jnp.full(weights.shape, jnp.nan).at[step].set(row)
    edited = interventions.edited_model(model, replace_weights(rows))
    return jnp.exp(interventions.output_log_probs(pair._replace(model=edited))[step])

  return outputs


def effect_of_permutations(step):
  everything = jnp.ones(10, bool)
  return analysis.permutation_effect(output_of_step(step), weights[step], everything, jax.random.key(1), 20)


effects = jax.jit(lambda steps: jax.lax.map(effect_of_permutations, steps))(jnp.array([2, 5, 8]))
print('trained model: change of the output by permuted weights at steps 2, 5 and 8:', effects)
if IS_TRAINED:
  assert min(effects) > 0.2

# %% [markdown]
# 3. A position of a recurrent or self-attending encoder **contains its neighbours**. The weight on position s is on a
#    vector that has read the whole source. Leaving a symbol out (right picture above) measures the effect of the
#    symbol; the weight belongs to the vector.
#
# In short, weights show where a model read. That it read there *because of* the symbol is a separate claim, which
# is tested by changing something: the source (leave one out), the weights (edits), or the values (norms).
# `inspect_attention --analyses=...` does all of this for a trained run.

# %% [markdown]
# ## 14. Exercises
#
# Replace `...`, and run the cell. `check` prints whether an answer is right; the solutions are below.

# %%
TOY_SCORES = jnp.array([2.0, -1.0, 0.5, 7.0])
TOY_MASK = jnp.array([True, True, True, False])


def is_close(answer, expected):
  return np.shape(answer) == np.shape(expected) and np.allclose(answer, expected, rtol=1e-3, atol=1e-4)


def is_masked_softmax(answer):
  """A function (scores, mask) -> weights, with exact zeros at masked positions and no NaN where all are masked."""
  empty = np.asarray(answer(TOY_SCORES, jnp.zeros(4, bool)))
  return is_close(answer(TOY_SCORES, TOY_MASK), aj.alignments.softmax(TOY_SCORES, TOY_MASK)) and np.all(empty == 0)


CHECKS = {
  'scores': lambda answer: is_close(answer, [15, 60, 15, 35]),
  'masked softmax': is_masked_softmax,
  'symmetric': lambda answer: answer == 'dot',
  'temperature': lambda answer: abs(analysis.entropy(np.asarray(weights_at(answer)))[0] - 1.0) < 0.02,
  'parameters of additive': lambda answer: answer == 512 * 64 + 256 * 64 + 64,
  'cost': lambda answer: answer == 50 * 40,
}


def check(exercise, answer):
  """Returns whether the answer is right, and prints the verdict; ... stands for a missing answer."""
  is_right = answer is not ... and bool(CHECKS[exercise](answer))
  print(f'{exercise}: {"right" if is_right else "no answer yet" if answer is ... else "not yet, try again"}')
  return is_right


# %% [markdown]
# 1. Compute the four scores of section 3 with one expression of `decoder_state` and `encoder_states`.
# 2. Write a softmax with a mask: exact zeros where masked, and zeros instead of NaN if everything is masked.
# 3. Which of 'dot', 'general' and 'additive' is unchanged when query and key are exchanged, whatever its parameters?
# 4. For which temperature do the scores of section 3 have an entropy of 1 nat? (`weights_at`, to two digits)
# 5. How many parameters has an additive score for queries of 512 and keys of 256 features with 64 hidden features?
# 6. A source of 50 tokens and a target of 40: how many scores does global attention compute?

# %%
check('scores', ...)
check('masked softmax', ...)
check('symmetric', ...)
check('temperature', ...)
check('parameters of additive', ...)
check('cost', ...)

# %% [markdown]
# ### Solutions


# %%
def masked_softmax(scores, mask):
  exponentials = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0.0)), 0.0)
  total = exponentials.sum()
  return exponentials / jnp.where(total > 0, total, 1.0)


def temperature_of_entropy(entropy):
  """By bisection: the entropy grows with the temperature."""
  low, high = 1.0, 1000.0
  for _ in range(30):
    middle = (low * high) ** 0.5
    is_low = analysis.entropy(np.asarray(weights_at(middle)))[0] < entropy
    low, high = (middle, high) if is_low else (low, middle)
  return low


SOLUTIONS = {
  'scores': encoder_states @ decoder_state,
  'masked softmax': masked_softmax,
  'symmetric': 'dot',
  'temperature': temperature_of_entropy(1.0),
  'parameters of additive': 512 * 64 + 256 * 64 + 64,
  'cost': 50 * 40,
}
assert all([check(exercise, answer) for exercise, answer in SOLUTIONS.items()])
