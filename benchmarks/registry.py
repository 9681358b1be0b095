"""`python -m benchmarks NAME [--json]`: measured claims, each with its bound.

A bench returns its figures and `Check`s; the exit code is 1 if one does not hold. Timing is
compared only as a ratio within one run: the machine may be shared and noisy. A figure may be a
table, a list of rows with the same keys.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

from benchmarks.checks import BenchResult
from stepwell.trainer.errors import ConfigError

BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "gateway": "benchmarks.gateway",
        "overlap": "benchmarks.overlap",
        "pool": "benchmarks.pool",
        "pool-crash": "benchmarks.pool_crash",
        "pool-starvation": "benchmarks.pool.starvation",
        "trainer": "benchmarks.trainer",
        "resume": "benchmarks.resume",
    }
)
"""Name -> module with `async def run(…) -> BenchResult`; its keyword arguments are its options."""

Form: TypeAlias = Literal["table", "json", "markdown"]


async def run_bench(name: str, *, form: Form = "table", **options: Any) -> int:
    """Run it, print its result as `form`, and return the exit code.

    Raises:
        ConfigError: the bench has no such option.
    """
    run = cast(Callable[..., Awaitable[BenchResult]], importlib.import_module(BENCHES[name]).run)
    for option in options:
        if option not in inspect.signature(run).parameters:
            raise ConfigError(f"bench {name} has no option --{option}; leave it out")
    result = await run(**options)
    match form:
        case "json":
            import orjson

            print(orjson.dumps(result.as_json(name)).decode())
        case "markdown":
            print(as_markdown(name, result))
        case "table":
            _print(name, result)
    return 0 if all(check.holds for check in result.checks.values()) else 1


def as_markdown(name: str, result: BenchResult) -> str:
    """The tables of `result`, to be pasted into a page."""
    return "\n\n".join(_markdown(rows) for _, rows in _tables(name, result))


def _markdown(rows: list[dict[str, Any]]) -> str:
    columns = _columns(rows)
    lines = [
        [column.replace("_", " ") for column in columns],
        ["---"] * len(columns),
        *([_text(row.get(column, "–")) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _tables(name: str, result: BenchResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(title, rows) of each figure that is a table, then of the other figures and the checks."""
    rest: list[dict[str, Any]] = []
    for key, value in result.figures.items():
        if isinstance(value, list):
            yield key, value
        else:
            rest.append({"figure": key, "value": value, "bound": "", "holds": ""})
    for key, check in result.checks.items():
        bound = f"{'≤' if check.upper else '≥'} {_text(check.bound)}"
        holds = "yes" if check.holds else "NO"
        rest.append({"figure": key, "value": check.value, "bound": bound, "holds": holds})
    if rest:
        yield f"bench {name}", rest


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _print(name: str, result: BenchResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width; rich would cut columns at 80
    for title, rows in _tables(name, result):
        table = Table(title=title, title_justify="left")
        first, *others = _columns(rows)
        table.add_column(first.replace("_", " "), min_width=20)
        for column in others:
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            style = "red" if row.get("holds") == "NO" else None
            table.add_row(*(_text(row.get(key, "–")) for key in (first, *others)), style=style)
        console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
