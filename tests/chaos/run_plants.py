"""`python -m tests.chaos.run_plants`: each plant of `plants.py` in a small run of its own. The
verifier has to notice all of them, by the check that is meant for it, and find nothing in the first
run, which has none.

    python -m tests.chaos.run_plants [--only silent_abort lost_step] [--folder /tmp/plants]

Exit code 1: a plant was not noticed, or the run without one has violations.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.lives import Run
from tests.chaos.plants import PLANTS
from tests.chaos.scenarios import OPTIONS
from tests.chaos.verify import verify

NONE = "none"
"""Name of the run without a plant."""
STEPS = 12
"""Optimizer steps of the run without a plant."""
KILL = Fault("kill", "driver", 0.0, 0.0, 0.0, settles=True)


async def run_small(folder: Path, name: str) -> Run:
    """One life, or two with a kill in between; ended by Ctrl-C, which writes a checkpoint."""
    plant = PLANTS.get(name)
    steps, kill_at = (plant.steps, plant.kill_at) if plant is not None else (STEPS, 0)
    run = Run(folder, OPTIONS, plant=name if plant is not None else None)
    async with run.running():
        if kill_at:
            await run.until(partial(run.trains, kill_at - 1), f"{kill_at} steps")
            await asyncio.sleep(0.5)
            run.inject(KILL)
        await run.until(partial(run.trains, steps - 1), f"{steps} steps")
        await run.interrupt()
    return run


def try_plant(folder: Path, name: str) -> bool:
    """Run the plant, print a line; return True if the verifier said what it should."""
    began = time.monotonic()
    folder.mkdir(parents=True)
    run = asyncio.run(run_small(folder, name))
    found = verify(run)
    violations = [*run.books.violations, *found.violations]
    if name == NONE:
        holds, expected = not violations, "nothing"
    else:
        kinds = PLANTS[name].noticed_as
        holds, expected = any(found.figures[kind] for kind in kinds), " or ".join(sorted(kinds))
    said = "as it should" if holds else f"NOT as it should: expected {expected}"
    n_steps, seconds = found.figures["optimizer_steps"], time.monotonic() - began
    print(
        f"{name:20} {said}; {len(violations)} violations, {found.figures['answers']} answers, "
        f"{n_steps} optimizer steps, {seconds:.0f} s",
        *(f"    {line:.300}" for line in violations[: 3 if holds else 10]),
        sep="\n",
        flush=True,
    )
    return holds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run_plants", description=__doc__)
    names = [NONE, *PLANTS]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    args = parser.parse_args(argv)
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="stepwell-plants-"))).absolute()
    holds = {name: try_plant(folder / name, name) for name in args.only}
    planted = [name for name in args.only if name != NONE]
    print(f"{sum(holds[name] for name in planted)} of {len(planted)} plants noticed")
    if not all(holds.values()):
        print(f"everything is in {folder}")
        return 1
    if args.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
