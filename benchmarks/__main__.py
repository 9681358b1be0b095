"""`python -m benchmarks NAME [--json|--markdown] [options]`: run a benchmark and check its bounds.

Without a name it lists the benchmarks. `python -m benchmarks NAME --help` has the options of one.

Exit codes: 0 every bound holds; 1 one does not; 2 the command line is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from benchmarks.registry import BENCHES, Form, load, show
from stepwell.cli import interruptible
from stepwell.trainer.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m benchmarks NAME [--json|--markdown] [options]",
    )
    parser.add_argument("name", metavar="NAME", choices=list(BENCHES))
    if not given:
        print(listing())
        return 0
    name = parser.parse_args(given[:1]).name
    module = load(name)
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    form = options.add_mutually_exclusive_group()
    for each, text in (("json", "print one JSON object"), ("markdown", "print Markdown tables")):
        form.add_argument(f"--{each}", dest="form", action="store_const", const=each, help=text)
    add_options(options, module.run)
    args = vars(options.parse_args(given[1:]))
    chosen: Form = args.pop("form") or "table"
    try:
        result = asyncio.run(interruptible(module.run(**args)))
    except ConfigError as e:
        print(f"benchmarks: {e}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("benchmarks: interrupted", file=sys.stderr)
        return 130
    show(name, result, chosen)
    return 0 if all(check.holds for check in result.checks.values()) else 1


def listing() -> str:
    """The names with one line each."""
    width = max(map(len, BENCHES))
    return "\n".join(f"{name:{width}}  {bench.about}" for name, bench in BENCHES.items())


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


if __name__ == "__main__":
    sys.exit(main())
