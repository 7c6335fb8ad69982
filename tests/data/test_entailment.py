"""Generated pairs of texts are consistent with their labels."""

from attention_jax.data.builders import entailment


def test_generated_pairs_are_consistent_with_their_labels():
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
    if row['label'] == 'entailment':
      assert hypothesis - premise <= {'some', *(wider[word] for word in premise if word in wider)}
    assert row['premise'] != row['hypothesis']
    assert not premise & entailment.UNSEEN_NOUNS
  assert any(entailment.UNSEEN_NOUNS & set(row['premise'].split()) for row in entailment.generate('unseen'))
