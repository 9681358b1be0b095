"""Command that gives every row of a JSONL file an `instance_id`, which slime's Agent Rollout wants.

    python -m stepwell.gateway.slime_buffer.assign_instance_id --input_path data.jsonl
        [--task_type math] [--output_path data_processed.jsonl]

Arguments and names are those of slime's tool (`slime_plugins/rollout_buffer/tools/`, before commit
393a1bb): rows without one become `TASK_TYPE_0`, `TASK_TYPE_1`, …, in the order of the file, but for
ids that other rows have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepwell.datapool.sealed import written_durably

KEY = "instance_id"


def main() -> int:
    parser = argparse.ArgumentParser(description="Give every row of a JSONL file an instance_id.")
    parser.add_argument("--input_path", type=Path, required=True, help="the JSONL file")
    parser.add_argument("--task_type", default="math", help="what new ids begin with")
    parser.add_argument("--output_path", type=Path, help="default: INPUT_processed.jsonl")
    args = parser.parse_args()
    source: Path = args.input_path
    target: Path = args.output_path or source.with_name(f"{source.stem}_processed.jsonl")
    try:
        if target.resolve() == source.resolve():
            raise ValueError(f"--output_path is the input itself, {source}; name another file")
        n = assign(source, target, args.task_type)
    except (OSError, ValueError) as e:
        print(f"assign_instance_id: {e}", file=sys.stderr)
        return 2
    print(f"{n} rows with {KEY} are in {target}")
    return 0


def assign(source: Path, target: Path, task_type: str) -> int:
    """Write the rows of `source` to `target`, each with an `instance_id`; all of them or no file.

    Returns:
        The number of rows.

    Raises:
        ValueError: a line is no JSON object.
    """
    taken = {str(row[KEY]) for row in _rows(source) if KEY in row}
    number = n = 0
    with written_durably(target) as file:
        for row in _rows(source):
            if KEY not in row:
                while (name := f"{task_type}_{number}") in taken:
                    number += 1
                number += 1
                row[KEY] = name
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            n += 1
    return n


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number} is no JSON object; write one per line")
            yield row


if __name__ == "__main__":
    sys.exit(main())
