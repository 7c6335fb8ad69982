"""Generated pairs of texts: numbers of labels, new words of hypotheses, and nouns of the split unseen."""

from attention_jax.systems.classification import entailment


def conflicts(premise: str, hypothesis: str) -> bool:
  """Whether a hypothesis has no agent, or one word of a group where its premise has another one."""
  groups = [entailment.AGENT_MODIFIERS, entailment.OBJECT_MODIFIERS, entailment.VERBS]
  groups += [entailment.PLACES, entailment.TIMES]
  pairs = [[{item for item in group if item in text} for text in (premise, hypothesis)] for group in groups]
  for before, after in zip(numbers_of(premise), numbers_of(hypothesis), strict=True):
    pairs.append([{before}, {after} - {'some'}])
  return hypothesis.startswith('no ') or any(before and after and before != after for before, after in pairs)


def numbers_of(text: str) -> tuple[str, str]:
  """Returns the first word of the agent and the first word of the object."""
  words = text.split()
  verb = next(i for i, word in enumerate(words) if word in entailment.VERBS)
  return words[0], words[verb + 1]


def test_neutral_hypotheses_have_new_words_and_entailed_ones_have_none():
  rows = list(entailment.generate('test'))
  assert rows == list(entailment.generate('test')) != list(entailment.generate('test', seed=1))
  assert {label: sum(row['label'] == label for row in rows) for label in entailment.LABELS} == {
    'entailment': 334,
    'neutral': 333,
    'contradiction': 333,
  }
  groups = [*entailment.AGENTS.items(), *entailment.OBJECTS.items()]
  wider = {noun: wide for wide, nouns in groups for noun in nouns}
  for row in rows:
    premise, hypothesis = (set(row[name].split()) for name in ('premise', 'hypothesis'))
    new = hypothesis - premise - {'some', *(wider[word] for word in premise if word in wider)}
    assert row['label'] == 'contradiction' or bool(new) == (row['label'] == 'neutral')
    assert conflicts(row['premise'], row['hypothesis']) == (row['label'] == 'contradiction')
    assert row['premise'] != row['hypothesis']
    assert not premise & entailment.UNSEEN_NOUNS
  assert any(entailment.UNSEEN_NOUNS & set(row['premise'].split()) for row in entailment.generate('unseen'))
