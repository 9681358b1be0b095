"""The section `rollout.harness`: an agent that is a command.

Texts of `command`, `env`, `files`, `workdir` and `grade.command` have these placeholders;
`{{name}}` is `{name}` as it stands:

    {base_url} {api_key} {model}        what a rollout is to call; most clients want {base_url}/v1
    {workdir} {home}                    the rollout's own folders
    {task.prompt}                       the question, or the last message of the user
    {task.instance_id} {task.answer} {task.metadata.KEY}      anything of the task

Loads no trainer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from stepwell.datapool.config import Section, TextPath
from stepwell.trainer.config.harness_presets import PRESETS

HARNESS: Final = "harness"
"""`rollout.agent` of a run whose agent is `rollout.harness`."""
SETTLE_S: Final = 60.0
"""Seconds for what surrounds a harness and its grading: the copy of a work folder, calls of the
gateway."""
_NAME = r"\{([a-z_]+(?:\.[A-Za-z0-9_-]+)*)\}"
PLACEHOLDER: Final = re.compile(rf"\{{({_NAME})\}}|{_NAME}")
"""`{{name}}`, which stands for itself in single braces (its group 1), or `{name}` (group 3)."""
_KNOWN: Final = frozenset({"base_url", "api_key", "model", "workdir", "home"})

OnTimeout: TypeAlias = Literal["drop", "grade"]


class HarnessLimits(Section):
    """Most that one rollout's processes use together; null: anything. What exceeds one is killed,
    and the rollout is lost with that reason."""

    cpu_s: int | None = Field(default=None, ge=1)
    """CPU time, seconds."""
    memory_mb: int | None = Field(default=8192, ge=16)
    """Resident memory."""
    processes: int | None = Field(default=512, ge=1)
    """Processes at once."""
    disk_mb: int | None = Field(default=4096, ge=1)
    """Work folder, home and temporary files, beyond the template's own."""
    files: int | None = Field(default=200_000, ge=1)
    """Files and folders in them."""
    output_mb: int = Field(default=16, ge=1)
    """Output, which is the rollout's log."""


class SandboxChoice(Section):
    """Sandbox in which commands run; a string alone is its `kind`."""

    named_by = "kind"

    kind: str = Field(default="process", min_length=1)
    """`process`: processes of this machine, with an environment and a home of their own, which see
    its files. `bubblewrap`: `bwrap`, where the file system is read-only and homes are empty.
    `docker`, `podman`: a container of `image`. Or the dotted path of a function
    `(SandboxRequest) -> SandboxPlan` (`stepwell.trainer.rollout.sandboxes`)."""
    image: str | None = Field(default=None, min_length=1)
    """Image of `docker` and `podman`, which holds the harness. Harbor tasks bring their own."""
    network: str = Field(default="host", min_length=1)
    """Network of a container. Other than `host`, the gateway is called at the host's name, and has
    to listen there (`gateway.host`)."""
    visible: tuple[Path, ...] = ()
    """Paths that `bubblewrap` and containers see too, read-only: where a harness is installed."""
    cpus: float | None = Field(default=None, gt=0)
    """CPUs of a container."""

    @field_validator("visible", mode="after")
    @classmethod
    def _begin_here(cls, visible: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.absolute() for path in visible)

    @property
    def needs_image(self) -> bool:
        """True if it is a container whose image has to come with the task."""
        return self.kind in ("docker", "podman") and self.image is None

    @model_validator(mode="after")
    def _only_containers_have_an_image(self) -> SandboxChoice:
        if self.image is not None and self.kind in ("process", "bubblewrap"):
            raise ValueError(
                f"image is {self.image!r}, but kind is {self.kind!r}, which has none; set kind to "
                "docker or podman, or leave image out"
            )
        return self


class GradeConfig(Section):
    """The score of what a harness left in its folder; a string alone is its `function`."""

    named_by = "function"

    command: tuple[str, ...] | None = None
    """Run in the work folder, in the same sandbox, when the harness has ended. Exit status 0 is
    reward 1, any other 0; with `file`, the number there. A command that cannot be run, is killed or
    takes too long gives no score."""
    file: str | None = Field(default=None, min_length=1)
    """File in the work folder that holds the reward, a number, once `command` has ended."""
    function: str | None = None
    """Dotted path, or `file.py:name`, of `(folder, transcript, task) -> float | None`, sync or
    async: the work folder, the calls in order (`parent`, `messages`, …), and the task."""
    files: Path | None = None
    """Folder that is copied over the work folder before grading: tests that the agent must not
    see, or change."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Grading may take this long."""

    @field_validator("command", mode="after")
    @classmethod
    def _placeholders_are_known(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in command or ():
            check_placeholders(text)
        return command

    @model_validator(mode="after")
    def _one(self) -> GradeConfig:
        if (self.command is None) == (self.function is None):
            raise ValueError(
                f"command is {self.command} and function {self.function!r}; give one of them (a "
                "judge of the transcript is rollout.reward, without grade)"
            )
        if self.file is not None and self.command is None:
            raise ValueError(f"file is {self.file!r}, but there is no command; leave it out")
        if self.file is not None and (Path(self.file).is_absolute() or ".." in self.file):
            raise ValueError(f"file is {self.file!r}; name one inside the work folder")
        return self


class HarnessConfig(Section):
    """An agent that is a command, run in a folder of its own for each rollout; a string alone is
    its `preset`."""

    named_by = "preset"

    preset: str | None = None
    """Harness whose command, environment and files are known; keys given here go over them."""
    command: tuple[str, ...] = ()
    """The command and its arguments, with placeholders (see above). No shell is between: what a
    task says is one argument."""
    env: dict[str, str] = Field(default_factory=dict)
    """Its environment, besides PATH, HOME, TMPDIR, LANG and TERM. Nothing else is passed on."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files written into its home before it starts, by path there."""
    workdir: TextPath | None = None
    """Folder that each rollout gets a fresh copy of to work in; null: an empty one. May have
    placeholders: `templates/{task.metadata.repo}`."""
    model: str = Field(default="policy", min_length=1)
    """Name of the model in its calls; the gateway serves any."""
    timeout_s: float = Field(default=600.0, gt=0)
    """It may run this long."""
    on_timeout: OnTimeout = "drop"
    """Fate of the calls of one that ran too long: `drop` loses the rollout ("timeout");
    `grade` grades what it has done by then, and trains it."""
    gave_up: tuple[int, ...] = ()
    """Exit statuses of a harness that works and says that it could not solve its task: graded, as
    status 0 is. Any other status but 0 loses the rollout."""
    infrastructure: tuple[int, ...] = ()
    """Exit statuses that say that the machine failed (a service, a disk): the attempt is made
    again, and not counted."""
    limits: HarnessLimits = HarnessLimits()
    sandbox: SandboxChoice = SandboxChoice()
    grade: GradeConfig | None = None
    """The score; null: `rollout.reward` scores the transcript."""
    keep_logs: int = Field(default=200, ge=0)
    """Logs of rollouts that are kept, in `logs/harness` of the run; the newest."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        given = {"preset": raw} if isinstance(raw, str) else raw
        if not isinstance(given, dict) or not isinstance(name := given.get("preset"), str):
            return raw
        if name not in PRESETS:
            raise ValueError(
                f"preset is {name!r}, which is none of {', '.join(PRESETS)}; name one, or give "
                "command"
            )
        preset = PRESETS[name]
        parts = (("env", preset.env), ("files", preset.files))
        whole = {
            key: {**part, **own}
            for key, part in parts
            if isinstance(own := given.get(key) or {}, dict)  # else its own validator says so
        }
        return {"command": preset.command, "gave_up": preset.gave_up, **given, **whole}

    @field_validator("command", "env", "files", "workdir", mode="after")
    @classmethod
    def _placeholders_are_known(cls, value: Any) -> Any:
        texts = value.values() if isinstance(value, dict) else value
        for text in [value] if isinstance(value, str) else texts or ():
            check_placeholders(text)
        return value

    @field_validator("workdir", mode="after")
    @classmethod
    def _known_before_the_rollout(cls, workdir: str | None) -> str | None:
        for found in PLACEHOLDER.finditer(workdir or ""):
            if found[3] is not None and not found[3].startswith("task."):
                raise ValueError(
                    f"workdir is {workdir!r}; it is copied before there is a {{{found[3]}}}: use "
                    "placeholders of the task"
                )
        return workdir

    @field_validator("files", mode="after")
    @classmethod
    def _inside_the_home(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files names {name!r}; name files by their path in the home")
        return files

    @model_validator(mode="after")
    def _complete(self) -> HarnessConfig:
        if not self.command:
            raise ValueError("command is empty; give one, or a preset")
        if both := set(self.gave_up) & set(self.infrastructure):
            raise ValueError(f"gave_up and infrastructure both hold {min(both)}; choose one")
        if 0 in (*self.gave_up, *self.infrastructure):
            raise ValueError("gave_up or infrastructure holds 0, which is success; leave it out")
        return self

    @property
    def whole_s(self) -> float:
        """Seconds that one attempt may take, with grading and what surrounds it."""
        grading = 0.0 if self.grade is None else self.grade.timeout_s
        return self.timeout_s + grading + SETTLE_S


def check_placeholders(text: str) -> None:
    """
    Raises:
        ValueError: `text` has a placeholder that nobody fills.
    """
    for found in PLACEHOLDER.finditer(text):
        name = found[3]
        if name is None or name in _KNOWN or name.startswith("task."):
            continue
        raise ValueError(
            f"{text!r} has {{{name}}}, which is none of "
            f"{', '.join(f'{{{k}}}' for k in sorted(_KNOWN))} and {{task.…}}; write "
            f"{{{{{name}}}}} for the text {{{name}}}"
        )
