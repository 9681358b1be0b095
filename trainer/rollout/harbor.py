"""This module lays a Harbor task out in a rollout's folder, and reads its verifier's reward.

    environment/ ──► root/work      as the image's working folder (/app)
    tests/       ──► root/tests     as /tests, only when the agent has ended
                     root/logs      as /logs; verifier/reward.txt or reward.json is the score

Containers and bubblewrap mount these folders at their names. A process of this machine has no names
of its own: there `/app`, `/tests` and `/logs` are written out in the instruction and in the text
files of tests/. Does not own running (`harness.py`) or reading task.toml (`data/harbor.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from stepwell.trainer.data.harbor import beneath, copied, dockerfile, refuse_image, variables
from stepwell.trainer.errors import HarnessError
from stepwell.trainer.rollout.folders import copy_over, inside, read_written, remove

BUILDS = ("docker", "podman")
TEST = "test.sh"
VERIFIER_S = 600.0
"""Seconds of a verifier whose task names none, as in Harbor."""


class HarborLayout:
    """A Harbor task in the folder of a rollout.

    Args:
        about: `harbor` of the task.
        sandbox: kind of the sandbox.

    Raises:
        DataError: the sandbox does not build what the task needs.
    """

    def __init__(self, about: Mapping[str, Any], root: Path, work: Path, sandbox: str) -> None:
        self.task = Path(about["folder"])
        self._about = about
        self._root, self._work = root, work
        self._sandbox = sandbox
        self.tests, self.logs = root / "tests", root / "logs"
        if sandbox not in BUILDS:
            refuse_image(self.task, sandbox)

    @property
    def env(self) -> dict[str, str]:
        own: dict[str, str] = {}
        if self._sandbox not in BUILDS:  # an image has its own
            for name, rest in dockerfile(self.task):
                own |= variables(rest) if name == "ENV" else {}
        return {name: self.here(value) for name, value in (own | self._about["env"]).items()}

    @property
    def verifier_env(self) -> dict[str, str]:
        return self.env | {n: self.here(v) for n, v in self._about["verifier_env"].items()}

    @property
    def workdir(self) -> str:
        """Working folder of the image."""
        return str(self._about["workdir"])

    @property
    def verifier_timeout_s(self) -> float:
        return float(self._about["verifier_timeout_s"] or VERIFIER_S)

    @property
    def image(self) -> str | None:
        """Image that is pulled; None: the task's Dockerfile is built (`tag`)."""
        image: str | None = self._about["image"]
        return image

    @property
    def tag(self) -> str:
        """Image that is built: one per folder, since task sets may have a name in common."""
        name = re.sub(r"[^a-z0-9]+", "-", self.task.name.lower()).strip("-") or "task"
        return f"stepwell-harbor/{name}:{sha256(bytes(self.task)).hexdigest()[:12]}"

    def mounts(self, *, grading: bool) -> dict[str, Path]:
        """Folders by their names inside; none for processes, which see the folders themselves."""
        if self._sandbox == "process":
            return {}
        inside = {self._about["workdir"]: self._work, "/logs": self.logs}
        return inside | {"/tests": self.tests} if grading else inside

    def prepare(self) -> None:
        """Raises OSError."""
        (self.logs / "verifier").mkdir(parents=True)
        (self.logs / "agent").mkdir()
        if self._sandbox in BUILDS:
            return  # the image has it
        environment, at = self.task / "environment", None
        for name, rest in dockerfile(self.task):
            if name == "COPY":
                self._copy(environment, copied(rest), at or self._about["workdir"])
            elif name == "WORKDIR":
                at = beneath(at, rest)

    def _copy(self, environment: Path, arguments: list[str], at: str) -> None:
        """
        Raises:
            HarnessError: it leads out of the working folder, which alone is there.
        """
        *sources, to = arguments
        inside = Path(os.path.normpath(Path(at, to)))
        if not inside.is_relative_to(self.workdir):
            raise HarnessError(
                f"{environment}/Dockerfile copies to {to}, outside {self.workdir}, which only a "
                "container has; set rollout.harness.sandbox.kind to docker or podman"
            )
        target = self._work / inside.relative_to(self.workdir)
        for source in sources:
            found = environment / source.lstrip("/")
            into = len(sources) > 1 or to.endswith(("/", ".")) or target.is_dir()
            place = target / found.name if into and not found.is_dir() else target
            if not place.resolve().is_relative_to(self._work.resolve()):
                raise HarnessError(
                    f"{environment}/Dockerfile copies to {to}, which leads out of {self.workdir} "
                    "by a link that was copied before; copy no such link"
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            if found.is_dir():
                copy_over(found, place)
            else:
                remove(place)
                shutil.copy2(found, place)
        (self._work / "Dockerfile").unlink(missing_ok=True)

    def bring_tests(self) -> list[str]:
        """Copy the tests; returns the command that runs them. Raises OSError."""
        for folder in (self.tests, self.logs / "verifier"):
            remove(folder)  # what the agent may have written is no test, and no score
        shutil.copytree(self.task / "tests", self.tests, symlinks=True)
        (self.logs / "verifier").mkdir()
        if self._sandbox == "process":
            for file in self.tests.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    try:
                        text = file.read_bytes().decode()
                    except UnicodeDecodeError:
                        continue
                    if (here := self.here(text)) != text:
                        file.write_bytes(here.encode())  # all else as it is, ends of lines too
            return ["bash", str(self.tests / TEST)]
        return ["bash", f"/tests/{TEST}"]

    def here(self, text: str) -> str:
        """`text` with the names of folders inside as a process has to call them."""
        if self._sandbox != "process":
            return text
        names = {self._about["workdir"]: self._work, "/tests": self.tests, "/logs": self.logs}
        pattern = "|".join(re.escape(n.rstrip("/")) for n in sorted(names, key=len, reverse=True))
        found = re.compile(rf"(?<![\w./$}}-])({pattern})(?![\w-]|\.\w)")
        return found.sub(lambda m: str(names.get(m[1], names.get(m[1] + "/"))), text)

    def reward(self, output: str) -> float:
        """
        Raises:
            HarnessError: the verifier wrote none.
        """
        folder = self.logs / "verifier"
        try:
            if (file := inside(self.logs, "verifier/reward.json")).is_file():
                value = _reward_in(json.loads(read_written(file)))
            else:
                value = read_written(folder / "reward.txt")
            reward = float(value)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as e:
            raise HarnessError(f"grading: {folder.name} wrote no reward: {e} ({output})") from e
        if not abs(reward) < float("inf"):
            raise HarnessError(f"grading: the verifier's reward is {reward}; write a finite number")
        return reward


def _reward_in(written: Any) -> Any:
    """
    Raises:
        TypeError: there is none in it, or nobody knows which.
    """
    if not isinstance(written, Mapping):
        raise TypeError(f"reward.json holds a {type(written).__name__}, no object")
    if "reward" in written:
        return written["reward"]
    if len(written) != 1:
        raise TypeError(f"reward.json has {', '.join(written) or 'nothing'} and no reward")
    return next(iter(written.values()))
