"""Makes what the agent with a shell is trained with: a 0.85 M-parameter model that can ask the
shell for a sum but seldom does, and the sums.

    python -m examples.harness_shell.prepare runs/harness_shell-model

The prompts are those that `llm`, the command-line agent, sends: its tool's description is written
as `llm` writes it. In 60 % of what is shown the model guesses; what pays is for reinforcement
learning to find out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepwell.quickstart.make_model import ChatTokens, Episode, Rows, make, rows

TRAIN, VAL, WARM_UP = range(1_000, 5_000), range(9_000, 9_032), 100_000
"""Seeds of the sums: to train on, to evaluate on, and the first of the supervised ones."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a shell command.",
            "parameters": {
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "type": "object",
            },
        },
    }
]
"""The function `shell` of the preset, in the form in which `llm` sends it."""


def expression(seed: int) -> str:
    rng = random.Random(seed)
    numbers = [rng.randrange(10, 1000) for _ in range(rng.choice((2, 3)))]
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {rng.choice('+-')} {number}"
    return text


def answer(seed: int) -> int:
    parts = expression(seed).split()
    signs = [1, *(1 if sign == "+" else -1 for sign in parts[1::2])]
    return sum(sign * int(number) for sign, number in zip(signs, parts[::2], strict=True))


def question(seed: int) -> str:
    return f"What is {expression(seed)}?"


def command(seed: int) -> str:
    arguments = json.dumps({"command": f"echo $(({expression(seed)}))"})
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


def episode(tokens: ChatTokens, seed: int, tool_share: float) -> Episode:
    rng = random.Random(-seed)
    prompt = (tokens.prompt(question(seed)), False)
    if rng.random() < tool_share:
        result = str(answer(seed))
        call = (tokens.turn(command(seed)), True)
        return [prompt, call, (tokens.tool_result(result), False), (tokens.turn(result), True)]
    off = rng.choice([-100, -20, -10, -1, 1, 10, 20, 100]) * rng.randint(0, 1)
    return [prompt, (tokens.turn(str(answer(seed) + off)), True)]


def batches(tokens: ChatTokens, updates: int, size: int = 32) -> Iterator[list[Rows]]:
    """First the skill alone, then the mixture, in which 40 % ask the shell."""
    for update in range(updates):
        first, share = WARM_UP + update * size, 1.0 if update < 0.4 * updates else 0.4
        shown = [episode(tokens, seed, share) for seed in range(first, first + size)]
        short = [parts for parts in shown if len(parts) == 2]
        long = [parts for parts in shown if len(parts) > 2]
        yield [rows(episodes) for episodes in (long, short) if episodes]


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer's merges are learnt from."""
    for seed in range(WARM_UP, WARM_UP + 1000):
        yield from (question(seed), command(seed), json.dumps(TOOLS))
        yield "You are a helpful assistant. user assistant system tool no output sh: syntax error"


def write_data(folder: Path) -> None:
    for name, seeds in (("train", TRAIN), ("val", VAL)):
        tasks = [{"question": question(seed), "answer": str(answer(seed))} for seed in seeds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))


def main(folder: Path, updates: int = 700) -> None:
    make(folder, texts(), lambda tokens: batches(tokens, updates), updates, TOOLS)
    write_data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
