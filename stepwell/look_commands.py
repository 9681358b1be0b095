"""This module is the commands that look into a run, alive or ended: `status`, `top`, `groups`,
`show`, `view`, `data export`, `data import`.

    stepwell status [RUN]            one screen
    stepwell top    [RUN]            the same, live
    stepwell groups [RUN]            the pool's groups, and why others were dropped
    stepwell view   [RUN]            the dashboard of a run that has ended
    stepwell show   TRAJECTORY [RUN] the tokens of a trajectory, what is trained, the tree

Owns their arguments. What is shown is `status.py`'s and `show.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from stepwell.errors import RunUnavailableError
from stepwell.trainer.errors import ConfigError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PIPED_WIDTH = 160
"""Columns of what is no terminal: names are not cut there."""


def add_commands(commands: Commands) -> None:
    text = "how a run is doing, on one screen"
    status = commands.add_parser("status", help=text, description=text)
    text = "the same, live"
    top = commands.add_parser("top", help=text, description="how a run is doing, live")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="default: 1")
    text = "list the groups in a run's pool, and why others were dropped"
    groups = commands.add_parser("groups", help=text, description=text)
    text = "the tokens of a trajectory, what is trained of them, and its tree of turns"
    show = commands.add_parser("show", help=text, description=text)
    show.add_argument("trajectory_uid", metavar="TRAJECTORY", help="as `stepwell groups` lists it")
    show.add_argument("--tokens", action="store_true", help="a line per token")
    for command, run in ((status, _status), (top, _top), (groups, _groups), (show, _show)):
        add_run(command)
        add_json(command)
        command.set_defaults(run=run)
    text = "the dashboard of a run that has ended; of one that is alive, its address"
    view = commands.add_parser("view", help=text, description=text)
    add_run(view)
    view.add_argument(
        "--port", type=int, default=8120, metavar="N", help="default: 8120; 0: a free one"
    )
    view.set_defaults(run=_view)
    groups.add_argument("--channel", default="train", help="default: train")
    _add_filters(groups, ("open", "ready", "held", "leased"))
    groups.add_argument("--prompt", metavar="UID", help="one group, with its trajectories")
    groups.add_argument("--limit", type=int, default=50, metavar="N", help="default: 50")

    text = "look for what keeps a run from working, or makes it slow"
    doctor = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text}: this machine; with --config also the model and all that it names; "
        "with RUN a live run's gateway and engines",
    )
    doctor.add_argument("--config", help="a preset's name or a YAML file")
    doctor.add_argument(
        "overrides", nargs="*", metavar="RUN | KEY=VALUE", help="e.g. model.path=Qwen/Qwen3-0.6B"
    )
    add_json(doctor)
    doctor.set_defaults(run=_doctor)


def add_data_commands(actions: Commands) -> None:
    text = "write the trajectories in a run's pool to a file, Parquet or JSONL"
    export = actions.add_parser("export", help=text, description=text)
    export.add_argument("file", metavar="FILE", type=Path, help="x.parquet or x.jsonl")
    text = "put the complete trajectories of an exported file into a live run's pool"
    imports = actions.add_parser("import", help=text, description=text)
    imports.add_argument("file", metavar="FILE", type=Path, help="as `data export` wrote it")
    for command, run in ((export, _export), (imports, _import)):
        add_run(command)
        command.add_argument("--channel", default="train", help="default: train")
        add_json(command)
        command.set_defaults(run=run)
    _add_filters(export, ("open", "complete", "aborted"))
    export.add_argument("--overwrite", action="store_true", help="replace FILE")
    imports.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="to wait for room; default: 60"
    )


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="JSON, for programs")


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
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(highlight=False, markup=False, width=width)


def print_json(value: Any) -> None:
    print(json.dumps(value, default=str), flush=True)


# -- the commands ------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    from stepwell.run_view import open_run
    from stepwell.status import read_status, status_screen

    async def status() -> dict[str, Any]:
        async with open_run(args.where) as view:
            return await read_status(view)

    found = asyncio.run(status())
    if args.json:
        print_json(found)
    else:
        console().print(status_screen(found))
    return 0


def _top(args: argparse.Namespace) -> int:
    from stepwell.run_view import open_run
    from stepwell.status import read_status, watch

    if not args.interval > 0:
        raise ConfigError(f"--interval is {args.interval:g}; give seconds > 0")
    if not (args.json or sys.stdout.isatty()):
        raise ConfigError(
            "stepwell top needs a terminal; use `stepwell status`, or --json for a line each time"
        )

    async def top() -> None:
        async with open_run(args.where) as view:
            if not args.json:
                await watch(view, console(), args.interval)
            while True:
                print_json(await read_status(view))
                await asyncio.sleep(args.interval)

    try:
        asyncio.run(top())
    except (KeyboardInterrupt, BrokenPipeError):
        return 0  # that is how it ends
    return 0


def _groups(args: argparse.Namespace) -> int:
    from stepwell.run_view import open_run
    from stepwell.show import groups_screen, read_groups

    async def groups() -> dict[str, Any]:
        async with open_run(args.where) as view:
            return await read_groups(
                view, args.channel, _filters(args), prompt_uid=args.prompt, limit=args.limit
            )

    found = asyncio.run(groups())
    if args.json:
        print_json(found)
    else:
        console().print(groups_screen(found))
    return 0


def _show(args: argparse.Namespace) -> int:
    from stepwell.show import open_trajectory, token_lines, trajectory_screen

    opened = asyncio.run(open_trajectory(args.trajectory_uid, args.where))
    if args.json:
        told = {"branches": opened.rows, "trained": opened.trained}
        print_json({"trajectory_uid": args.trajectory_uid, **told})
    elif args.tokens:
        console().print(token_lines(opened), soft_wrap=True)
    else:
        console().print(trajectory_screen(opened))
    return 0


def _view(args: argparse.Namespace) -> int:
    from stepwell.view import view

    asyncio.run(view(args.where, args.port))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from stepwell.doctor import examine, finding_line, verdict

    named = [word for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    if len(named) > 1 or (named and (args.config is not None or overrides)):
        raise ConfigError(f"give one RUN, or --config and KEY=VALUE, not both: {' '.join(named)}")
    config, run, folder = None, None, Path()
    if named:
        from stepwell.config import RunConfig
        from stepwell.find_run import find_run

        try:
            folder, run = find_run(named[0])
        except RunUnavailableError as e:
            raise ConfigError(str(e)) from e
        config = RunConfig.model_validate(run.config, context={"here": False})
    elif args.config is not None or overrides:
        from stepwell.presets import load_config

        config = load_config(args.config, overrides)
        folder = config.run.dir
    screen, findings = console(), []
    for finding in examine(config, run, folder):
        findings.append(finding)
        if not args.json:
            screen.print(finding_line(finding))
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        screen.print(verdict(findings))
    return int(any(finding.state == "problem" for finding in findings))


def _export(args: argparse.Namespace) -> int:
    from stepwell.datapool.files.transfer import export_channel
    from stepwell.run_view import open_run

    if args.file.exists() and not args.overwrite:
        raise ConfigError(f"{args.file} exists; choose another name, or give --overwrite")

    async def export() -> Any:
        async with open_run(args.where) as view:
            chosen = _filters(args)
            return await export_channel(
                view.pool, args.file, args.channel, overwrite=args.overwrite, **chosen
            )

    done = asyncio.run(export())
    if args.json:
        print_json({"path": done.path, "trajectories": done.n_trajectories, "rows": done.n_rows})
    else:
        left = f", {done.n_without_steps} without steps left out" * bool(done.n_without_steps)
        print(f"{done.path}: {done.n_trajectories} trajectories, {done.n_steps} steps{left}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from stepwell.datapool.files.transfer import import_channel
    from stepwell.run_view import open_run

    if not args.file.is_file():
        raise ConfigError(f"{args.file} is no file; name one that `stepwell data export` wrote")

    async def put() -> Any:
        async with open_run(args.where) as view:
            return await import_channel(view.pool, args.file, args.channel, timeout_s=args.timeout)

    done = asyncio.run(put())
    if args.json:
        print_json({"groups": done.n_groups, "trajectories": done.n_trajectories})
    else:
        left = f", {done.n_left_out} open ones left out" * bool(done.n_left_out)
        print(f"{done.n_groups} groups, {done.n_trajectories} trajectories{left}")
    return 0
