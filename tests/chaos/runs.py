"""`python -m tests.chaos runs`: training runs under random faults, checked against a log that the
agents write. `tests/chaos/__init__.py` has the parts, `scenarios.py` the runs.

The same seed gives the same faults again. What a failed run left stays in `--folder`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.checks import BenchResult, chosen_sections
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.verify import verify

KEYS = (
    "steps_lost",
    "steps_extra",
    "steps_changed",
    "trained_twice",
    "groups_lost",
    "pictures_lost",
    "versions_wrong",
    "rewards_from_failures",
    "silent_aborts",
    "silent_drops",
    "not_archived",
)
"""Figures that must be 0, besides the violations that the lives met."""
SHOWN = 20


async def run(
    *,
    seed: Annotated[int | None, "default: one of the clock's"] = None,
    only: Annotated[Sequence[str], f"of {', '.join(SCENARIOS)}"] = (),
    faults: Annotated[int | None, "of each scenario (default: its share of 89)"] = None,
    folder: Annotated[Path | None, "kept; default: a temporary one"] = None,
) -> BenchResult:
    """All scenarios, or those named in `only`, one after the other.

    Raises:
        ConfigError: `only` names none.
    """
    names = chosen_sections(only, SCENARIOS)
    seed = time.time_ns() % 100_000 if seed is None else seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    base = (folder or Path(tempfile.mkdtemp(prefix="stepwell-chaos-"))).absolute()
    for name in names:
        (base / name).mkdir(parents=True)
    rows = {name: await scenario(base / name, name, seed, faults) for name in names}
    violations = [f"{name}: {v}" for name, row in rows.items() for v in row.pop("violations")]
    result = BenchResult()
    result.zero(
        **{key: sum(row[key] for row in rows.values()) for key in KEYS}, violations=len(violations)
    )
    result.figures["seed"] = seed
    for name, row in rows.items():
        result.figures[name] = [{"figure": key, "value": value} for key, value in row.items()]
    if violations:
        result.figures["violations, the first"] = [{"violation": v} for v in violations[:SHOWN]]
        result.figures["everything is in"] = str(base)
    elif folder is None:
        shutil.rmtree(base)
    return result


async def scenario(folder: Path, name: str, seed: int, faults: int | None) -> dict[str, Any]:
    begin, share = SCENARIOS[name]
    began = time.monotonic()
    under_fire = await begin(folder, f"{seed}/{name}", faults or share)
    found, books = await verify(under_fire), under_fire.books

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{what}: {n}" for what, n in sorted(counts.items())) or "none"

    return {
        "faults": listed(books.faults),
        **{key: found.figures.pop(key, 0) for key in KEYS},
        **found.figures,
        "answers became": listed(found.became),
        "lives": books.lives,
        "lives excused": listed(books.excused),
        "recovery_s_p50": statistics.median(books.recovery_s or [0.0]),
        "recovery_s_max": max(books.recovery_s, default=0.0),
        "elapsed_s": round(time.monotonic() - began),
        "violations": [*books.violations, *found.violations],
    }
