"""This module is the `stepwell` command: it reads the command line and tells what went wrong in one
line.

    stepwell train   --config quickstart [key=value …]   train an agent, end to end
    stepwell train   --attach runs/live [key=value …]    train on a run that is being served
    stepwell plan    --config quickstart [--gpus 8]      which part is where, and its memory
    stepwell serve   --config quickstart [key=value …]   pool, engines and gateway for agents;
                     --replicas N                        N gateways, each at its own address
    stepwell init    NAME                                a folder with an agent of your own to train
    stepwell config                                      list the presets
                     --config quickstart [key=value …]   print the resolved configuration
                     --keys PATTERN                      list keys with type, default and meaning
                     --from slime NAME …                 what another framework's names are here
    stepwell export  RUN [--step N|latest|best] --to DIR write a checkpoint as a model directory
    stepwell rollback RUN [--to K]                       serve an earlier version's weights again
    stepwell try     HARNESS "PROMPT" [--config … | --run RUN]   one rollout of a command-line agent
                     HARNESS --task N                    on a task of the configuration's data
    stepwell eval    RUN|MODEL [--config …]              evaluate, and train nothing
    stepwell status|top|groups|view [RUN]                look into a run, alive or ended
    stepwell show    UID [RUN]                           its tokens, and which are trained
    stepwell doctor  [RUN | --config …]                  what is wrong, and its remedy
    stepwell data export|import FILE [RUN]               trajectories as Parquet or JSONL
    stepwell data salvage PATH                           a usable journal of a damaged one
    stepwell data delete  RUN --trajectory UID | --tag T | --user U   delete it from all files
    stepwell backends                                    list training backends, engines, policy
                                                         losses, estimators, off-policy methods

Exit codes: 0 done; 1 it failed; 2 the command line or the configuration is wrong, or names what is
not there; 130 interrupted by Ctrl-C, SIGTERM or a terminal that closes (everything that was started
has been stopped); a second Ctrl-C or SIGTERM ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from stepwell.cli.archive import add_archive_commands
from stepwell.cli.look import (
    add_command,
    add_commands,
    add_data_commands,
    answer,
    console,
    print_json,
)
from stepwell.cluster.signals import stopping_signals
from stepwell.track.output import print_line
from stepwell.trainer.errors import INTERRUPTED, ConfigError, NoCheckpointError, TrainerError
from stepwell.version import __version__

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser()
    words = sys.argv[1:] if argv is None else argv
    args, rest = parser.parse_known_args([_at_home(word) for word in words])
    # argparse takes no KEY=VALUE after an option that follows others, and none with dashes.
    asked = getattr(args, "framework", None) is not None  # its names may be flags
    if (
        rest
        and not asked
        and not (hasattr(args, "overrides") and all("=" in part for part in rest))
    ):
        hint = "; keys are given as KEY=VALUE, without dashes" if hasattr(args, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        args.overrides += rest
    with suppress(AttributeError):  # of a stream that somebody put in its place
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        # Agents, rewards and configs are looked up from the folder the command is run in, as with
        # `python -m`.
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        _tell("the working folder was removed; cd to one that is there")
        return 2
    try:
        with terminated_as_interrupted():
            return args.run(args) or 0
    except ConfigError as e:
        _tell(str(e))
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        _tell("interrupted; everything that was started has been stopped")
        return 130
    except InterruptedWhileError as e:
        _tell(f"interrupted; {e}")
        return 130
    except Exception as e:  # one line if the cause is known; a bug is raised again
        line, code = _expected(e)
        if line is None:
            raise
        for text in (line, *getattr(e, "__notes__", ())):
            _tell(text)
        return code


PATHS = ("--to", "--config", "--attach", "--run", "--exports")
"""Options that take a path."""


def _at_home(word: str) -> str:
    """A word of the command line; no shell replaces the `~` of --to=~/model."""
    name, sign, value = word.partition("=")
    return f"{name}={os.path.expanduser(value)}" if sign and name in PATHS else word


def _tell(text: str) -> None:
    """Print a line on stderr, whose reader may have gone: Ctrl-C ends a `tee` too."""
    with suppress(OSError):  # a full disk, which has no remedy here
        print_line(f"stepwell: {text}", sys.stderr)


def command_parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    parser = argparse.ArgumentParser(
        prog="stepwell",
        description="Point any agent's base_url at it and get a better model.",
        epilog="First: stepwell train --config quickstart.  Your own agent: stepwell init NAME.  "
        "Keys: stepwell config --keys PATTERN.",
    )
    parser.add_argument("--version", action="version", version=f"stepwell {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    own: tuple[tuple[str, Callable[[argparse.Namespace], int | None], str], ...] = (
        ("train", _train, "train an agent by async GRPO through the gateway"),
        ("plan", _plan, "print the place and the memory of each part, and exact commands"),
        ("serve", _serve, "keep pool, engines and gateway running, for agents to call"),
        ("config", _config, "print the resolved configuration"),
    )
    for name, run, text in own:
        command = add_command(commands, name, run, text, has_json=name in ("config", "plan"))
        command.add_argument(
            "--config",
            required=name == "serve",
            help="a preset's name or a YAML file; `stepwell config` alone lists the presets",
        )
        command.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help="e.g. trainer.total_steps=5"
        )
        if name == "config":
            command.add_argument(
                "--keys",
                metavar="PATTERN",
                help="list the keys like it (a part of the name, or a glob) with their meaning",
            )
            command.add_argument(
                "--from",
                dest="framework",
                metavar="FRAMEWORK",
                help="say what the names that follow are here: names of verl, slime, trl, "
                "prime-rl or claw-r1, as keys or flags; none: all that are known",
            )
        if name == "plan":
            of = "default: of the Ray at cluster.address, or of this machine"
            command.add_argument("--gpus", type=int, metavar="N", help=f"GPUs of a node; {of}")
            command.add_argument(
                "--nodes", type=int, default=1, metavar="N", help="nodes with --gpus; default: 1"
            )
            command.add_argument(
                "--gpu-gb", type=float, metavar="GB", help="memory of a GPU; default: 80"
            )
        if name == "train":
            command.add_argument(
                "--attach",
                metavar="RUN",
                help="train in the run that `stepwell serve` keeps: its folder, or host:port of "
                "its Ray; configured as that run is, but for what --config and KEY=VALUE say",
            )
        if name == "serve":
            command.add_argument(
                "--replicas", type=int, metavar="N", help="as gateway.replicas=N (default 1)"
            )
    text = "write a folder with an agent, a reward, tasks, a configuration and a test"
    init = add_command(commands, "init", _init, text, has_json=False)
    init.add_argument("folder", metavar="NAME", type=Path, help="a new folder")
    text = (
        "list training backends, engines, policy losses, advantage estimators and off-policy "
        "methods, built in and of installed packages"
    )
    add_command(commands, "backends", _backends, text)
    text = "write the policy of a checkpoint as a Hugging Face directory"
    export = add_command(commands, "export", _export, text)
    export.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder, e.g. runs/me")
    export.add_argument("--step", default="latest", metavar="N", help="a step, latest or best")
    export.add_argument("--to", required=True, type=Path, metavar="DIR", help="a new folder")
    text = "serve the weights of an earlier version again, as a new version"
    rollback = add_command(commands, "rollback", _rollback, text)
    rollback.add_argument("run_dir", metavar="RUN", type=Path, help="a live run's folder")
    rollback.add_argument("--to", type=int, metavar="K", help="default: the version before")
    text = "evaluate a model, or a checkpoint of a run; nothing is trained"
    evaluate = add_command(commands, "eval", _eval, text)
    evaluate.add_argument(
        "what", metavar="RUN | MODEL", help="a folder, or a model's id on the hub"
    )
    evaluate.add_argument("--step", default="latest", metavar="N", help="a step, latest or best")
    evaluate.add_argument("--config", help="of a MODEL: the preset or file with the tasks")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. validation.n=8")
    text = "run one rollout of a command-line agent, and show the tree of its calls"
    once = add_command(commands, "try", _try, text)
    once.add_argument("harness", metavar="HARNESS", help="e.g. claude_code, or a configuration")
    once.add_argument("prompt", nargs="?", metavar="PROMPT", help="what the agent is told")
    text = "the task of the configuration's data with this number, from 0, in place of PROMPT"
    once.add_argument("--task", type=int, metavar="N", help=text)
    once.add_argument("--config", help="the preset or file whose model is served")
    once.add_argument(
        "--run", dest="where", metavar="RUN", help="a live run, whose gateway is called instead"
    )
    once.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. model.path=DIR")
    add_commands(commands)
    data = commands.add_parser("data", help="look after the pool's data: files of it, its journal")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    add_data_commands(actions)
    add_archive_commands(commands, actions)
    text = "make a usable journal of a damaged one, and say what is lost"
    salvage = add_command(actions, "salvage", _salvage, text)
    salvage.add_argument("path", metavar="PATH", type=Path, help="e.g. runs/me, or its pool folder")
    what = salvage.add_mutually_exclusive_group()
    for name, text in (("release", "serve"), ("drop", "drop")):
        what.add_argument(
            f"--{name}",
            nargs="*",
            metavar="PROMPT_UID",
            help=f"{text} these doubtful groups of a stopped pool; none named: all",
        )
    text = "delete a trajectory, all with a tag, or all of a user: from pool, archive and files"
    delete = add_command(actions, "delete", _delete, text)
    delete.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder, alive or not")
    what = delete.add_mutually_exclusive_group(required=True)
    what.add_argument("--trajectory", metavar="UID", help="goes with its group")
    what.add_argument("--tag", metavar="TAG", help="as `mark` set it")
    what.add_argument("--user", metavar="USER", help="`user` of the metadata, else who opened it")
    delete.add_argument(
        "--exports", nargs="+", default=[], type=Path, metavar="PATH", help="Parquet or JSONL files"
    )
    return parser


def _train(args: argparse.Namespace) -> None:
    if args.attach is not None:
        _attach(args)
        return
    from stepwell.config.load import load_config

    if args.config is None and not args.overrides:
        raise ConfigError(
            "--config is missing; name a YAML file or a preset (`stepwell config` lists them), "
            "give at least rollout.agent=MODULE:FUNCTION data=TASKS.jsonl, or --attach to a run "
            "that is served"
        )
    config = load_config(args.config, args.overrides)
    from stepwell.run.checks import check_run  # half a second more, which a wrong key need not wait

    checked = check_run(config)
    from stepwell.run.train import train  # torch and Ray, only now: a mistake costs no seconds

    asyncio.run(interruptible(train(config, checked)))


def _attach(args: argparse.Namespace) -> None:
    from stepwell.config.load import attached_config, named_config
    from stepwell.run.checks import check_attached
    from stepwell.run.find import find_run
    from stepwell.run.folder import refuse_second_trainer

    folder, run = find_run(args.attach)
    refuse_second_trainer(folder)
    if args.config is not None:
        args.config = str(named_config(args.config).absolute())
    here = Path.cwd()
    if run.folder.is_dir():  # relative paths and modules mean what they meant to the run
        os.chdir(run.folder)
        sys.path.insert(0, str(run.folder))
    config = attached_config(folder, run.config, args.config, args.overrides, here)

    checked = check_attached(config)
    from stepwell.run.train import attach

    asyncio.run(interruptible(attach(config, run, checked)))


def _plan(args: argparse.Namespace) -> int:
    from stepwell.config.load import load_config
    from stepwell.run.plan import machines_of, plan_run, shape_of

    if args.gpus is None and args.nodes != 1:
        raise ConfigError(f"--nodes is {args.nodes}, but --gpus is missing; say how many each has")
    for name, value in (("--gpus", args.gpus or 0), ("--nodes", args.nodes - 1)):
        if value < 0:
            raise ConfigError(f"{name} is {getattr(args, name[2:])}; give a number of them")
    if args.gpu_gb is not None and not 0 < args.gpu_gb < math.inf:
        raise ConfigError(f"--gpu-gb is {args.gpu_gb}; give the memory of a GPU in GB, e.g. 80")
    config = load_config(args.config, args.overrides, here=False)
    machines = machines_of(config, args.gpus, args.nodes, args.gpu_gb)
    arguments = [] if args.config is None else ["--config", args.config]
    planned = plan_run(config, shape_of(config), machines, [*arguments, *args.overrides])
    answer(args, asdict(planned), planned.text())
    return int(bool(planned.problems))


def _serve(args: argparse.Namespace) -> None:
    from stepwell.config.load import load_config

    chosen = [] if args.replicas is None else [f"gateway.replicas={args.replicas}"]
    config = load_config(args.config, [*args.overrides, *chosen])
    from stepwell.run.checks import check_serving

    check_serving(config)
    from stepwell.run.serve import serve

    asyncio.run(interruptible(serve(config)))


def _config(args: argparse.Namespace) -> None:
    from stepwell.config.load import load_config, presets_and_uses

    if args.framework is not None:
        _answer_names(args)
        return
    config = None
    if args.config is not None or args.overrides:
        config = load_config(args.config, args.overrides, here=False)
    if args.keys is not None:
        from stepwell.config.keys import find_keys, show_keys, told_default

        width = min(shutil.get_terminal_size().columns, 120)
        keys = find_keys(args.keys)
        told = [asdict(key) | {"default": told_default(key)} for key in keys]
        answer(args, told, show_keys(args.keys, config, width=width))
    elif config is not None:
        from omegaconf import OmegaConf

        values = config.model_dump(mode="json")
        answer(args, values, OmegaConf.to_yaml(OmegaConf.create(values)).rstrip())
    else:
        uses = presets_and_uses()
        wide = max(map(len, uses))
        lines = (f"{name:{wide}}  {about}".rstrip() for name, about in uses.items())
        answer(args, uses, "\n".join(lines))


def _answer_names(args: argparse.Namespace) -> None:
    """Print our keys for another framework's names. Names that are not known come last, as one
    error."""
    from stepwell.config.migration import find, table_of

    if args.config is not None or args.keys is not None:
        raise ConfigError("--from takes names alone; leave out --config and --keys")
    found, unknown = [], []
    for key in args.overrides or table_of(args.framework):
        try:
            found += find(args.framework, key)
        except ConfigError as e:
            unknown.append(str(e))
    told = [asdict(row) | {"text": row.text} for row in found]
    if found:
        answer(args, told, "\n".join(f"{row.name}: {row.text}" for row in found))
    if unknown:
        raise ConfigError("\nstepwell: ".join(unknown))


def _init(args: argparse.Namespace) -> None:
    from stepwell.cli.init import write_project

    print_line(write_project(args.folder))


def _step(args: argparse.Namespace) -> Any:
    """Return the value of `--step`: a number, `latest` or `best`."""
    if args.step not in ("latest", "best") and not args.step.isdecimal():
        raise ConfigError(f"--step is {args.step!r}; give a step, latest or best")
    return int(args.step) if args.step.isdecimal() else args.step


def _export(args: argparse.Namespace) -> None:
    step = _step(args)
    from stepwell.run.folder import check_folder
    from stepwell.trainer.checkpoint import export_checkpoint

    check_folder(args.run_dir)
    if args.to.exists():
        raise ConfigError(f"--to is {str(args.to)!r}, which exists; name a new folder")
    folder = export_checkpoint(args.run_dir, step, args.to)
    answer(args, {"folder": folder}, str(folder))


def _eval(args: argparse.Namespace) -> None:
    from stepwell.run.checks import check_run
    from stepwell.run.evaluate import evaluation_of, score_screen

    config = evaluation_of(args.what, _step(args), args.config, args.overrides)
    checked = check_run(config)
    from stepwell.run.train import train

    quiet = config.logging.console == "quiet"
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if quiet else sys.stderr):
        summary = asyncio.run(interruptible(train(config, checked)))
    evaluation = summary["evals"][-1]
    told = {"run": config.run.name, "folder": str(config.run.dir), **evaluation}
    answer(args, told, lambda _: score_screen(evaluation, config.run.dir))


def _try(args: argparse.Namespace) -> int:
    from stepwell.show.attempt import attempt, attempt_at, config_of_try, try_screen

    asked, overrides = args.prompt, args.overrides
    if args.task is not None:  # then the first KEY=VALUE stands where a prompt does
        asked, overrides = args.task, [*([asked] if asked is not None else []), *overrides]
    if asked is None:
        raise ConfigError("there is nothing to try; give PROMPT, or --task N")
    config, task = config_of_try(args.harness, asked, args.config, overrides)
    once = attempt(config, task) if args.where is None else attempt_at(config, task, args.where)
    tried = asyncio.run(interruptible(once))
    answer(args, tried.as_json(), lambda _: try_screen(tried))
    return int(tried.ended != "complete")


def _rollback(args: argparse.Namespace) -> None:
    from stepwell.run.rollback import roll_back

    done = asyncio.run(interruptible(roll_back(args.run_dir, args.to)))
    answer(args, {"done": done}, done)


def _salvage(args: argparse.Namespace) -> None:
    from stepwell.datapool.store.salvage import salvage, settle_doubtful
    from stepwell.run.folder import journal_folder

    chosen = args.drop if args.release is None else args.release
    if chosen is not None:
        release = args.release is not None
        done = settle_doubtful(journal_folder(args.path), chosen, release=release)
        word = "released" if release else "dropped"
        lines = [f"{word} in channel {c!r}: {', '.join(uids)}" for c, uids in done.items()]
        answer(args, {word: done}, "\n".join(lines) or "no group is doubtful")
        return
    reports = salvage(journal_folder(args.path))
    answer(args, list(map(asdict, reports)), "\n".join(report.text() for report in reports))


def _delete(args: argparse.Namespace) -> None:
    from stepwell.datapool.ops import Delete
    from stepwell.run.deletion import delete

    asked = Delete(args.trajectory, args.tag, args.user)
    if missing := [path for path in args.exports if not path.is_file()]:
        raise ConfigError(
            f"--exports is {missing[0]}, which is no file: nothing was deleted; name what "
            "`stepwell data export` wrote"
        )
    lines = asyncio.run(delete(args.run_dir, asked, args.exports))
    answer(args, {"done": lines}, "\n".join(lines))


def _backends(args: argparse.Namespace) -> None:
    from stepwell.show.plugins import show_plugins, survey

    if args.json:
        print_json({kind: list(map(asdict, found)) for kind, _, found in survey()})
    else:
        show_plugins(console())


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does inside the block, also while modules are imported."""
    numbers = set(stopping_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class InterruptedWhileError(Exception):
    """A command that was interrupted failed while it stopped: its parts may have had the same
    signal (Ctrl-C and `kill -- -PID` reach the whole process group)."""


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """The first of `stopping_signals` cancels `work`, whose `finally` blocks stop what was started.
    A second one ends this process at once, and the rest is killed by the run's `ProcessGuard`; but
    for SIGHUP, which a terminal that closes sends twice: by the kernel and by its shell.

    Raises:
        InterruptedWhileError: `work` was interrupted, and failed.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    interrupted = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            if number == signal.SIGHUP:
                return
            _write_error(b"stepwell: interrupted twice; ended at once\n")
            os._exit(130)
        interrupted = True
        _write_error(b"stepwell: stopping; once more ends it at once\n")
        loop.call_soon_threadsafe(task.cancel, INTERRUPTED)

    before = {number: signal.signal(number, stop) for number in stopping_signals()}
    try:
        return await task
    except Exception as e:
        if not interrupted:
            raise
        why = (str(e).splitlines() or [""])[0]
        notes = "".join(f"; {note}" for note in getattr(e, "__notes__", ()))
        raise InterruptedWhileError(f"stopping failed ({type(e).__name__}: {why}){notes}") from e
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_error(line: bytes) -> None:
    """Write to stderr in a handler of a signal, which may have ended the `tee` that reads it."""
    with suppress(OSError):
        os.write(2, line)


_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_PATH = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP})


def _expected(error: BaseException) -> tuple[str | None, int]:
    """The one line for a failure with a known cause, and the exit code; None for a bug, which gets
    its traceback."""
    from stepwell.backends.errors import BackendError, VersionNotKeptError
    from stepwell.datapool.errors import DataPoolError, NoJournalError
    from stepwell.errors import NoRunError, RunUnavailableError
    from stepwell.gateway.errors import GatewayError

    mistakes = (ConfigError, NoRunError, NoCheckpointError, NoJournalError, VersionNotKeptError)

    if isinstance(error, BaseExceptionGroup):
        return _expected(error.exceptions[0])
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(
            candidate,
            TrainerError | DataPoolError | GatewayError | BackendError | RunUnavailableError,
        ):
            return str(candidate), 2 if isinstance(candidate, mistakes) else 1
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        where = f"the disk of {error.filename}" if error.filename else "a disk"
        return f"{where} is full ({error.strerror}); free space and run the same command again", 1
    if isinstance(error, OSError) and error.errno in _FORBIDDEN and error.filename is not None:
        remedy = "run this as a user who may, or name another place"
        return f"{error.filename} may not be read or written ({error.strerror}); {remedy}", 1
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename is not None:
        return f"{error.filename} can be no file ({error.strerror}); name another", 2
    return None, 1


if __name__ == "__main__":
    sys.exit(main())
