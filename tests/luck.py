"""Runs every test file that starts a server or an engine several times, for what passes by luck.

    python -m tests.luck [--times 20] [FILE…]     `make test-luck`

A file starts one if it, or a fixture that it names, does. Files are run in turns, so that a machine
that gets busier meets all of them; the first failure of each is shown, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
STARTS = re.compile(
    r"\b(worlds?|rigs?|fleets?|wire|engine|engines|launch|cluster|served?|serving|Supervisor"
    r"|start_data_pool|start_shards|start_cluster|subprocess|bind|uvicorn|aiohttp|start_server)\b"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.luck", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    files = args.files or [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if STARTS.search(path.read_text())
    ]
    failures: Counter[Path] = Counter()
    for turn in range(1, args.times + 1):
        for path in files:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", str(path)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode not in (0, 5):  # 5: all of it is marked `long`
                failures[path] += 1
                print(f"{path} failed in turn {turn}", flush=True)
                if failures[path] == 1:
                    print(done.stdout[-6000:], flush=True)
        n = failures.total()
        print(f"turn {turn}: {len(files)} files, {n} failures so far", flush=True)
    for path, n in failures.most_common():
        print(f"{path}: {n} of {args.times}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
