"""This module is the commands that look into a run, alive or ended: `status`, `top`, `groups`,
`show`, `view`, `data export`, `data import`.

    stepwell status [RUN]            one screen
    stepwell top    [RUN]            the same, live
    stepwell groups [RUN]            the pool's groups, and why others were dropped
    stepwell view   [RUN]            the dashboard of a run that has ended
    stepwell show   UID [RUN]        the tokens of a trajectory, what is trained, the tree

Owns their arguments. What is shown is `show/status.py`'s and `show/trajectory.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stepwell.track.output import print_line
from stepwell.trainer.errors import ConfigError

if TYPE_CHECKING:  # a command loads what it needs
    from rich.console import RenderableType

    from stepwell.show.doctor import Finding
    from stepwell.show.run import RunView

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PIPED_WIDTH = 160
"""Columns of what is no terminal: names are not cut there."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    *,
    description: str | None = None,
    has_run: bool = False,
    has_json: bool = True,
) -> argparse.ArgumentParser:
    """The command `name`, which `run` does; the exit code is 0 unless that returns one.

    Args:
        description: of its own help, if that says more than `text`.
        has_run: which run is looked into is its last argument.
    """
    command = commands.add_parser(name, help=text, description=description or text)
    command.set_defaults(run=run)
    if has_run:
        add_run(command)
    if has_json:
        command.add_argument("--json", action="store_true", help="JSON, for programs")
    return command


def add_commands(commands: Commands) -> None:
    add_command(commands, "status", _status, "how a run is doing, on one screen", has_run=True)
    top = add_command(
        commands,
        "top",
        _top,
        "the same, live",
        description="how a run is doing, live",
        has_run=True,
    )
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="default: 1")
    text = "list the groups in a run's pool, and why others were dropped"
    groups = add_command(commands, "groups", _groups, text, has_run=True)
    text = "the tokens of a trajectory, what is trained of them, and its tree of turns"
    show = add_command(commands, "show", _show, text)
    text = "of a trajectory or a group, live, archived or deleted; or the beginning of one"
    show.add_argument("uid", metavar="UID", help=text)
    add_run(show)
    show.add_argument("--tokens", action="store_true", help="a line per token")
    text = "the dashboard of a run that has ended; of one that is alive, its address"
    view = add_command(commands, "view", _view, text, has_run=True, has_json=False)
    view.add_argument(
        "--port", type=int, default=8120, metavar="N", help="default: 8120; 0: a free one"
    )
    groups.add_argument("--channel", default="train", help="default: train")
    _add_filters(groups, ("open", "ready", "held", "leased"))
    groups.add_argument("--prompt", metavar="UID", help="one group, with its trajectories")
    groups.add_argument("--limit", type=int, default=50, metavar="N", help="default: 50")

    text = "look for what keeps a run from working, or makes it slow"
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        text,
        description=f"{text}: this machine; with --config also the model and all that it names; "
        "with RUN the run's files and score and, alive, its gateway and engines; with --engine a "
        "server alone",
    )
    doctor.add_argument("--config", help="a preset's name or a YAML file")
    doctor.add_argument(
        "--engine", metavar="URL", help="of an engine: what Stepwell asks of it, and what it lacks"
    )
    doctor.add_argument("--kind", help="the engine's `engine.kind`, if it does not name itself")
    doctor.add_argument(
        "overrides", nargs="*", metavar="RUN | KEY=VALUE", help="e.g. model.path=Qwen/Qwen3-0.6B"
    )


def add_data_commands(actions: Commands) -> None:
    text = "write the trajectories in a run's pool to a file, Parquet or JSONL"
    export = add_command(actions, "export", _export, text)
    export.add_argument("file", metavar="FILE", type=Path, help="x.parquet or x.jsonl")
    text = "put the complete trajectories of an exported file into a live run's pool"
    imports = add_command(actions, "import", _import, text)
    imports.add_argument("file", metavar="FILE", type=Path, help="as `data export` wrote it")
    for command in (export, imports):
        add_run(command)
        command.add_argument("--channel", default="train", help="default: train")
    _add_filters(export, ("open", "complete", "aborted"))
    export.add_argument("--overwrite", action="store_true", help="replace FILE")
    export.add_argument(
        "--embed-pictures",
        action="store_true",
        help="pictures go into FILE; else into a folder beside it, each once",
    )
    imports.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="to wait for room; default: 60"
    )


def add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "where",
        nargs="?",
        metavar="RUN",
        help="its folder, or host:port of its Ray; default: the one alive in runs/, else the last",
    )


def _add_filters(command: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    command.add_argument("--state", action="append", choices=states, help="may be repeated")
    command.add_argument("--tag", help="as `mark` set it")
    for name, text in (("reward", "a number"), ("version", "of the policy")):
        kind = float if name == "reward" else int
        command.add_argument(f"--min-{name}", type=kind, metavar="X", help=text)
        command.add_argument(f"--max-{name}", type=kind, metavar="X", help=text)


def _filters(args: argparse.Namespace) -> dict[str, Any]:
    names = ("state", "tag", "min_reward", "max_reward", "min_version", "max_version")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def console() -> Any:
    """For people: colours on a terminal that wants them, whole names in a pipe, and no markup:
    names may have brackets."""
    from stepwell.track.console import Terminal

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Terminal(highlight=False, markup=False, width=width)


def print_json(value: Any) -> bool:
    """Print `value` for programs; False: nobody reads any more."""
    return print_line(json.dumps(_finite(value), default=str))


def _finite(value: Any) -> Any:
    """`value` with null for NaN and infinity, which JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def answer(
    args: argparse.Namespace, value: Any, shown: str | Callable[[Any], RenderableType]
) -> None:
    """Print `value` for `--json`, else what people are shown of it."""
    if args.json:
        print_json(value)
    elif isinstance(shown, str):
        print_line(shown)
    else:
        console().print(shown(value))


def _of_run(where: str | None, look: Callable[[RunView], Awaitable[T]]) -> T:
    """Open the run at `where` and return what `look` finds in it."""
    from stepwell.show.run import open_run

    async def looked() -> T:
        async with open_run(where) as view:
            return await look(view)

    return asyncio.run(looked())


def check_place(name: str, file: Path) -> None:
    """
    Raises:
        ConfigError: the argument `name` is a file in a folder that does not exist.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is {file}, and there is no folder {file.parent}; make it first")


# -- the commands ------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> None:
    from stepwell.show.status import read_status, status_screen

    answer(args, _of_run(args.where, read_status), status_screen)


def _top(args: argparse.Namespace) -> None:
    from stepwell.show.status import read_status, watch

    if not args.interval > 0:
        raise ConfigError(f"--interval is {args.interval:g}; give seconds > 0")
    if not (args.json or sys.stdout.isatty()):
        raise ConfigError(
            "stepwell top needs a terminal; use `stepwell status`, or --json for a line each time"
        )

    async def top(view: RunView) -> None:
        if not args.json:
            await watch(view, console(), args.interval)
        while True:
            if not print_json(await read_status(view)):
                return
            await asyncio.sleep(args.interval)

    with suppress(KeyboardInterrupt):  # that is how it ends
        _of_run(args.where, top)


def _groups(args: argparse.Namespace) -> None:
    from stepwell.show.trajectory import groups_screen, read_groups

    chosen = {"prompt_uid": args.prompt, "limit": args.limit}
    found = _of_run(
        args.where, lambda view: read_groups(view, args.channel, _filters(args), **chosen)
    )
    answer(args, found, groups_screen)


def _show(args: argparse.Namespace) -> None:
    from stepwell.layout import RUN_FILE
    from stepwell.show.archive import rows_screen
    from stepwell.show.trajectory import Several, open_trajectory, token_lines, trajectory_screen

    if args.where is None and (Path(args.uid) / RUN_FILE).is_file():
        raise ConfigError(
            f"UID is {args.uid}, the folder of a run; give a trajectory's before it: "
            f"`stepwell show UID {args.uid}`. `stepwell data query '' {args.uid}` lists them"
        )
    opened = asyncio.run(open_trajectory(args.uid, args.where))
    if isinstance(opened, Several):
        told = {"trajectories": opened.items, "may_be_more": opened.may_be_more}
        answer(args, told, lambda _: rows_screen(opened.items))
        if opened.may_be_more and not args.json:
            print_line("… perhaps more begin so: give more of the uid")
        return
    if args.tokens and not args.json:
        console().print(token_lines(opened), soft_wrap=True)
        return
    told = {"branches": opened.rows, "trained": opened.trained, "archived": opened.archived}
    told = {"trajectory_uid": opened.rows[0]["trajectory_uid"], **told}
    answer(args, told, lambda _: trajectory_screen(opened))


def _view(args: argparse.Namespace) -> None:
    from stepwell.show.dashboard import view

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; give one up to 65535, or 0 for a free one")
    asyncio.run(view(args.where, args.port))


def _doctor(args: argparse.Namespace) -> int:
    try:
        from stepwell.show.doctor import examine
        from stepwell.show.engine import NAMES, check_engine
    except ModuleNotFoundError as e:
        raise ConfigError(_lacking(e)) from e

    if args.engine is not None:
        if args.config is not None or args.overrides:
            raise ConfigError("give --engine URL alone: it looks at that server, at no run")
        return _told(args, check_engine(args.engine, args.kind), NAMES)
    if args.kind is not None:
        raise ConfigError(f"--kind is {args.kind}, of an engine; give --engine URL with it")
    named = [word for word in args.overrides if "=" not in word or Path(word).is_dir()]
    overrides = [word for word in args.overrides if word not in named]
    if len(named) > 1 or (named and (args.config is not None or overrides)):
        raise ConfigError(f"give one RUN, or --config and KEY=VALUE, not both: {' '.join(named)}")
    config, run, folder = None, None, Path()
    if named:
        from stepwell.config.load import recorded_config
        from stepwell.layout import RUN_FILE
        from stepwell.run.find import find_run
        from stepwell.run.folder import holder

        folder = Path(named[0])
        if not (folder / RUN_FILE).is_file() or holder(folder) is not None:
            folder, run = find_run(named[0])
            config = recorded_config(folder, run.config)
    elif args.config is not None or overrides:
        from stepwell.config.load import load_config

        config = load_config(args.config, overrides)
        folder = config.run.dir
    return _told(args, examine(config, run, folder))


def _lacking(error: ModuleNotFoundError) -> str:
    """Text about an environment in which the doctor itself cannot be imported.

    Raises:
        ModuleNotFoundError: all that is required is there.
    """
    from stepwell.version import lack_of, required

    if not (wrong := [str(each) for each in required() if lack_of(each) is not None]):
        raise error
    asked = " ".join(f"'{each}'" for each in wrong)
    return f"not installed here: {', '.join(wrong)}; pip install {asked}"


def _told(args: argparse.Namespace, found: Iterable[Finding], width: int = 13) -> int:
    """Print findings as they come; 1 if one of them is a problem."""
    from stepwell.show.doctor import finding_line, verdict

    screen, findings = console(), []
    for finding in found:
        findings.append(finding)
        if not args.json:
            screen.print(finding_line(finding, width))
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        screen.print(verdict(findings))
    return int(any(finding.state == "problem" for finding in findings))


def _export(args: argparse.Namespace) -> None:
    from stepwell.datapool.files.transfer import export_channel

    if args.file.exists() and not args.overwrite:
        raise ConfigError(f"{args.file} exists; choose another name, or give --overwrite")
    check_place("FILE", args.file)
    pictures = "embedded" if args.embed_pictures else "files"
    chosen = _filters(args) | {"overwrite": args.overwrite, "pictures": pictures}
    done = _of_run(
        args.where, lambda view: export_channel(view.pool, args.file, args.channel, **chosen)
    )
    told = {"path": done.path, "trajectories": done.n_trajectories, "rows": done.n_rows}
    left = f", {done.n_without_steps} without steps left out" * bool(done.n_without_steps)
    text = f"{done.path}: {done.n_trajectories} trajectories, {done.n_steps} steps{left}"
    answer(args, told, text)


def _import(args: argparse.Namespace) -> None:
    from stepwell.datapool.files.transfer import import_channel

    if not args.file.is_file():
        raise ConfigError(
            f"there is no file {args.file}; name one that `stepwell data export` wrote"
        )
    done = _of_run(
        args.where,
        lambda view: import_channel(view.pool, args.file, args.channel, timeout_s=args.timeout),
    )
    left = f", {done.n_left_out} open ones left out" * bool(done.n_left_out)
    text = f"{done.n_groups} groups, {done.n_trajectories} trajectories{left}"
    answer(args, {"groups": done.n_groups, "trajectories": done.n_trajectories}, text)
