"""Steps of recurrences of one sequence in NumPy: (projected inputs, state, recurrent kernel, bias) -> state."""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def elman(x, state, kernel, bias):
  return (np.tanh(x + state[0] @ kernel + bias),)


def gru_step(x, state, kernel, bias):
  (h,) = state
  xr, xz, xn = np.split(x, 3)
  ur, uz, un = np.split(kernel, 3, axis=1)
  r = sigmoid(xr + h @ ur)
  z = sigmoid(xz + h @ uz)
  return ((1 - z) * np.tanh(xn + r * (h @ un + bias)) + z * h,)


def gru_reset_first(x, state, kernel, bias):
  (s,) = state
  xr, xz, xn = np.split(x, 3)
  ur, uz, un = np.split(kernel, 3, axis=1)
  r = sigmoid(xr + s @ ur)
  z = sigmoid(xz + s @ uz)
  return ((1 - z) * s + z * np.tanh(xn + (r * s) @ un + bias),)


def long_short_term(x, state, kernel, bias):
  h, c = state
  xi, xf, xg, xo = np.split(x, 4)
  ui, uf, ug, uo = np.split(kernel, 4, axis=1)
  c = sigmoid(xf + h @ uf + bias) * c + sigmoid(xi + h @ ui) * np.tanh(xg + h @ ug)
  return sigmoid(xo + h @ uo) * np.tanh(c), c


# The number of arrays in the state, and the formula, by name.
REFERENCE_CELLS = {'simple': (1, elman), 'gru': (1, gru_step), 'gru_reset_first': (1, gru_reset_first)}
REFERENCE_CELLS['lstm'] = (2, long_short_term)
