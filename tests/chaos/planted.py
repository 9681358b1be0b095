"""`python -m tests.chaos planted`: each plant of `plants.py` in a small run of its own. `verify.py`
has to notice all of them, by the check that is meant for it, and find nothing in the first run,
which has none.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.checks import BenchResult, chosen_sections
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


async def try_plant(folder: Path, name: str) -> dict[str, Any]:
    """Run the plant; a row with what the verifier said, and whether that is what it should."""
    began = time.monotonic()
    under_test = await run_small(folder, name)
    found = await verify(under_test)
    violations = [*under_test.books.violations, *found.violations]
    if name == NONE:
        holds, expected = not violations, "nothing"
    else:
        kinds = PLANTS[name].noticed_as
        holds, expected = any(found.figures[kind] for kind in kinds), " or ".join(sorted(kinds))
    print(f"{name}: {'noticed' if holds else 'MISSED'}", file=sys.stderr, flush=True)
    return {
        "plant": name,
        "expected": expected,
        "as it should": "yes" if holds else "NO",
        "violations": len(violations),
        "answers": found.figures["answers"],
        "optimizer steps": found.figures["optimizer_steps"],
        "seconds": round(time.monotonic() - began),
        "the first": "" if holds and name != NONE else "; ".join(violations[:3])[:300],
    }


async def run(
    *,
    only: Annotated[Sequence[str], f"of {NONE}, {', '.join(PLANTS)}"] = (),
    folder: Annotated[Path | None, "kept; default: a temporary one"] = None,
) -> BenchResult:
    """All plants, or those named in `only`.

    Raises:
        ConfigError: `only` names none.
    """
    names = chosen_sections(only, (NONE, *PLANTS))
    base = (folder or Path(tempfile.mkdtemp(prefix="stepwell-plants-"))).absolute()
    for name in names:
        (base / name).mkdir(parents=True)
    rows = [await try_plant(base / name, name) for name in names]
    result = BenchResult(figures={"plants": rows})
    missed = [row["plant"] for row in rows if row["as it should"] == "NO"]
    result.zero(plants_not_noticed=len([name for name in missed if name != NONE]))
    result.zero(violations_without_a_plant=missed.count(NONE))
    if missed:
        result.figures["everything is in"] = str(base)
    elif folder is None:
        shutil.rmtree(base)
    return result
