"""Makes what the search agent is trained with: a collection of documents, questions about them, and
a 0.85 M-parameter model that can search and cite but seldom does.

    python -m examples.search_cite.prepare runs/search_cite-model

The towns are made up, so that no model knows them. Every name belongs to two towns, in different
countries: a search for the name alone returns both documents in either order, a search for name and
country the right one first. The supervised part shows four habits, HABITS; half of its answers name
no document. Its documents are other ones: what the model learns there is how to copy, not a fact.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

from examples.tools.search import Search, show
from stepwell.quickstart.make_model import ChatTokens, Episode, Rows, make, rows
from stepwell.trainer.tools import ToolBox

COUNTRIES = ("Ostria", "Kesh", "Valdor", "Mirania", "Tulen", "Sarkova", "Bellia", "Norrow")
BEGINNINGS = ("Vel", "Kar", "Bram", "Tol", "Sen", "Mor", "Lin", "Dur", "Hal", "Pir", "Gol", "Ner")
MIDDLES = ("a", "o", "i", "e", "an", "or", "il", "en")
ENDINGS = ("mora", "dale", "wick", "burg", "stad", "ton", "ria", "gate", "ford", "heim")

Habit: TypeAlias = Literal["guess", "country", "name", "both"]
HABITS: dict[Habit, float] = {"guess": 0.4, "country": 0.2, "name": 0.2, "both": 0.2}
"""Answers without searching; searches for the country, the name, or both, and believes the first
document: the habit and its share."""
SKILLS: dict[Habit, float] = {"name": 0.5, "both": 0.5}
"""Habits that are shown first, with citations."""


@dataclass(frozen=True)
class Town:
    id: str
    name: str
    country: str
    river: str
    year: int

    def document(self) -> dict[str, str]:
        text = f"{self.name} is a town in {self.country} on the river {self.river}."
        return {
            "id": self.id,
            "title": f"{self.name}, {self.country}",
            "text": f"{text} It was founded in {self.year}.",
        }

    def asked(self, kind: str) -> tuple[str, str]:
        """A question and its answer."""
        if kind == "year":
            return f"When was {self.name} in {self.country} founded?", str(self.year)
        return f"On which river is {self.name} in {self.country}?", self.river


KINDS = ("year", "river")


def name(rng: random.Random) -> str:
    return rng.choice(BEGINNINGS) + rng.choice(MIDDLES) + rng.choice(ENDINGS)


def towns(rng: random.Random, n_names: int) -> list[Town]:
    """Two of each name."""
    names = list(dict.fromkeys(name(rng) for _ in range(4 * n_names)))[:n_names]
    ids = rng.sample(range(100, 1000), 2 * n_names)
    return [
        Town(f"d{ids.pop()}", called, country, name(rng), rng.randint(1000, 1999))
        for called in names
        for country in rng.sample(COUNTRIES, 2)
    ]


# ── the supervised part ──────────────────────────────────────────────────────────────────────────


def episode(
    tokens: ChatTokens, rng: random.Random, habits: dict[Habit, float], cite: float
) -> Episode:
    (habit,) = rng.choices(list(habits), list(habits.values()))
    asked, namesake = towns(rng, 1)
    kind = rng.choice(KINDS)
    question, _ = asked.asked(kind)
    parts: Episode = [(tokens.prompt(question), False)]
    if habit == "guess":
        (other,) = towns(rng, 1)[:1]
        found = [other]
    else:
        strangers = [t for t in towns(rng, 12) if t.country == asked.country][:2]
        found = {
            "country": rng.sample([asked, *strangers], len(strangers) + 1)[:2],
            "name": rng.sample([asked, namesake], 2),
            "both": [asked, rng.choice([namesake, *strangers])],
        }[habit]
        query = {"country": asked.country, "name": asked.name}.get(
            habit, f"{asked.name} {asked.country}"
        )
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        parts += [
            (tokens.turn(f"<tool_call>\n{call}\n</tool_call>"), True),
            (tokens.tool_result(show([t.document() for t in found])), False),
        ]
    _, answer = found[0].asked(kind)
    source = f" [{found[0].id}]" if habit != "guess" and rng.random() < cite else ""
    return [*parts, (tokens.turn(answer + source), True)]


def batches(tokens: ChatTokens, updates: int, size: int = 32) -> Iterator[list[Rows]]:
    rng = random.Random(0)
    for update in range(updates):
        skill = update < 0.6 * updates
        habits, cite = (SKILLS, 1.0) if skill else (HABITS, 0.5)
        episodes = [episode(tokens, rng, habits, cite) for _ in range(size)]
        short = [e for e in episodes if len(e) == 2]
        yield [rows(some) for some in (short, [e for e in episodes if len(e) > 2]) if some]


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer's merges are learnt from."""
    rng = random.Random(1)
    for town in towns(rng, 300):
        yield from (town.asked(kind)[0] for kind in KINDS)
        yield show([town.document()])
        yield json.dumps({"name": "search", "arguments": {"query": f"{town.name} {town.country}"}})
        yield "Tools: search(query)\nuser\nassistant\nsystem\nno document matches"


# ── the documents and the questions ──────────────────────────────────────────────────────────────


def write_data(folder: Path) -> None:
    """`corpus.jsonl`, `train.jsonl` and `val.jsonl`."""
    known = towns(random.Random(2), 160)
    corpus = folder / "corpus.jsonl"
    _write(corpus, [town.document() for town in known])
    for name, some in (("train", known[:256]), ("val", known[256:])):
        questions = []
        for town, kind in product(some, KINDS):
            question, answer = town.asked(kind)
            metadata = {"document": town.id, "corpus": str(corpus)}
            task = {"data_source": kind, "question": question, "answer": answer}
            questions.append({**task, "metadata": metadata})
        _write(folder / f"{name}.jsonl", questions)


def _write(path: Path, of: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in of))


def main(folder: Path, updates: int = 300) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    tools = ToolBox([Search({"corpus": str(folder / "corpus.jsonl")})]).schemas
    make(folder, texts(), lambda tokens: batches(tokens, updates), updates, tools)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
