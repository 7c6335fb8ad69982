"""Pairs of sentences about a scene: data in which words of two texts have to be held against each other.

  two small dogs chase a red ball in the park .   -> some animals chase a ball .         entailment
                                                  -> two large dogs chase a red ball .   contradiction
                                                  -> two small dogs chase a red ball at night .   neutral

A hypothesis is made from its premise by one to three edits. What tells less follows (a modifier left out, a wider noun,
'some' for a number); what tells otherwise contradicts (another word of the same kind, or 'no'); what tells more (a new
modifier, place or time) is neutral, unless something contradicts. The split 'unseen' has nouns that stand in no other.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attention_jax.errors import choose

SIZES = {'train': 12000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
LABELS = ('entailment', 'neutral', 'contradiction')
# wider noun (plural): those who are (plural)
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
SIZES_OF = ('small', 'large')
COLOURS = ('red', 'blue', 'green', 'black', 'white')
VERBS = ('chase', 'find', 'carry', 'watch', 'break', 'guard')
PLACES = ('in the park', 'on the beach', 'at the station', 'in a garden')
TIMES = ('at night', 'in the morning', 'on sunday')


class Noun(NamedTuple):
  """A group of things; '' for what is not told."""

  number: str
  modifier: str
  noun: str
  wider: str


class Scene(NamedTuple):
  """Who does what to whom, and where and when."""

  agent: Noun
  verb: str
  object: Noun
  place: str = ''
  time: str = ''

  def __str__(self) -> str:
    words = [*self.agent[:3], self.verb, *self.object[:3], self.place, self.time, '.']
    return ' '.join(word for word in words if word)


def generate(split: str, seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields premise, hypothesis and label, a pure function of (split, seed). Raises: UserError for an unknown split."""
  size = SIZES[choose(split, SIZES, 'split of entailment')]
  draw = _Draws(random.Random(f'entailment {split} {seed}').random, split == 'unseen')
  for row in range(size):
    premise, hypothesis = draw.pair(LABELS[row % 3])
    yield {'premise': str(premise), 'hypothesis': str(hypothesis), 'label': LABELS[row % 3]}


def judge(premise: Scene, hypothesis: Scene) -> str:
  """The label of a pair; '' where a scene that nobody takes part in is told with more than is known."""
  pairs = [(premise.verb, hypothesis.verb), (premise.place, hypothesis.place), (premise.time, hypothesis.time)]
  for side in ('agent', 'object'):
    known, told = getattr(premise, side), getattr(hypothesis, side)
    pairs.append((known.modifier, told.modifier))
    if told.number in NUMBERS:
      pairs.append((known.number, told.number))
  differ = any(known and told and known != told for known, told in pairs)
  more = any(told and not known for known, told in pairs)
  if hypothesis.agent.number == 'no':
    return '' if differ or more else 'contradiction'
  return 'contradiction' if differ else 'neutral' if more else 'entailment'


class _Draws:
  """What is drawn at random; only random() is promised to stay the same from one Python version to the next."""

  def __init__(self, draw: Callable[[], float], unseen: bool):
    self._draw, self._unseen = draw, unseen

  def one(self, items):
    items = list(items)
    return items[int(self._draw() * len(items))]

  def other(self, items, than: str) -> str:
    return self.one(item for item in items if item != than)

  def noun(self, groups, modifiers) -> Noun:
    pairs = [
      (noun, wider) for wider, nouns in groups.items() for noun in nouns if (noun in UNSEEN_NOUNS) == self._unseen
    ]
    noun, wider = self.one(pairs)
    return Noun(self.one(NUMBERS), self.one(('', *modifiers)), noun, wider)

  def scene(self) -> Scene:
    place, time = (self.one(('', self.one(items))) for items in (PLACES, TIMES))
    return Scene(self.noun(AGENTS, SIZES_OF), self.one(VERBS), self.noun(OBJECTS, COLOURS), place, time)

  def pair(self, label: str) -> tuple[Scene, Scene]:
    """A scene, and another that has this label given the first: it is one to three edits away."""
    while True:
      scene = found = self.scene()
      for _ in range(1 + int(self._draw() * 3)):
        found = self.one((self.weaker, self.fuller, self.against))(found)
      if found != scene and judge(scene, found) == label:
        return scene, found

  def weaker(self, scene: Scene) -> Scene:
    """Tells less, where there is something to leave out."""
    return self.one(_weaker(scene) or [scene])

  def fuller(self, scene: Scene) -> Scene:
    """Tells more than is known."""
    ways = []
    for side, modifiers in (('agent', SIZES_OF), ('object', COLOURS)):
      noun = getattr(scene, side)
      if not noun.modifier:
        ways.append(scene._replace(**{side: noun._replace(modifier=self.one(modifiers))}))
    ways += [scene._replace(place=self.one(PLACES))] * (not scene.place)
    ways += [scene._replace(time=self.one(TIMES))] * (not scene.time)
    return self.one(ways) if ways else scene

  def against(self, scene: Scene) -> Scene:
    """Tells something else."""
    agent, thing = scene.agent, scene.object
    ways = [scene._replace(verb=self.other(VERBS, scene.verb)), scene._replace(agent=agent._replace(number='no'))]
    for side, noun, modifiers in (('agent', agent, SIZES_OF), ('object', thing, COLOURS)):
      if noun.modifier:
        ways.append(scene._replace(**{side: noun._replace(modifier=self.other(modifiers, noun.modifier))}))
      if noun.number in NUMBERS:
        ways.append(scene._replace(**{side: noun._replace(number=self.other(NUMBERS, noun.number))}))
    if scene.place:
      ways.append(scene._replace(place=self.other(PLACES, scene.place)))
    return self.one(ways)


def _weaker(scene: Scene) -> list[Scene]:
  ways = []
  for side in ('agent', 'object'):
    noun = getattr(scene, side)
    ways += [scene._replace(**{side: noun._replace(modifier='')})] * bool(noun.modifier)
    ways += [scene._replace(**{side: noun._replace(number='some')})] * (noun.number in NUMBERS)
    ways += [scene._replace(**{side: noun._replace(noun=noun.wider)})] * (noun.noun != noun.wider)
  ways += [scene._replace(place='')] * bool(scene.place)
  ways += [scene._replace(time='')] * bool(scene.time)
  return ways
