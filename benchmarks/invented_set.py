"""A data set of invented words: paraphrased questions about thousands of similar plants, machines
and towns.

Every passage describes one invented thing by six attributes, and its neighbours share most of them.
A question names three attributes, enough to identify one passage, half of them in other words than
the passages use. Word overlap says little: a model has to learn which wordings mean the same, and
to tell neighbours apart, which takes many negatives.

A model with random weights can learn it, so checks and measurements need no pretrained encoder. The
bytes are the same on every machine and Python version.
"""

import json
import random
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, TypeVar

from invented_words import KINDS, Kind

Item = TypeVar("Item")

SEED = 19980406
PASSAGES = 3000
SPLITS = {"train": 4000, "dev": 200, "test": 300}
_FAMILY = 8  # passages that resemble each other
_CHANGES = 3  # attributes in which a passage differs from its family's first
_ASKED = 3  # attributes that a question names
_VERBATIM = 0.5  # share of them named in the passages' own words

_FRAMES = ("Which {noun} {what}?", "Name the {noun} that {what}.")

_ONSETS = (
    "b", "br", "d", "dr", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v",
    "w", "z",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_ENDS = ("l", "m", "n", "r", "th", "x", "nd", "rk")


class Thing(NamedTuple):
    """One passage in the making: its kind, its name, and the number of each attribute's value."""

    kind: Kind
    name: str
    values: tuple[int, ...]


class Dice:
    """Random choices made of ``random.Random.random`` alone, whose stream Python guarantees for all
    versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        rest = list(items)
        for place in range(len(rest) - 1, 0, -1):
            other = self.below(place + 1)
            rest[place], rest[other] = rest[other], rest[place]
        return rest

    def happens(self, probability: float) -> bool:
        return self._random() < probability


def _things(dice: Dice) -> list[Thing]:
    names: set[str] = set()
    things: list[Thing] = []
    for kind in KINDS:
        seen: set[tuple[int, ...]] = set()
        sizes = [len(attribute.values) for attribute in kind.attributes.values()]
        while len(seen) < PASSAGES // len(KINDS):
            if len(seen) % _FAMILY == 0:
                first = tuple(dice.below(size) for size in sizes)
            values = list(first)
            for place in dice.shuffled(range(len(sizes)))[:_CHANGES]:
                values[place] = dice.below(sizes[place])
            if tuple(values) not in seen:
                seen.add(tuple(values))
                things.append(Thing(kind, _name(dice, names), tuple(values)))
    return things


def _name(dice: Dice, names: set[str]) -> str:
    while True:
        syllables = [dice.pick(_ONSETS) + dice.pick(_VOWELS) for _ in range(2)]
        name = ("".join(syllables) + dice.pick(_ENDS)).capitalize()
        if name not in names:
            names.add(name)
            return name


def _passage(thing: Thing, dice: Dice) -> str:
    words = {
        letter: attribute.values[value][0]
        for (letter, attribute), value in zip(
            thing.kind.attributes.items(), thing.values, strict=True
        )
    }
    text = dice.pick(thing.kind.passages).format(name=thing.name, **words)
    return text[0].upper() + text[1:]


class Asked(NamedTuple):
    """A question in the making: which thing it means, and the places of the attributes that it
    names."""

    thing: int
    places: tuple[int, ...]


def _telling_places(things: Sequence[Thing]) -> list[list[tuple[int, ...]]]:
    """For each thing, the choices of attributes whose values no other thing of its kind has
    together."""
    owners: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    choices = list(combinations(range(len(things[0].values)), _ASKED))
    for number, thing in enumerate(things):
        for places in choices:
            key = (thing.kind.nouns[0], places, tuple(thing.values[place] for place in places))
            owners.setdefault(key, []).append(number)
    telling: list[list[tuple[int, ...]]] = [[] for _ in things]
    for (_, places, _), numbers in owners.items():
        if len(numbers) == 1:
            telling[numbers[0]].append(places)
    return telling


def _asked(things: Sequence[Thing], dice: Dice) -> list[Asked]:
    """As many different questions as all splits need, going round the things again and again."""
    waiting = [dice.shuffled(places) for places in _telling_places(things)]
    asked: list[Asked] = []
    while True:
        for number in dice.shuffled(range(len(things))):
            if waiting[number]:
                asked.append(Asked(number, waiting[number].pop()))
                if len(asked) == sum(SPLITS.values()):
                    return asked


def _question(thing: Thing, places: tuple[int, ...], dice: Dice) -> str:
    attributes = list(thing.kind.attributes.values())
    clauses = []
    for place in dice.shuffled(places):
        wordings = attributes[place].values[thing.values[place]]
        words = wordings[0] if dice.happens(_VERBATIM) else dice.pick(wordings[1:])
        clauses.append(attributes[place].question.format(words))
    what = f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return dice.pick(_FRAMES).format(noun=dice.pick(thing.kind.nouns), what=what)


def _lines(records: Iterable[dict[str, str]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def invented_files() -> dict[str, str]:
    """Generate the files of the BEIR folder, with the splits train, dev and test."""
    dice = Dice(SEED)
    things = _things(dice)
    passages = [_passage(thing, dice) for thing in things]
    asked = dice.shuffled(_asked(things, dice))
    questions = [_question(things[number], places, dice) for number, places in asked]
    files = {
        "corpus.jsonl": _lines(
            {"_id": f"p{n}", "title": things[n].name, "text": text}
            for n, text in enumerate(passages)
        ),
        "queries.jsonl": _lines({"_id": f"q{n}", "text": text} for n, text in enumerate(questions)),
    }
    start = 0
    for split, count in SPLITS.items():
        rows = (f"q{n}\tp{asked[n].thing}\t1\n" for n in range(start, start + count))
        files[f"qrels/{split}.tsv"] = "query-id\tcorpus-id\tscore\n" + "".join(rows)
        start += count
    return files


def write_invented_set(folder: Path) -> Path:
    """Write the BEIR folder and return its path. An existing folder is left as it is."""
    if not folder.exists():
        (folder / "qrels").mkdir(parents=True)
        for name, text in invented_files().items():
            (folder / name).write_bytes(text.encode())
    return folder
