"""`stepwell bench NAME [--json]`: measured claims, each with its bound.

A bench returns its figures and `Check`s; the exit code is 1 if one does not hold. Timing is
compared only as a ratio within one run: the machine may be shared and noisy.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import orjson
from rich.console import Console
from rich.table import Table

from trainer.bench.checks import BenchResult

BENCHES: Mapping[str, str] = MappingProxyType({"overlap": "trainer.bench.overlap"})
"""Name -> module with `async def run() -> BenchResult`."""


async def run_bench(name: str, *, as_json: bool) -> int:
    run = cast(Callable[[], Awaitable[BenchResult]], importlib.import_module(BENCHES[name]).run)
    result = await run()
    if as_json:
        print(orjson.dumps(result.as_json(name)).decode())
    else:
        _print(name, result)
    return 0 if all(check.holds for check in result.checks.values()) else 1


def _print(name: str, result: BenchResult) -> None:
    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("holds")
    for key, value in result.figures.items():
        table.add_row(key, _text(value), "", "")
    for key, check in result.checks.items():
        bound = f"{'≤' if check.upper else '≥'} {_text(check.bound)}"
        table.add_row(key, _text(check.value), bound, "yes" if check.holds else "[red]NO")
    Console().print(table)


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
