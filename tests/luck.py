"""Runs every test file that starts a server or an engine several times, for what passes by luck.

    python -m tests.luck [--times 20] [--lanes 2] [FILE…]     `make test-luck`

A file starts one if it, or a fixture that it names, does. Files are run in turns, so that a machine
that gets busier meets all of them; the first failure of each is shown, and the exit code is 1. A
turn has interpreters of its own, one per lane (the order of a set of strings is its own, too). It
collects the tests of all its files, and each file runs in a process that forks from it: to import
torch, transformers, Ray and the product anew would cost more than most files do.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
STARTS = re.compile(
    r"\b(worlds?|rigs?|fleets?|wire|engine|engines|launch|cluster|served?|serving|Supervisor"
    r"|start_data_pool|start_shards|start_cluster|subprocess|bind|uvicorn|aiohttp|start_server)\b"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.luck", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1, help="files that run at a time")
    args = parser.parse_args()
    if min(args.times, args.lanes) < 1:
        parser.error("--times and --lanes are 1 or more")
    files = args.files or [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if STARTS.search(path.read_text())
    ]
    if args.times == 1 and args.lanes == 1:
        return int(bool(run_each(files)))
    failures: Counter[str] = Counter()
    for turn in range(1, args.times + 1):
        began = time.monotonic()
        for line in one_turn(files, args.lanes):
            print(line, end="", flush=True)
            if line.startswith(FAILED):
                failures[line.removeprefix(FAILED).strip()] += 1
        took = time.monotonic() - began
        said = f"turn {turn}: {len(files)} files, {took:.0f} s, {failures.total()} failures so far"
        print(said, flush=True)
    for path, n in failures.most_common():
        print(f"{path}: {n} of {args.times}")
    return int(bool(failures))


FAILED = "failed: "


def one_turn(files: list[Path], lanes: int) -> list[str]:
    """Lines that the lanes print, once all are through. A file that a lane did not come to has
    failed."""
    command = [sys.executable, "-m", "tests.luck", "--times", "1"]
    running = [
        (
            of_lane,
            subprocess.Popen(
                [*command, *map(str, of_lane)], cwd=ROOT, stdout=subprocess.PIPE, text=True
            ),
        )
        for i in range(lanes)
        if (of_lane := files[i::lanes])
    ]
    lines: list[str] = []
    for of_lane, lane in running:
        said = lane.communicate()[0].splitlines(keepends=True)
        left = [path for path in of_lane if not any(line.endswith(cost_of(path)) for line in said)]
        lines += said
        if left:
            lines.append(f"a lane ended with {lane.returncode} before {left[0]} had\n")
            lines += [f"{FAILED}{path}\n" for path in left]
    return lines


def cost_of(path: Path) -> str:
    """End of the line that tells what the file cost, once it is through."""
    return f" s CPU {path}\n"


def run_each(files: list[Path]) -> int:
    """Number of files that fail."""
    with redirect_stdout(io.StringIO()):  # a file that cannot be collected fails below
        pytest.main(["-q", "--collect-only", *map(str, files)])
    failures = 0
    for path in files:
        with tempfile.TemporaryFile("w+") as output:
            if not (pid := os.fork()):
                run_one(path, output.fileno())
            _, status, usage = os.wait4(pid, 0)
            code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            print(f"{cpu_s:6.1f}{cost_of(path)}", end="", flush=True)
            if code not in (0, 5):  # 5: all of it is marked `long`
                failures += 1
                output.seek(0)
                print(output.read()[-6000:], flush=True)
                print(f"{FAILED}{path}", flush=True)
    return failures


def run_one(path: Path, output: int) -> NoReturn:
    os.dup2(output, 1)
    os.dup2(output, 2)
    random.seed()
    np.random.seed()  # a forked process has its parent's
    code = pytest.main(["-q", "-x", "--no-header", "-m", "not long", str(path)])
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
