"""Generated pairs of texts: numbers of labels, new words of hypotheses, and nouns of the split unseen."""

from attention_jax.data.builders import entailment


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
    assert row['premise'] != row['hypothesis']
    assert not premise & entailment.UNSEEN_NOUNS
  assert any(entailment.UNSEEN_NOUNS & set(row['premise'].split()) for row in entailment.generate('unseen'))
