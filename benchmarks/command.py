"""Command line of a package whose modules measure or break something, `benchmarks` and
`tests.chaos`: `python -m PACKAGE NAME [--json] [options]`.

Without a name it lists what there is; `NAME --help` has the options of one. A name is a module of
the package, with `async def run(…) -> BenchResult`: the keyword arguments of `run` are its options.

Exit codes: 0 every check holds; 1 one does not; 2 the command line is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.checks import BenchResult
from stepwell.cli.main import interruptible
from stepwell.trainer.errors import ConfigError

RECORDS = Path(__file__).with_name("recorded")
"""The last recorded run of a bench, a file each."""


def main(
    package: str, names: Mapping[str, str], about: str | None, argv: Sequence[str] | None = None
) -> int:
    """Run one of `names`, each with a line about it; returns the exit code.

    Args:
        about: help of the command.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    listed = listing(names)
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=f"{about}\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"python -m {package} NAME [--json] [options]",
    )
    parser.add_argument("name", metavar="NAME", choices=list(names))
    if not given:
        print(listed)
        return 0
    name = parser.parse_args(given[:1]).name
    module = load(package, name)
    options = argparse.ArgumentParser(
        prog=f"python -m {package} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument(
        "--keep", action="store_true", help=f"write {RECORDS.name}/NAME.json, which claims follow"
    )
    add_options(options, module.run)
    args = vars(options.parse_args(given[1:]))
    as_json, is_recorded = args.pop("json"), args.pop("keep")
    parts = [f"--{name}" for name in ("quick", "only") if args.get(name)]
    if is_recorded and parts:
        options.error(f"--keep is of a whole run; leave {' and '.join(parts)} out")
    try:
        commit = head() if is_recorded else None  # of the code that is measured
        result = asyncio.run(interruptible(module.run(**args)))
    except ConfigError as e:
        print(f"{package}: {e}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{package}: interrupted", file=sys.stderr)
        return 130
    if commit is not None:
        record(name, result, commit)
    if as_json:
        print(orjson.dumps(result.as_json(name)).decode())
    else:
        show(name, result)
    return 0 if all(check.holds for check in result.checks.values()) else 1


def head() -> str:
    """The checkout's commit.

    Raises:
        ConfigError: it is no checkout.
    """
    git = ("git", "-C", str(RECORDS), "rev-parse", "--short", "HEAD")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as e:
        raise ConfigError(
            f"--keep names the commit that was measured, and git does not tell it ({e}); run the "
            "bench in a clone of the repository"
        ) from e


def record(name: str, result: BenchResult, commit: str, folder: Path | None = None) -> None:
    """Keep a run of `commit` as the one whose figures README and docs tell
    (`tests/test_documents.py`)."""
    told = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit, **result.as_json(name)}
    data = orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    ((folder or RECORDS) / f"{name}.json").write_bytes(data)


def load(package: str, name: str) -> ModuleType:
    """The module that `name` stands for."""
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")


def listing(names: Mapping[str, str]) -> str:
    """The names with one line each."""
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {about}" for name, about in names.items())


def add_options(parser: argparse.ArgumentParser, run: Callable[..., Any]) -> None:
    """The keyword arguments of `run` as options: `n_kills: Annotated[int, "help"] = 3` is
    `--n-kills`. A `bool` is a flag, a `Sequence` takes several values, a `Literal` has choices."""
    hints = get_type_hints(run, include_extras=True)
    for name, parameter in inspect.signature(run).parameters.items():
        hint, text = hints[name], None
        if get_origin(hint) is Annotated:
            hint, text = get_args(hint)
        settings: dict[str, Any] = {"default": parameter.default, "help": text}
        if hint is bool:
            settings["action"] = "store_true"
        else:
            if isinstance(hint, UnionType):  # X | None
                (hint,) = set(get_args(hint)) - {NoneType}
            if get_origin(hint) is Sequence:
                settings["nargs"] = "+"
                (hint,) = get_args(hint)
            choices = get_args(hint) if get_origin(hint) is Literal else None
            settings |= {"type": type(choices[0]) if choices else hint, "choices": choices}
            settings["metavar"] = None if choices else name.upper()
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def show(name: str, result: BenchResult) -> None:
    """Each figure that is a table, then the other figures and the checks."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width; rich would cut columns at 80
    for title, rows in _tables(name, result):
        first, *others = dict.fromkeys(key for row in rows for key in row)
        table = Table(title=title, title_justify="left")
        table.add_column(first.replace("_", " "), min_width=20)
        for column in others:
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            style = "red" if row.get("holds") == "NO" else None
            table.add_row(*(_text(row.get(key, "–")) for key in (first, *others)), style=style)
        console.print(table)


def _tables(name: str, result: BenchResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
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
        yield name, rest


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
