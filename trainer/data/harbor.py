"""This module reads Harbor task folders (harborframework.com, schema 1.0 to 1.4) as tasks.

    tasks/NAME/task.toml         times, image, environment variables
               instruction.md    the question
               environment/      Dockerfile and what it copies
               tests/test.sh     writes /logs/verifier/reward.txt (or reward.json)

A task's `harbor` is what a harness needs of it (`rollout/harbor.py`). Whatever of a task would have
an effect that we do not give it is refused by name: a task that is run otherwise than it was meant
scores something else. Does not own how tasks are run.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, Final

from stepwell.trainer.config import HarborSource
from stepwell.trainer.data.listed import ListedTasks
from stepwell.trainer.errors import DataError

TASK_FILE: Final = "task.toml"
SCHEMAS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
WORKDIR: Final = "/app"
_READ: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(
        {"version", "schema_version", "metadata", "task", "agent", "verifier", "environment"}
        | {"solution", "source"}
    ),
    "agent": frozenset({"timeout_sec"}),
    "verifier": frozenset({"timeout_sec", "env", "environment_mode"}),
    "environment": frozenset(
        {"docker_image", "build_timeout_sec", "env", "workdir", "cpus", "memory_mb", "storage_mb"}
        | {"memory", "storage", "gpus", "allow_internet", "network_mode", "os"}
    ),
}
"""Keys of the file and of its sections that are read, or that have no effect on a rollout."""
_NEUTRAL: Final[Mapping[tuple[str, str], tuple[Any, ...]]] = {
    ("verifier", "environment_mode"): ("shared",),
    ("environment", "gpus"): (0,),
    ("environment", "allow_internet"): (True,),
    ("environment", "network_mode"): ("public",),
    ("environment", "os"): ("linux",),
}
"""Values of keys that ask for nothing that we do not do."""
_ON_HOST: Final = frozenset({"FROM", "WORKDIR", "COPY", "ENV", "LABEL", "ARG"})
"""Instructions of a Dockerfile that are followed without building an image."""


class HarborTasks(ListedTasks):
    """The tasks of a folder, by name.

    Raises:
        DataError: there is none, or one has something that is not read.
    """

    def __init__(self, config: HarborSource) -> None:
        root = Path(config.path)
        folders = [root] if (root / TASK_FILE).is_file() else sorted(root.glob(f"*/{TASK_FILE}"))
        folders = [f if f.is_dir() else f.parent for f in folders]
        if not folders:
            raise DataError(
                f"path is {str(config.path)!r}, where no folder has a {TASK_FILE}; name a folder "
                "of Harbor tasks"
            )
        super().__init__([read_task(folder.absolute()) for folder in folders])


def read_task(folder: Path) -> dict[str, Any]:
    """
    Raises:
        DataError: it is no task, or has something that is not read.
    """
    try:
        raw = tomllib.loads((folder / TASK_FILE).read_text())
        instruction = (folder / "instruction.md").read_text()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise DataError(f"{folder}: {e}; a Harbor task has {TASK_FILE} and instruction.md") from e
    _refuse(folder, raw)
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder} has no tests/test.sh, which scores it; write one")
    verifier, environment = raw.get("verifier", {}), raw.get("environment", {})
    about = raw.get("task", {})
    return {
        "instance_id": about.get("name", folder.name),
        "data_source": "harbor",
        "question": instruction.strip(),
        "answer": None,
        "metadata": {**raw.get("metadata", {}), "harbor_task": folder.name},
        "harbor": {
            "folder": str(folder),
            "image": environment.get("docker_image"),
            "workdir": _mounted(folder, environment.get("workdir") or workdir_of(folder)),
            "env": _texts(folder, "environment.env", environment.get("env", {})),
            "verifier_env": _texts(folder, "verifier.env", verifier.get("env", {})),
            "verifier_timeout_s": verifier.get("timeout_sec"),
        },
    }


def dockerfile(folder: Path) -> list[tuple[str, str]]:
    """The instructions of a task's Dockerfile, with their arguments; none, without one."""
    file = folder / "environment" / "Dockerfile"
    if not file.is_file():
        return []
    found: list[tuple[str, str]] = []
    for line in file.read_text().replace("\\\n", " ").splitlines():
        if line.strip() and not line.strip().startswith("#"):
            name, _, rest = line.strip().partition(" ")
            found.append((name.upper(), rest.strip()))
    return found


def workdir_of(folder: Path) -> str:
    """The working folder of a task's image, as its Dockerfile names it.

    Raises:
        DataError: a variable is in its name.
    """
    at = None
    for name, rest in dockerfile(folder):
        if name == "WORKDIR" and "$" in rest:
            raise DataError(
                f"{folder}/environment/Dockerfile has WORKDIR {rest}; name it in "
                f"environment.workdir of {TASK_FILE}"
            )
        at = beneath(at, rest) if name == "WORKDIR" else at
    return at or WORKDIR


def beneath(at: str | None, workdir: str) -> str:
    """The working folder after a WORKDIR. `at`: the one before it; None: the image's own."""
    return normpath(PurePosixPath(at or "/", workdir))


def _mounted(folder: Path, workdir: str) -> str:
    """
    Raises:
        DataError: no rollout's folder can stand there.
    """
    found = beneath(None, workdir)
    if found in ("/", "/tests", "/logs"):
        raise DataError(
            f"{folder}: the working folder is {found}, where no rollout's own can be; name another "
            f"one in environment.workdir of {TASK_FILE}"
        )
    return found


def variables(arguments: str) -> dict[str, str]:
    """Variables of an ENV, of both its forms: `NAME=VALUE …` and `NAME VALUE`."""
    first, *more = shlex.split(arguments)
    if "=" not in first:
        return {first: arguments.partition(first)[2].strip()}
    return {name: value for name, _, value in (each.partition("=") for each in (first, *more))}


def refuse_image(folder: Path, sandbox: str) -> None:
    """
    Raises:
        DataError: the task's environment has to be built, and nothing here builds it.
    """
    for name, rest in dockerfile(folder):
        of_build = name == "COPY" and rest.startswith("--from")
        has_variable = name in ("COPY", "ENV") and "$" in rest
        if name not in _ON_HOST or of_build or has_variable:
            raise DataError(
                f"{folder}/environment/Dockerfile has {name} {rest:.60}, which only a container "
                f"does, and rollout.harness.sandbox.kind is {sandbox!r}; set it to docker or podman"
            )
        for source in copied(rest)[:-1] if name == "COPY" else ():
            _refuse_outside(folder / "environment", source)


def copied(arguments: str) -> list[str]:
    """Sources of a COPY, then where to."""
    return [each for each in shlex.split(arguments) if not each.startswith("--")]


def _refuse_outside(environment: Path, source: str) -> None:
    """Refuse a source outside the task, as a build does.

    Raises:
        DataError: it is no file or folder below `environment`.
    """
    found = (environment / source.lstrip("/")).resolve()
    if not found.exists() or not found.is_relative_to(environment.resolve()):
        raise DataError(
            f"{environment}/Dockerfile copies {source}, which is no file or folder below "
            f"{environment}; only a container's build knows other forms: set "
            "rollout.harness.sandbox.kind to docker or podman"
        )


def _refuse(folder: Path, raw: Mapping[str, Any]) -> None:
    version = str(raw.get("schema_version", raw.get("version", "1.0")))
    if version not in SCHEMAS:
        raise DataError(
            f"{folder}/{TASK_FILE}: schema_version is {version!r}; {', '.join(SCHEMAS)} are read"
        )
    for section, known in _READ.items():
        values = raw if not section else raw.get(section, {})
        for key, value in values.items():
            name = f"{section}.{key}" if section else key
            if key not in known and value not in ([], {}, None):
                raise DataError(
                    f"{folder}/{TASK_FILE} has {name}, which Stepwell does not read: the task "
                    "would be run otherwise than it was meant; leave it out, or run it with "
                    "Harbor itself (docs/harbor.md)"
                )
            allowed = _NEUTRAL.get((section, key))
            if allowed is not None and value not in (*allowed, None):
                raise DataError(
                    f"{folder}/{TASK_FILE}: {name} is {value!r}, which Stepwell does not do; only "
                    f"{allowed[0]!r} is run here (docs/harbor.md)"
                )
    if (folder / "environment" / "docker-compose.yaml").is_file():
        raise DataError(
            f"{folder}/environment/docker-compose.yaml: services are not started here; run the "
            "task with Harbor itself (docs/harbor.md)"
        )


def _texts(folder: Path, key: str, values: Mapping[str, Any]) -> dict[str, str]:
    for name, value in values.items():
        if "${" in str(value):
            raise DataError(
                f"{folder}/{TASK_FILE}: {key}.{name} is {value!r}, of this machine's environment; "
                "write the value"
            )
    return {name: str(value) for name, value in values.items()}
