"""When to use each score and alignment, in a sentence or two, for the pages of the documentation site.

A variant without an entry has a page without this section. Measurements that a sentence relies on are in docs/claims/
or RESULTS.md.
"""

ADVICE = {
  'score': {
    'dot': (
      'Query and key have the same width and were learned together, as the two sides of an encoder-decoder by '
      'Luong et al. It has no parameters. With wide vectors its weights are sharper than those of `scaled_dot`.'
    ),
    'scaled_dot': (
      'The default of Transformers: wide vectors, several heads, long sequences. `flash` and `cudnn` support it.'
    ),
    'general': (
      'Query and key have different widths. With recurrent decoders and local attention, it was the best score of '
      'Luong et al. 2015.'
    ),
    'low_rank': 'In place of `general` where W would be large: it has rank R, and 2 D R parameters instead of D².',
    'additive': (
      'Recurrent decoders with a single attention, as in Bahdanau et al. 2015. It has a hidden layer, so that it can '
      'match vectors that are not similar; it costs a tanh for each position and feature.'
    ),
    'normed_additive': (
      'As `additive`, where the sharpness of the weights should be a parameter of its own. In RESULTS.md, it '
      'had better links for dates.'
    ),
    'offset_additive': (
      'With `monotonic` and `mocha`, which need scores that are negative at first, so that the walk does not '
      'stop at the first position.'
    ),
    'concat': (
      'To reproduce Luong et al. 2015. One matrix reads query and key together, so that keys cannot be projected'
      ' once per source; `additive` is the same function, faster.'
    ),
    'cosine': (
      'Memories whose vectors have different norms, such as those of Neural Turing Machines; the key strength β is '
      'learned or set.'
    ),
    'normed_dot': (
      'Transformers whose scores grow during training, so that it becomes unstable. `cosine` is the form for rotary '
      'positions, with one gain for all features.'
    ),
    'elu_dot': (
      'Very long sources, with the alignment `proportional`: self-attention of encoders has a cost that is linear in '
      'their length. Attention whose weights are reported, and causal self-attention, are computed by the definition.'
    ),
    'location': 'A control: it does not read the memory. Useful where positions alone decide, up to a fixed length.',
    'location_sensitive': (
      'Long inputs that are read from left to right, such as speech: it depends on the previous weights, so that '
      'outputs repeat and skip less.'
    ),
    'coverage': 'Outputs that repeat themselves, as in summarisation; add the auxiliary loss `coverage`.',
    'fertility': 'As `coverage`, where source words need different numbers of target words.',
  },
  'alignment': {
    'softmax': 'The default. Every position gets some weight, and gradients reach all of them.',
    'sigmoid': 'Several positions count at once, or none: weights of positions are independent.',
    'sigmoid_by_length': 'As `sigmoid`, for self-attention over many positions: the initial sum of weights is near 1.',
    'softpick': 'A query may need nothing, and most weights should be exactly 0: negative scores get none.',
    'smoothed': 'A query needs several positions at once, such as the frames of one phoneme.',
    'sink_softmax': (
      'A query may need nothing: the sink takes its weight, which softmax gives to some position, often the first.'
    ),
    'scalable_softmax': 'Sources at test time are longer than those of training: softmax becomes flatter with length.',
    'capped_softmax': 'Scores grow during training, so that weights saturate and gradients vanish.',
    'proportional': 'With `elu_dot`: linear attention.',
    'stick_breaking': (
      'Self-attention of a causal decoder without positions: later positions come first. It is not meant for attention '
      'over a source that is read from the left.'
    ),
    'sparsemax': 'Weights that a person reads: most are exactly 0. Gradients of those positions are 0 too.',
    'entmax15': (
      'Between `softmax` and `sparsemax`: exact zeros, and a smooth function. In docs/claims/, its outputs were as '
      'good as those of `softmax`; its links were slightly better for letters to phonemes, but not for dates.'
    ),
    'entmax': 'As `entmax15` with another α, or with one that is learned.',
    'hardmax': 'At test time, or in analyses: it has no gradient, so that scores cannot be trained.',
    'coverage_penalised': 'A trained model repeats itself: the penalty needs no parameters.',
    'local_m': (
      'Source and target run at the same pace, such as letters and phonemes; the cost of a query does not grow '
      'with the source (implementation `window`).'
    ),
    'local_p': 'As `local_m`, where the position has to be predicted from the query.',
    'windowed': 'Long inputs that are read in order: the window follows the previous weights.',
    'hard': (
      'To compare with Xu et al. 2015. Sampling makes training noisy: in docs/claims/, its outputs and its links were '
      'the worst.'
    ),
    'hard_once': 'As `hard`, with the choice between sample and expectation made once per output, as in the paper.',
    'gumbel': 'One position per query with a gradient, biased but of less variance than that of `hard`.',
    'gumbel_annealed': 'As `gumbel`, with a temperature that is learned or set by `training.anneal`.',
    'latent': (
      'Alignments are needed, not only outputs: in docs/claims/, its links were by far the best for letters to '
      'phonemes, but no better than those of `softmax` for dates. Training computes an output distribution for each '
      'position.'
    ),
    'latent_monotonic': 'As `latent`, for tasks in which the source is read in order, such as inflection.',
    'monotonic': (
      'Outputs are needed while the input still arrives: at test time a query reads no position after the one where it '
      'stops. Use it with `offset_additive`.'
    ),
    'mocha': 'As `monotonic`, with soft attention to the position of the stop and those just before it.',
    'forward': 'Speech: a step stays at its position or moves on by one, which prevents skips.',
    'forward_agent': 'As `forward`, with a learned speed, which can be changed at test time.',
    'addressing': 'Neural Turing Machines: content, then shifts relative to the previous weights.',
  },
}
