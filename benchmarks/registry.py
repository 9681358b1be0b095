"""The names of the benchmarks, and how a result is printed.

A bench is a module with `async def run(…) -> BenchResult`; the keyword arguments of `run` are its
options. It returns figures and `Check`s. A figure may be a table, a list of rows with the same
keys. Timing is compared only as a ratio within one run: the machine may be shared and noisy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from benchmarks.checks import BenchResult


class Bench(NamedTuple):
    module: str
    about: str
    """One line of what it measures."""


BENCHES: Mapping[str, Bench] = MappingProxyType(
    {
        name: Bench(f"benchmarks.{module}", about)
        for name, module, about in (
            ("gateway", "gateway", "requests, latency, CPU and memory, beside other gateways"),
            ("gateway-updates", "gateway_updates", "weight updates with requests in flight"),
            ("pool", "pool", "steps/s, latency and memory, beside other stores"),
            ("pool-crash", "pool_crash", "kill -9 of the pool under load: nothing is lost"),
            ("pool-starvation", "pool.starvation", "what hanging rollouts do to other groups"),
            ("trainer", "trainer", "tokens/s and memory of a step by row form, beside TRL"),
            ("overlap", "overlap", "generation and training at once, by one after the other"),
            ("live", "live", "a service's traffic trains its model, a kill included"),
            ("resume", "resume", "kill -9 of each part of a run: none lost or doubled"),
            (
                "publication-kills",
                "publication_kills",
                "engines killed while weights are published",
            ),
            ("lag", "lag", "score by lag and off-policy method: many quickstarts, hours"),
            ("size", "size", "lines, public names and configuration keys, by room"),
        )
    }
)

Form: TypeAlias = Literal["table", "json", "markdown"]


def load(name: str) -> ModuleType:
    """The module of a bench."""
    return importlib.import_module(BENCHES[name].module)


def show(name: str, result: BenchResult, form: Form) -> None:
    """Print a result."""
    match form:
        case "json":
            print(orjson.dumps(result.as_json(name)).decode())
        case "markdown":
            print(as_markdown(name, result))
        case "table":
            _print(name, result)


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
