"""Generated pairs of sentences about a scene, whose label depends on comparing the words of both.

  two small dogs chase four red balls in the park .   -> some small animals chase four red balls .         entailment
                                                      -> two large dogs chase four red balls .             contradiction
                                                      -> two small dogs chase four red balls at night .    neutral

A hypothesis is made from its premise by one to three edits. Removing information gives entailment (a modifier, place or
time left out, a wider noun, 'some' for a number). Replacing it gives a contradiction (another word or place, or 'no'),
also if one edit removes a modifier, place or time and another one adds a different one. Adding to it (a new modifier,
place or time) is neutral, unless something is replaced too. Apart from the wider nouns, the nouns of the split 'unseen'
occur in no other split.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from attention_jax.errors import choose

Item = TypeVar('Item')

SIZES = {'train': 12000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
LABELS = ('entailment', 'neutral', 'contradiction')
# wider noun -> nouns that it includes
AGENTS = {
  'animals': ('dogs', 'cats', 'horses', 'foxes', 'goats'),
  'people': ('farmers', 'pilots', 'nurses', 'painters', 'sailors'),
  'children': ('girls', 'boys', 'pupils', 'toddlers'),
}
OBJECTS = {
  'toys': ('balls', 'kites', 'dolls', 'puzzles'),
  'vehicles': ('cars', 'buses', 'trucks', 'bicycles'),
  'instruments': ('guitars', 'drums', 'violins', 'flutes'),
}
UNSEEN_NOUNS = {'foxes', 'goats', 'sailors', 'toddlers', 'puzzles', 'bicycles', 'flutes'}
NUMBERS = ('two', 'three', 'four', 'five')
AGENT_MODIFIERS = ('small', 'large')
OBJECT_MODIFIERS = ('red', 'blue', 'green', 'black', 'white')
VERBS = ('chase', 'find', 'carry', 'watch', 'break', 'guard')
PLACES = ('in the park', 'on the beach', 'at the station', 'in a garden')
TIMES = ('at night', 'in the morning', 'on sunday')


class NounPhrase(NamedTuple):
  """A number, a modifier ('' for none), a noun, and the wider noun that includes it."""

  number: str
  modifier: str
  noun: str
  wider: str


class Scene(NamedTuple):
  """An agent, a verb, an object, and a place and a time ('' for none)."""

  agent: NounPhrase
  verb: str
  object: NounPhrase
  place: str = ''
  time: str = ''

  def __str__(self) -> str:
    words = [*self.agent[:3], self.verb, *self.object[:3], self.place, self.time, '.']
    return ' '.join(word for word in words if word)


def generate(split: str, seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields the examples of a split, a pure function of (split, seed).

  Args:
    split: a key of SIZES.
    seed: any integer.

  Yields:
    premise, hypothesis and label.

  Raises:
    UserError: for an unknown split.
  """
  size = SIZES[choose(split, SIZES, 'split of entailment')]
  sampler = _Sampler(random.Random(f'entailment {split} {seed}').random, split == 'unseen')
  for row in range(size):
    label = LABELS[row % 3]
    premise, hypothesis = sampler.sample_pair(label)
    yield {'premise': str(premise), 'hypothesis': str(hypothesis), 'label': label}


def label_of(premise: Scene, hypothesis: Scene) -> str:
  """Returns the label of a pair; '' (undefined) if the agent has 'no' and something else was replaced or added."""
  pairs = [(premise.verb, hypothesis.verb), (premise.place, hypothesis.place), (premise.time, hypothesis.time)]
  for role in ('agent', 'object'):
    before = getattr(premise, role)
    after = getattr(hypothesis, role)
    pairs.append((before.modifier, after.modifier))
    if after.number in NUMBERS:
      pairs.append((before.number, after.number))
  has_change = any(before and after and before != after for before, after in pairs)
  has_addition = any(after and not before for before, after in pairs)
  if hypothesis.agent.number == 'no':
    return '' if has_change or has_addition else 'contradiction'
  if has_change:
    return 'contradiction'
  return 'neutral' if has_addition else 'entailment'


class _Sampler:
  """Draws scenes and edits of scenes.

  Every draw is made with random(), the only method whose values are guaranteed across Python versions. The order of the
  draws determines the data of a seed.
  """

  def __init__(self, draw: Callable[[], float], unseen: bool):
    self._draw = draw
    self._unseen = unseen

  def sample(self, items: Iterable[Item]) -> Item:
    items = list(items)
    return items[int(self._draw() * len(items))]

  def sample_other(self, items: Iterable[str], current: str) -> str:
    return self.sample(item for item in items if item != current)

  def sample_noun_phrase(self, nouns_by_wider: Mapping[str, Sequence[str]], modifiers: Sequence[str]) -> NounPhrase:
    pairs = [(noun, wider) for wider, nouns in nouns_by_wider.items() for noun in nouns]
    noun, wider = self.sample(pair for pair in pairs if (pair[0] in UNSEEN_NOUNS) == self._unseen)
    return NounPhrase(self.sample(NUMBERS), self.sample(('', *modifiers)), noun, wider)

  def sample_scene(self) -> Scene:
    place = self.sample(('', self.sample(PLACES)))
    time = self.sample(('', self.sample(TIMES)))
    agent = self.sample_noun_phrase(AGENTS, AGENT_MODIFIERS)
    verb = self.sample(VERBS)
    return Scene(agent, verb, self.sample_noun_phrase(OBJECTS, OBJECT_MODIFIERS), place, time)

  def sample_pair(self, label: str) -> tuple[Scene, Scene]:
    """A premise and a hypothesis with this label, one to three edits apart."""
    while True:
      premise = self.sample_scene()
      hypothesis = premise
      for _ in range(1 + int(self._draw() * 3)):
        edit = self.sample((self.remove, self.add, self.change))
        hypothesis = edit(hypothesis)
      if hypothesis != premise and label_of(premise, hypothesis) == label:
        return premise, hypothesis

  def remove(self, scene: Scene) -> Scene:
    """Removes information, if there is any to remove."""
    return self.sample(_removals(scene) or [scene])

  def add(self, scene: Scene) -> Scene:
    """Adds information, if there is any to add."""
    edits = []
    for role, modifiers in (('agent', AGENT_MODIFIERS), ('object', OBJECT_MODIFIERS)):
      phrase = getattr(scene, role)
      if not phrase.modifier:
        edits.append(scene._replace(**{role: phrase._replace(modifier=self.sample(modifiers))}))
    place = self.sample(PLACES)  # place and time are drawn even if they are not used, as the draws define the data
    if not scene.place:
      edits.append(scene._replace(place=place))
    time = self.sample(TIMES)
    if not scene.time:
      edits.append(scene._replace(time=time))
    return self.sample(edits) if edits else scene

  def change(self, scene: Scene) -> Scene:
    """Replaces a word or the place by another one of the same kind, or the number of the agent by 'no'."""
    edits = [
      scene._replace(verb=self.sample_other(VERBS, scene.verb)),
      scene._replace(agent=scene.agent._replace(number='no')),
    ]
    for role, modifiers in (('agent', AGENT_MODIFIERS), ('object', OBJECT_MODIFIERS)):
      phrase = getattr(scene, role)
      if phrase.modifier:
        modifier = self.sample_other(modifiers, phrase.modifier)
        edits.append(scene._replace(**{role: phrase._replace(modifier=modifier)}))
      if phrase.number in NUMBERS:
        number = self.sample_other(NUMBERS, phrase.number)
        edits.append(scene._replace(**{role: phrase._replace(number=number)}))
    if scene.place:
      edits.append(scene._replace(place=self.sample_other(PLACES, scene.place)))
    return self.sample(edits)


def _removals(scene: Scene) -> list[Scene]:
  """Every scene that is one removal of information away."""
  scenes = []
  for role in ('agent', 'object'):
    phrase = getattr(scene, role)
    if phrase.modifier:
      scenes.append(scene._replace(**{role: phrase._replace(modifier='')}))
    if phrase.number in NUMBERS:
      scenes.append(scene._replace(**{role: phrase._replace(number='some')}))
    if phrase.noun != phrase.wider:
      scenes.append(scene._replace(**{role: phrase._replace(noun=phrase.wider)}))
  if scene.place:
    scenes.append(scene._replace(place=''))
  if scene.time:
    scenes.append(scene._replace(time=''))
  return scenes
