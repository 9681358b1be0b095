"""This module is the commands on a run's archive: `prompts`, `data query`, `archive check`,
`archive delete`, `archive import`.

    stepwell prompts [RUN] --never-rewarded
    stepwell data query 'reward < 0.2 and version >= 10' [RUN] --search "timed out"
    stepwell archive check [RUN]
    stepwell archive delete [RUN] --user U
    stepwell archive import [RUN]

Owns their arguments. What is shown is `show/archive.py`'s.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from stepwell.cli.look import Commands, add_command, add_run, answer, check_place
from stepwell.trainer.errors import ConfigError


def add_archive_commands(commands: Commands, data: Commands) -> None:
    text = "list the prompts of a run with the rewards of all their tries"
    prompts = add_command(commands, "prompts", _prompts, text, has_run=True)
    which = prompts.add_mutually_exclusive_group()
    which.add_argument("--never-rewarded", action="store_true", help="no try had a reward above 0")
    which.add_argument("--always-rewarded", action="store_true", help="every try had one")
    prompts.add_argument(
        "--order",
        default="time",
        metavar="COLUMN",
        help="time (of the last try, the default), tries, rewarded (their share), mean, best, "
        "solved (at which version), source, first (what was asked)",
    )
    prompts.add_argument("--ascending", action="store_true", help="the smallest or oldest first")
    prompts.add_argument("--limit", type=int, default=50, metavar="N", help="default: 50")
    text = "list what left a run's pool: trained, dropped, aborted, late"
    query = add_command(data, "query", _query, text)
    query.add_argument(
        "query", metavar="QUERY", help="e.g. \"reward < 0.2 and version >= 10\"; '' for all"
    )
    add_run(query)
    query.add_argument("--search", metavar="TEXT", help='words of what was said; "a phrase"; word*')
    query.add_argument(
        "--order",
        default="time",
        metavar="COLUMN",
        help="time (the default), reward, turns, tokens, version, state, first or last (what was "
        "said), uid; of a search also relevance",
    )
    query.add_argument("--ascending", action="store_true", help="the smallest or oldest first")
    query.add_argument(
        "--limit", type=int, metavar="N", help="default: 20; with --to all that pass"
    )
    query.add_argument(
        "--to", type=Path, metavar="FILE", help="write them with their tokens: x.parquet or x.jsonl"
    )
    archive = commands.add_parser("archive", help="look after what left a run's pool")
    actions = archive.add_subparsers(metavar="ACTION", required=True)
    text = "verify every file, and make the catalogue that of the files"
    add_command(actions, "check", _check, text, has_run=True)
    text = (
        "add what a run without an archive left: trained/, with tokens, and rollouts.jsonl, as text"
    )
    add_command(actions, "import", _import, text, has_run=True)
    text = "delete what is no longer in the pool: from the archive and the trainer's copies"
    delete = add_command(actions, "delete", _delete, text, has_run=True)
    what = delete.add_mutually_exclusive_group(required=True)
    for name, of in (("trajectory", "one"), ("user", "all of a user"), ("tag", "all with a tag")):
        what.add_argument(f"--{name}", metavar=name[0].upper(), help=of)


def _prompts(args: argparse.Namespace) -> None:
    from stepwell.datapool.files.archive.reader import PROMPT_ORDERS
    from stepwell.show.archive import open_archive, prompts_screen

    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; give 1 or more")
    if args.order not in PROMPT_ORDERS:
        raise ConfigError(f"--order is {args.order!r}; there are {', '.join(PROMPT_ORDERS)}")
    rows = open_archive(args.where).prompts(
        never_rewarded=args.never_rewarded,
        always=args.always_rewarded,
        order=args.order,
        descending=not args.ascending,
        limit=args.limit,
    )
    answer(args, rows, prompts_screen)


def _query(args: argparse.Namespace) -> None:
    from stepwell.datapool.errors import InvalidRequestError
    from stepwell.datapool.files.archive.catalogue import ORDERS
    from stepwell.datapool.files.archive.reader import parse
    from stepwell.show.archive import open_archive, rows_screen

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; give 1 or more")
    if args.to is not None and args.to.exists():
        raise ConfigError(f"--to is {str(args.to)!r}, which exists; name a new file")
    if args.to is not None:
        check_place("--to", args.to)
    if args.order not in (*ORDERS, "relevance"):
        raise ConfigError(f"--order is {args.order!r}; there are {', '.join(ORDERS)}, relevance")
    if args.order == "relevance" and not args.search:
        raise ConfigError("--order is relevance, which is of --search TEXT")
    try:
        where = parse(args.query)
    except InvalidRequestError as e:
        raise ConfigError(str(e)) from e
    reader = open_archive(args.where)
    how: dict[str, Any] = {"order": args.order, "descending": not args.ascending}
    if args.to is None:
        page = reader.rows(where, args.search, limit=args.limit or 20, **how)
        answer(args, page.items, rows_screen)
        return
    from stepwell.datapool.files.export import write

    if args.limit is None and args.order == "relevance":
        how["order"] = "time"  # all that pass: relevance is of the newest
    whole = islice(reader.read_all(where, args.search, **how), args.limit)
    done = write(args.to, whole, source=str(reader.folder.path))
    told = {"path": done.path, "trajectories": done.n_trajectories, "rows": done.n_rows}
    answer(args, told, f"{done.path}: {done.n_trajectories} trajectories, {done.n_steps} steps")


def _check(args: argparse.Namespace) -> int:
    from stepwell.show.archive import open_archive

    reader = open_archive(args.where)
    told, counts = reader.check(), reader.counts()
    sound = f"{reader.folder.path}: {counts['trajectories']:,} trajectories, all files are sound"
    answer(args, {"damaged": told, **counts}, "\n".join(told) or sound)
    return int(bool(told))


def _import(args: argparse.Namespace) -> None:
    from stepwell.show.imported import import_run
    from stepwell.show.run import run_folder

    folder = run_folder(args.where)
    done = import_run(folder)
    text = (
        f"{folder}: {done.with_tokens} trajectories with tokens, {done.as_text} as text; "
        f"{done.known} were there already"
    )
    answer(args, done._asdict(), text)


def _delete(args: argparse.Namespace) -> None:
    from stepwell.datapool.ops import Delete
    from stepwell.run.deletion import delete_archived, delete_copied, not_reached
    from stepwell.show.archive import open_archive
    from stepwell.show.run import run_folder

    asked = Delete(args.trajectory, args.tag, args.user)
    folder = run_folder(args.where)
    reader = open_archive(str(folder))
    gone = delete_archived(folder, asked, with_groups=False)
    copied = delete_copied(folder, asked, gone, with_groups=False)
    told = not_reached(folder)
    lines = [f"{reader.folder.path}: deleted {len(gone)} trajectories", *gone]
    lines += [f"{folder}, copies of the trainer: deleted {len(copied)} trajectories", told]
    answer(args, {"deleted": gone, "copies": copied, "not_reached": told}, "\n".join(lines))
