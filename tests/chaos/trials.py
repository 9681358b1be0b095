"""Results of the modules that damage files, a trial after another."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.checks import BenchResult


def result_of(
    try_all: Callable[[int, Path], Mapping[str, Any]], seed: int | None, name: str
) -> BenchResult:
    """Run trials; the result holds if none failed.

    Args:
        try_all: runs the trials of a seed in a folder; returns their summary, with `failures`.
        seed: None: a random one.
        name: beginning of the folder's name.
    """
    seed = random.randrange(1 << 30) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix=name) as scratch:
        found = try_all(seed, Path(scratch))
    result = BenchResult()
    result.zero(failures=len(found["failures"]))
    for key, value in found.items():
        if key == "failures":
            if value:
                result.figures[key] = [{"failure": str(each)} for each in value]
        elif isinstance(value, dict):
            result.figures[key] = [{key: name, "trials": str(n)} for name, n in value.items()]
        else:
            result.figures[key] = value
    return result
