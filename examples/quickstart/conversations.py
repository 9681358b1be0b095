"""Writes conversations in which the quickstart's agent uses its calculator and answers right: what
`configs/sft.yaml` trains on.

    python -m stepwell.quickstart.conversations [FILE] [--n 960]

A row has `messages` and `tools` in OpenAI's form, as any data of conversations. The problems are
those of the quickstart's data set, from seeds that no preset trains or validates on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepwell.quickstart.agent import TOOLS, calculator

SEED = 70_000_000


def conversations(n: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """`n` rows."""
    import reasoning_gym  # 1.3 s to import

    tasks = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=n, min_terms=2, max_terms=3, min_digits=2, max_digits=3
    )
    for i, task in enumerate(tasks):
        arguments = json.dumps({"expression": task["metadata"]["expression"]})
        call = {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": "calculator", "arguments": arguments},
        }
        said = [
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": calculator(arguments)},
            {"role": "assistant", "content": task["answer"]},
        ]
        yield {"instance_id": f"chain_sum-{seed + i}", "messages": said, "tools": TOOLS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", default=Path("runs/sft.jsonl"))
    parser.add_argument("--n", type=int, default=960)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(row) + "\n" for row in conversations(options.n))
    options.file.write_text("".join(rows), encoding="utf-8")
    print(f"{options.n} conversations in {options.file}")


if __name__ == "__main__":
    main()
