"""This module runs an agent that is a command, so that a rollout is one process tree in one folder,
of which nothing is left but its calls, its score and its log.

    template ──copy──► root/work ──► command, bounded ──► how it ended ──► grade ──► reward
                       root/home       │                      │
                       root/tmp        └─ logs/harness/…      ├─ 0, gave_up      graded
                                                              ├─ another status  HarnessError: lost
                                                              ├─ too long        as on_timeout says
                                                              └─ not the agent's InfrastructureError

The three stages are methods of their own, `set_up`, `play` and `grade`, so that a worker can
overlap those of different rollouts: only `play` calls the model.

A reward comes from the grader alone: what cannot be graded has none, and is lost with its reason.
An `InfrastructureError` does not count against the agent, and its attempt is made again.

Owns the folders of a rollout, the placeholders, what an exit means, and grading. Does not own the
processes (`backends/processes.py`), the sandboxes (`sandboxes.py`), attempts (`worker.py`).
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from stepwell.backends.processes import Bounds, Ended, Job, Limits, last_lines, run_job
from stepwell.datapool import dotted
from stepwell.datapool.types import MAX_REWARD, is_reward
from stepwell.trainer.config.harness import PLACEHOLDER, GradeConfig, HarnessConfig, HarnessLimits
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.errors import HarnessError, InfrastructureError, RolloutError, shown
from stepwell.trainer.rollout.folders import copy_over, inside, read_written, remove
from stepwell.trainer.rollout.harbor import BUILDS, HarborLayout
from stepwell.trainer.rollout.sandboxes import (
    SandboxRequest,
    client_env,
    find_sandbox,
    url_inside,
)
from stepwell.trainer.threads import in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")
Transcript: TypeAlias = list[dict[str, Any]]
"""Calls in order: `index`, `parent` (index of the call that it goes on from, or None), `messages`
(what it added to the conversation, its reply last), `finish_reason`, …"""
TranscriptReader: TypeAlias = Callable[[str], Awaitable[Transcript]]

FOLDER = "stepwell-harness-"
PULL_S = 1800.0
"""Seconds that an image may take to be pulled."""
_MB = 1 << 20
_UNSTARTED = {126: "cannot be executed", 127: "is not there"}
"""Exit statuses with which shells and containers say that there is no such command."""
_DAEMON = 125
"""Exit status with which docker and podman say that they failed themselves."""


class Harness:
    """Runs rollouts of a command; an agent, for any number of rollouts at once.

    Args:
        logs: folder of the rollouts' logs; None: they are not kept.
        run_dir: folder of the run, with its keys, which no command sees in bubblewrap.
        transcript: reads the calls of the trajectory at a base URL, for a grading function.

    Raises:
        RolloutError: its command, template, sandbox or grader is not here.
    """

    def __init__(
        self,
        config: HarnessConfig,
        *,
        logs: Path | None = None,
        run_dir: Path | None = None,
        transcript: TranscriptReader | None = None,
    ) -> None:
        self.config = config
        self.logs, self.run_dir = logs, run_dir
        self.transcript = transcript
        self.sandbox = find_sandbox(config.sandbox)
        self.grader = _grader(config.grade)
        self._images: dict[str, asyncio.Task[Ended]] = {}
        """Pulls, by image."""
        self.path = path_of(os.environ.get("PATH", os.defpath))
        self._check()
        self._scratch = Path(tempfile.gettempdir())
        remove_abandoned(self._scratch)

    async def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        """Run one rollout of `task`; its reward, or None where `rollout.reward` scores.

        Raises:
            HarnessError: the agent failed, or what it left cannot be graded.
            InfrastructureError: the machine failed.
            TimeoutError: it ran too long.
        """
        async with self.set_up(task) as rollout:
            await rollout.play(base_url, api_key)
            return await rollout.grade()

    @asynccontextmanager
    async def set_up(self, task: Mapping[str, Any]) -> AsyncIterator[Rollout]:
        """Make the folders of a rollout of `task`, and its image. On exit its log is kept, and
        nothing else of it. A set-up that fails raises when the rollout is played."""
        name = f"{_slug(task.get('instance_id', 'task'))}-{uuid.uuid4().hex[:12]}"
        rollout = Rollout(self, name, folder_of_worker(self._scratch) / name, task)
        try:
            try:
                with _room_needed(rollout.root):
                    await _to_the_end(in_thread(rollout.prepare))
                if self.config.sandbox.kind in BUILDS:
                    await self.image_ready(rollout)
            except Exception as e:  # noqa: BLE001 - raised in the attempt, which has not begun
                rollout.failed_set_up = e
            yield rollout
        finally:
            # A log has megabytes: they are read in a thread.
            most = self.config.keep_logs
            await _to_the_end(in_thread(_finish, rollout, self.logs, most))

    async def image_ready(self, rollout: Rollout) -> None:
        """Pull or build an image once in this process, before any time of a rollout runs; and put
        what it has in its working folder into the rollout's.

        Raises:
            InfrastructureError: it cannot be had.
        """
        program, image, harbor = self.config.sandbox.kind, rollout.image, rollout.harbor
        had = '"$0" image inspect "$1" > /dev/null 2>&1 || exec "$0" pull "$1"'
        argv = ["sh", "-c", had, program, image]
        if harbor is not None and harbor.image is None:
            # Also if it is there: the builder's cache knows what of it has changed since.
            argv = [program, "build", "-t", image, str(harbor.task / "environment")]
        if (pull := self._images.get(image)) is None:
            pull = self._images[image] = asyncio.ensure_future(self._do(argv))
            pull.add_done_callback(partial(self._pulled, image))
        ended = await asyncio.shield(pull)
        if ended.how == "exited" and not ended.code and harbor is not None:
            there, name = shlex.quote(harbor.workdir), f"{FOLDER}{rollout.name}-image"
            copy = ["sh", "-c", f"[ ! -d {there} ] || cp -a {there}/. /stepwell/"]
            run = [program, "run", "--rm", "--name", name]
            argv = [*run, "--volume", f"{rollout.work}:/stepwell", image, *copy]
            ended = await self._do(argv, after=(program, "rm", "--force", name))
            await _to_the_end(in_thread(rollout.count_own))
        if ended.how != "exited" or ended.code:
            raise InfrastructureError(
                f"{program}: image {image}: {ended.how} {ended.code}: {ended.detail}"
            )

    def _pulled(self, image: str, pull: asyncio.Task[Ended]) -> None:
        """The next rollout asks again for an image that could not be had."""
        failed = pull.cancelled() or pull.exception() is not None
        if failed or pull.result().how != "exited" or pull.result().code:
            self._images.pop(image, None)

    async def _do(self, argv: Sequence[str], after: Sequence[str] = ()) -> Ended:
        """The end of a command of the container's program; `detail` is its last line."""
        file = folder_of_worker(self._scratch) / f"image-{uuid.uuid4().hex}.log"
        env = {**client_env(), "PATH": self.path}
        job = Job(argv, self._scratch, env, file, timeout_s=PULL_S, after=after)
        try:
            ended = await run_job(job)
            return replace(ended, detail=ended.detail or _last_line(file))
        except OSError as e:
            raise InfrastructureError(f"no process can be started: {e}") from e
        finally:
            file.unlink(missing_ok=True)

    def _check(self) -> None:
        """
        Raises:
            RolloutError: what every rollout needs is missing.
        """
        config = self.config
        program, where = config.command[0], "on the PATH"
        path = config.env.get("PATH", self.path)
        is_here = config.sandbox.kind in ("process", "bubblewrap") and "{" not in program + path
        found: str | Path = program
        if "/" in program and not program.startswith("/"):  # begins in the copy
            is_here = is_here and "{" not in (config.workdir or "")
            found = Path(config.workdir or os.devnull, program).absolute()
            where = f"in rollout.harness.workdir ({config.workdir})"
        if is_here and shutil.which(found, path=path) is None:
            raise RolloutError(
                f"rollout.harness.command is {program!r}, which is not {where}; "
                + install_hint(config.preset)
            )
        for key, folder in (
            ("workdir", None if "{" in (config.workdir or "{") else Path(config.workdir or "")),
            ("grade.files", None if config.grade is None else config.grade.files),
        ):
            if folder is not None and not folder.is_dir():
                raise RolloutError(
                    f"rollout.harness.{key} is {str(folder)!r}, which is no folder in {Path.cwd()};"
                    " name the folder that is copied"
                )


class Rollout:
    """The folders of one rollout, and what is run in them."""

    def __init__(
        self,
        harness: Harness,
        name: str,
        root: Path,
        task: Mapping[str, Any],
    ) -> None:
        self._harness = harness
        self._config = harness.config
        self.name = name
        self.root = root
        self.work, self.home, self.tmp = (root / part for part in ("work", "home", "tmp"))
        self._task = task
        folders = {"workdir": str(self.work), "home": str(self.home)}
        self._values = {"model": harness.config.model, **folders}
        self._url = ""
        """Base URL of its trajectory."""
        self.harbor: HarborLayout | None = None
        self.failed_set_up: Exception | None = None
        self.why = ""
        """End of its log: the failure, if there was one."""
        self._own = (0, 0)
        """Bytes and files of the template, the image and the tests, which are not the agent's."""
        # Beside the folders that the agent may write: it is read here, links would be followed.
        self.log = root.with_name(f"{root.name}.log")
        self._runs = 0

    def prepare(self) -> None:
        """Make the folders and copy the template.

        Raises:
            HarnessError: the task names a template that is not there.
            DataError: the sandbox does not build what a Harbor task needs.
            OSError: there is no room.
        """
        # Homes hold keys, and the system's temporary folder is everybody's.
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.work, self.home, self.tmp):
            folder.mkdir(parents=True)
        if "harbor" in self._task:
            kind = self._config.sandbox.kind
            self.harbor = HarborLayout(self._task["harbor"], self.root, self.work, kind)
            self.harbor.prepare()
        if self._config.workdir is not None:
            template = Path(self._inside(self._config.workdir))
            if not template.is_dir():
                raise HarnessError(f"workdir: there is no folder {template}; correct the task")
            _copy(template, self.work)
        self.count_own()

    def count_own(self) -> None:
        """Count what is in the folders by now as not the agent's. Raises OSError."""
        self._own = _size(self.root)

    def write_files(self, base_url: str, api_key: str) -> None:
        """Write the files of the home, as all from here on fill the gateway's address and key in.
        Raises OSError."""
        self._url = base_url
        called = url_inside(base_url, self._config.sandbox)
        self._values |= {"base_url": called, "api_key": api_key}
        for name, text in self._config.files.items():
            file = self.home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.fill_text(text))
        self._add_own(self.home)

    def _add_own(self, folder: Path) -> None:
        """Count what has been brought here after the template. Raises OSError."""
        (size, n), (more, n_more) = self._own, _size(folder)
        self._own = (size + more, n + n_more)

    def _bring(self, files: Path) -> None:
        """Copy the files of grading over what the agent has left. Raises OSError."""
        copy_over(files, self.work)
        self._add_own(files)

    def _bring_tests(self, harbor: HarborLayout) -> list[str]:
        """Bring a Harbor task's tests; return the command that runs them. Raises OSError."""
        command = harbor.bring_tests()
        self._add_own(harbor.tests)
        return command

    async def play(self, base_url: str, api_key: str) -> None:
        """Run the command; returns if what it has done is to be graded.

        Raises:
            HarnessError: the agent failed, or its task cannot be set up.
            InfrastructureError: the machine failed.
            TimeoutError: it ran too long.
        """
        with self._failure_noted():
            if self.failed_set_up is not None:
                raise self.failed_set_up
            with _room_needed(self.home):
                await _to_the_end(in_thread(self.write_files, base_url, api_key))
            command = self.fill(self._config.command)
            self.judge(await self.run(command, self._config.timeout_s, hidden=self._tests()))

    def _keys(self) -> list[Path]:
        """The folder with the gateway's key, if this machine has it."""
        run_dir = self._harness.run_dir
        return [run_dir] if run_dir is not None and run_dir.is_dir() else []

    def _tests(self) -> list[Path]:
        """Folders with what scores the agent, or solves its task."""
        grade = self._config.grade
        own = [] if grade is None or grade.files is None else [grade.files.absolute()]
        return own if self.harbor is None else [*own, self.harbor.task]

    async def grade(self) -> float | None:
        """Score what the agent has left; None where `rollout.reward` scores.

        Raises:
            HarnessError: it cannot be graded.
            InfrastructureError: the machine failed.
        """
        with self._failure_noted():
            return await self._grade()

    @contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as e:  # its log says it, and it is raised
            self.why = f"\n--- {type(e).__name__}: {e}\n"
            raise

    async def _grade(self) -> float | None:
        harness, grade = self._harness, self._config.grade
        self.check_folders()
        if self.harbor is not None:
            with _room_needed(self.root):
                command = await _to_the_end(in_thread(self._bring_tests, self.harbor))
            return await self.grade_by_harbor(self.harbor, command)
        if grade is None:
            return None
        if grade.files is not None:
            with _room_needed(self.work):
                await _to_the_end(in_thread(self._bring, grade.files))
        if grade.command is not None:
            return await self.grade_by_command(grade)
        transcript = []
        if harness.transcript is not None:
            transcript = await harness.transcript(self._url)
        try:
            async with asyncio.timeout(grade.timeout_s) as limit:
                if inspect.iscoroutinefunction(harness.grader):
                    reward = await harness.grader(self.work, transcript, self._task)
                else:
                    reward = await in_thread(harness.grader, self.work, transcript, self._task)
        except Exception as e:  # foreign code: no score is not 0
            why = f": {type(e).__name__}: {shown(e)}"
            if isinstance(e, TimeoutError) and limit.expired():
                why = f" took more than {grade.timeout_s:g} s"
            raise HarnessError(f"grading: {grade.function}{why}") from e
        if reward is None:
            return None
        if isinstance(reward, bool) or not is_reward(reward):
            raise HarnessError(
                f"grading: {grade.function} returned {shown(reward) or 'a number':.80} "
                f"({type(reward).__name__}); return a number within ±{MAX_REWARD:g}"
            )
        return float(reward)

    def fill(self, texts: Sequence[str]) -> list[str]:
        return [self.fill_text(text) for text in texts]

    def fill_text(self, text: str, values: Callable[[str], str] | None = None) -> str:
        """`text` with its placeholders filled.

        Raises:
            HarnessError: the task has no such value.
        """
        value = values or self._value
        return PLACEHOLDER.sub(lambda found: found[1] or value(found[3]), text)

    def _value(self, name: str) -> str:
        if name in self._values:
            return self._values[name]
        _, _, path = name.partition(".")
        if path != "prompt":
            return task_value(self._task, path)
        prompt = prompt_of(self._task)
        return prompt if self.harbor is None else self.harbor.here(prompt)

    def _inside(self, text: str) -> str:
        """A path whose placeholders name one folder each: tasks lead nowhere else."""

        def part(name: str) -> str:
            value = self._value(name)
            if name.startswith("task.") and not re.fullmatch(r"(?!\.+$)[\w.@+-]+", value):
                raise HarnessError(f"workdir: {{{name}}} is {value!r}, which is no folder's name")
            return value

        return self.fill_text(text, part)

    @property
    def verifier_s(self) -> float:
        """Seconds that a Harbor task gives its own tests, which no configuration knows."""
        return 0.0 if self.harbor is None else self.harbor.verifier_timeout_s

    @property
    def image(self) -> str:
        """Image of a container."""
        if self.harbor is None:
            return self._config.sandbox.image or ""
        return self.harbor.image or self.harbor.tag

    async def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        hidden: Sequence[Path] = (),
    ) -> Ended:
        """Run a command in the sandbox, in the work folder.

        Args:
            env: over the environment, when a Harbor task is graded.
            hidden: folders that it must not see, besides those of other rollouts.
        """
        config, grading = self._config, env is not None
        self._runs += 1
        own = {} if self.harbor is None else self.harbor.env
        whole = {
            "PATH": self._harness.path,
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **own,
            **{name: self.fill_text(value) for name, value in config.env.items()},
            **(env or {}),
        }
        request = SandboxRequest(
            name=f"{FOLDER}{self.name}-{self._runs}",
            command=command,
            root=self.root,
            workdir=self.work,
            env=whole,
            choice=config.sandbox,
            limits=config.limits,
            image=self.image or None,
            mounts={} if self.harbor is None else self.harbor.mounts(grading=grading),
            hidden=[self.root.parent, *self._keys(), *hidden],
        )
        plan = self._harness.sandbox(request)
        limits = config.limits
        # A file of that size has exceeded the bound.
        disk = None if limits.disk_mb is None else (limits.disk_mb + 1) * _MB
        job = Job(
            argv=plan.argv,
            cwd=self.work,
            env=plan.env,
            log=self.log,
            timeout_s=timeout_s,
            bounds=_bounds(limits, self._own),
            limits=Limits(file_size=disk),
            folders=(self.root,),
            after=plan.after,
        )
        try:
            return await run_job(job)
        except OSError as e:
            if e.errno == errno.E2BIG:  # would be so again
                raise HarnessError(
                    f"{command[0]}: an argument or a variable is longer than the system takes "
                    "(128 KiB on Linux); write what the task says into a file of "
                    "rollout.harness.files, and name that"
                ) from e
            raise InfrastructureError(f"no process can be started: {e}") from e
        except ValueError as e:  # NUL, or half a character
            raise HarnessError(
                f"{command[0]}: an argument or a variable holds what no command is given ({e}); "
                "write what the task says into a file of rollout.harness.files, and name that"
            ) from e

    def judge(self, ended: Ended) -> None:
        """Returns if what was done is to be graded.

        Raises:
            HarnessError, InfrastructureError, TimeoutError
        """
        config, code = self._config, ended.code
        if ended.how == "timeout":
            if config.on_timeout == "grade":
                return
            raise TimeoutError(f"it ran longer than {config.timeout_s:g} s")
        if ended.how == "exited" and (code == 0 or code in config.gave_up):
            return
        if ended.how == "exited" and code in config.infrastructure:
            raise InfrastructureError(f"exit status {code}: {self._last_line()}")
        self._raise_if_not_run(ended, config.command[0])
        if ended.how == "exited":
            raise HarnessError(f"exit status {code}: {self._last_line()}{self._of_memory(code)}")
        raise HarnessError(_how(ended))

    def _of_memory(self, code: int) -> str:
        """The kernel may be quicker than our looks: it kills in a container that needs more."""
        limit, kind = self._config.limits.memory_mb, self._config.sandbox.kind
        if code != 128 + signal.SIGKILL or limit is None or kind not in ("docker", "podman"):
            return ""
        return f"; a container over rollout.harness.limits.memory_mb ({limit}) is killed so"

    def _raise_if_not_run(self, ended: Ended, program: str) -> None:
        """
        Raises:
            InfrastructureError: the command was not run at all, or nobody knows how it ended.
        """
        if ended.how in ("unstarted", "lost", "stopped"):
            raise InfrastructureError(f"{program}: {ended.detail or ended.how}")
        in_container = self._config.sandbox.kind in BUILDS
        if in_container and ended.how == "exited" and ended.code == _DAEMON:
            raise InfrastructureError(f"{program} cannot be run: {self._last_line()}")

    def check_folders(self) -> None:
        """
        Raises:
            HarnessError: the agent has put something else, a link for instance, in place of a
                folder that is mounted or written next.
        """
        harbor = () if self.harbor is None else (self.harbor.logs,)
        for folder in (self.work, self.home, self.tmp, *harbor):
            if folder.is_symlink() or not folder.is_dir():
                raise HarnessError(f"the agent has replaced or removed its folder {folder.name}")

    async def grade_by_command(self, grade: GradeConfig) -> float:
        """
        Raises:
            HarnessError: there is no score.
            InfrastructureError: the machine failed.
        """
        command = self.fill(grade.command or ())
        if grade.file is not None:  # what the agent may have written there is no score
            with _room_needed(self.work):
                await _to_the_end(in_thread(remove, inside(self.work, grade.file)))
        ended = await self.run(command, grade.timeout_s)
        self._raise_if_not_run(ended, command[0])
        if ended.how == "timeout":
            raise HarnessError(f"grading: {command[0]} took more than {grade.timeout_s:g} s")
        if ended.how != "exited" or ended.code in _UNSTARTED:
            why = _how(ended) if ended.how != "exited" else _UNSTARTED[ended.code]
            raise HarnessError(f"grading: {command[0]}: {why}")
        if grade.file is None:
            return 1.0 if ended.code == 0 else 0.0
        reward_file = inside(self.work, grade.file)
        return read_number(reward_file, f"exit status {ended.code}: {self._last_line()}")

    async def grade_by_harbor(self, harbor: HarborLayout, command: Sequence[str]) -> float:
        """Run a Harbor task's tests. Raises as `grade_by_command`."""
        timeout_s = harbor.verifier_timeout_s
        ended = await self.run(command, timeout_s, harbor.verifier_env)
        self._raise_if_not_run(ended, command[0])
        if ended.how == "timeout":
            raise HarnessError(f"grading: tests/test.sh took more than {timeout_s:g} s")
        if ended.how != "exited":
            raise HarnessError(f"grading: tests/test.sh: {_how(ended)}")
        return harbor.reward(f"exit status {ended.code}: {self._last_line()}")

    def _last_line(self) -> str:
        return _last_line(self.log)


def _last_line(file: Path) -> str:
    lines = [line.strip() for line in last_lines(file).splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"


@contextmanager
def _room_needed(folder: Path) -> Iterator[None]:
    """
    Raises:
        InfrastructureError: there is no room in the folder, or it cannot be written.
    """
    try:
        yield
    except OSError as e:
        raise InfrastructureError(f"the rollout's folder {folder}: {e}") from e


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` also if the caller is cancelled meanwhile: a thread that writes into a folder
    would go on after the folder was removed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _how(ended: Ended) -> str:
    if ended.how == "signal":
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(ended.code, ended.code)}"
    if ended.how == "bound":
        return f"rollout.harness.limits: {ended.detail}"
    return ended.how


def _bounds(limits: HarnessLimits, own: tuple[int, int]) -> Bounds:
    def bytes_of(mb: int | None, more: int = 0) -> int | None:
        return None if mb is None else mb * _MB + more

    return Bounds(
        cpu_s=limits.cpu_s,
        memory=bytes_of(limits.memory_mb),
        processes=limits.processes,
        disk=bytes_of(limits.disk_mb, own[0]),
        files=None if limits.files is None else limits.files + own[1],
        output=bytes_of(limits.output_mb),
    )


def prompt_of(task: Mapping[str, Any]) -> str:
    """The task's question, or the last message of its user."""
    if "question" in task:
        return str(task["question"])
    asked = [m.get("content") for m in task.get("messages") or () if m.get("role") == "user"]
    content = asked[-1] if asked else ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return str(content)


def task_value(task: Mapping[str, Any], path: str) -> str:
    """The value at a path with dots, as text.

    Raises:
        HarnessError: the task has none.
    """
    value: Any = task
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise HarnessError(f"{{task.{path}}}: the task has no {part!r}; it has {list(task)}")
        value = value[part]
    return value if isinstance(value, str) else str(value)


def read_number(file: Path, output: str) -> float:
    """
    Raises:
        HarnessError: it holds no finite number.
    """
    text = ""
    try:
        text = read_written(file).strip()[:100]
        number = float(text)
    except FileNotFoundError as e:
        raise HarnessError(f"grading: no {file.name} was written ({output})") from e
    except OSError as e:
        raise HarnessError(f"grading: {file.name} is no plain file: {e} ({output})") from e
    except ValueError as e:
        shown = f"{text!r}, no number" if text else f"no number: {e}"
        raise HarnessError(f"grading: {file.name} holds {shown} ({output})") from e
    if number != number or number in (float("inf"), float("-inf")):
        raise HarnessError(f"grading: {file.name} holds {text!r}; write a finite number")
    return number


def install_hint(preset: str | None) -> str:
    """Return the remedy for a command that is missing."""
    if preset is None:
        return "install it, or give its whole path"
    known = PRESETS[preset]
    return f"install {known.title}: {known.install} ({known.needs})"


def path_of(path: str) -> str:
    """PATH of harnesses: commands beside this Python are found, too."""
    return os.pathsep.join([path, str(Path(sys.executable).parent)])


def folder_of_worker(scratch: Path) -> Path:
    """Folder of this process's rollouts. The machine's name is in it: workers of several may share
    `scratch`, and none knows which processes live elsewhere."""
    machine = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
    return scratch / f"{FOLDER}{machine}-{os.getpid()}"


def remove_abandoned(scratch: Path) -> None:
    """Remove folders of workers of this machine that were killed."""
    prefix = folder_of_worker(scratch).name.removesuffix(str(os.getpid()))
    for folder in scratch.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix)
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            try:
                remove(folder)
            except OSError as e:
                log.warning("a worker that was killed leaves something behind: %s", e)


def _grader(grade: GradeConfig | None) -> Any:
    """
    Raises:
        RolloutError: the function cannot be found.
    """
    if grade is None or grade.function is None:
        return None
    key = f"rollout.harness.grade.function is {grade.function!r}"
    try:
        found = dotted.resolve(grade.function)
    except Exception as e:  # foreign code
        raise RolloutError(
            f"{key}, which cannot be imported ({type(e).__name__}: {e}); name "
            "package.module:function or path/to/file.py:function"
        ) from e
    try:
        inspect.signature(found).bind("folder", "transcript", "task")
    except TypeError as e:
        raise RolloutError(f"{key}: {e}; write it as grade(folder, transcript, task)") from e
    return found


def _slug(text: object) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", str(text))[:40].strip("-") or "task"


def _copy(source: Path, to: Path) -> None:
    """Copy the content of a folder, but for sockets and pipes, which belong to processes."""
    shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, copy_function=_copy_file)


def _copy_file(source: str, to: str) -> None:
    if stat.S_ISREG(os.stat(source).st_mode):
        shutil.copy2(source, to)


def _size(folder: Path) -> tuple[int, int]:
    """Bytes on disk, and entries."""
    entries = [*folder.rglob("*")]
    return sum(e.lstat().st_blocks * 512 for e in entries), len(entries)


def _finish(rollout: Rollout, logs: Path | None, most: int) -> None:
    """Keep a rollout's log, with the reason why it failed, and remove all else that it has left
    here; what cannot be is told."""
    try:
        if logs is not None and most:
            logs.mkdir(parents=True, exist_ok=True)
            text = rollout.log.read_bytes() if rollout.log.is_file() else b""
            (logs / rollout.log.name).write_bytes(text + rollout.why.encode(errors="replace"))
            kept = []
            for file in logs.glob("*.log"):
                with suppress(FileNotFoundError):  # another worker removed it
                    kept.append((file.stat().st_mtime, file))
            for _, old in sorted(kept)[:-most]:
                old.unlink(missing_ok=True)
    except OSError as e:  # a full disk: the rollout's end is what counts
        log.warning("the log of a rollout could not be kept: %s", e)
    try:
        remove(rollout.root)
        remove(rollout.log)
    except OSError as e:
        log.warning("a rollout leaves something behind: %s", e)
