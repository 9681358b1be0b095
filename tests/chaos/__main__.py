"""`python -m tests.chaos --seed 7`: see `tests/chaos/__init__.py`. Exit code 1: something does not
hold; the same seed gives the same faults again."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.verify import verify

KEYS = (
    "steps_lost",
    "steps_extra",
    "steps_changed",
    "trained_twice",
    "groups_lost",
    "versions_wrong",
    "rewards_from_failures",
    "silent_aborts",
    "silent_drops",
)
"""Figures that must be 0, besides the violations that the lives met."""
SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--faults", type=int, help="of each scenario (default: its share of 60)")
    parser.add_argument("--only", choices=SCENARIOS, nargs="+", default=list(SCENARIOS))
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left then, either
    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="stepwell-chaos-"))
    results = {
        name: scenario(folder.absolute() / name, name, args.seed, args.faults) for name in args.only
    }
    violations = [f"{name}: {v}" for name, r in results.items() for v in r["violations"]]
    if args.json:
        print(json.dumps({"seed": args.seed, "scenarios": results}, indent=1))
    else:
        for name, result in results.items():
            lines = (f"  {key}: {value}" for key, value in result.items() if key != "violations")
            print(name, *lines, sep="\n")
    again = f"seed {args.seed}; everything is in {folder}"
    shown = [*violations[:SHOWN], f"… {len(violations) - SHOWN} more"][: len(violations)]
    print(f"{len(violations)} violations; {again}", *shown, sep="\n  ", file=sys.stderr)
    if not violations and args.folder is None:
        shutil.rmtree(folder)
    return bool(violations)


def scenario(folder: Path, name: str, seed: int, faults: int | None) -> dict[str, Any]:
    begin, share = SCENARIOS[name]
    folder.mkdir(parents=True)
    began = time.monotonic()
    run = asyncio.run(begin(folder, f"{seed}/{name}", faults or share))
    found, books = verify(run), run.books
    return {
        "faults": dict(books.faults),
        **{key: found.figures.pop(key, 0) for key in KEYS},
        "figures": dict(found.figures),
        "answers_became": dict(found.became),
        "lives": books.lives,
        "lives_excused": dict(books.excused),
        "recovery_s_p50": statistics.median(books.recovery_s) if books.recovery_s else None,
        "recovery_s_max": max(books.recovery_s, default=None),
        "elapsed_s": round(time.monotonic() - began),
        "violations": [*books.violations, *found.violations],
    }


if __name__ == "__main__":
    sys.exit(main())
