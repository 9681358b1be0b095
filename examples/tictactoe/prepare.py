"""Makes what the game is trained with: a 0.85 M-parameter model that knows how to move but not how
to win, and the games.

    python -m examples.tictactoe.prepare runs/tictactoe-model

The supervised part shows games of a player who puts a mark into any free cell, as the opponent
does. Nothing in it tells a good move from a poor one, and no game's end is shown: what wins is for
reinforcement learning to find out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.tictactoe.agent import RULES, Game
from stepwell.quickstart.make_model import ChatTokens, Episode, Rows, make, rows

TRAIN, VAL, WARM_UP = range(1_000, 6_000), range(9_000, 9_128), 100_000
"""Seeds of opponents: to train against, to evaluate against, and the first of the supervised
ones."""


def question(seed: int) -> str:
    """The rules, the empty board, and a number that tells this game's prompt from another's."""
    return f"Game {seed % 10_000}. {RULES}\n{Game(seed).opening}"


def episode(tokens: ChatTokens, seed: int) -> Episode:
    """One game of a player who moves at random."""
    rng, game = random.Random(-seed), Game(seed)
    parts = [(tokens.prompt(question(seed)), False)]
    while True:
        move = f"[{rng.choice(game.free())}]"
        parts.append((tokens.turn(move), True))
        heard = game.play(move)
        if game.reward is not None:
            return parts
        parts.append((tokens.user(heard), False))


def batches(tokens: ChatTokens, updates: int, size: int = 32) -> Iterator[list[Rows]]:
    for first in range(WARM_UP, WARM_UP + updates * size, size):
        yield [rows([episode(tokens, seed) for seed in range(first, first + size)])]


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer's merges are learnt from. No marks side by side: each
    stays a token."""
    for seed in range(WARM_UP, WARM_UP + 200):
        yield from (question(seed), "user", "assistant", "system", "[0]", Game(seed).play("none"))


def write_data(folder: Path) -> None:
    for name, seeds in (("train", TRAIN), ("val", VAL)):
        games = [{"question": question(seed), "metadata": {"seed": seed}} for seed in seeds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))


def main(folder: Path, updates: int = 150) -> None:
    make(folder, texts(), lambda tokens: batches(tokens, updates), updates)
    write_data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
