"""The section `rollout`: the agent, how often and how long it tries, and what scores it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from stepwell.datapool.config import Section
from stepwell.trainer.config.calls import CallSampling
from stepwell.trainer.config.environment import ENVIRONMENT, OpenEnvConfig
from stepwell.trainer.config.harness import HARNESS, SETTLE_S, HarnessConfig

_HEAVY = {"math", "deepscaler", "dapo", "geo3k", "code"}
"""Built-ins that compute: with sympy, now and then seconds for one answer, or for ever; or by
running the answer."""
CODE = "code"
"""The built-in that runs programs."""
_MANAGERS = {"dapo": "auto", "prime": "parallel", "remote": "parallel"}
"""verl's names of managers, and ours."""


BranchKind: TypeAlias = Literal["main", "sub_agent", "side"]


class _Scoring(Section):
    """A string alone is its `function`."""

    named_by = "function"


class RewardFunctionConfig(_Scoring):
    """A reward function; a string alone is its `function`."""

    function: str
    """A built-in's name (with `boxed_` before it: what the answer has in \\boxed{}),
    `package.module:name` or `path/to/file.py:name`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function with every call, or to the class once."""


class OverlongBufferConfig(Section):
    """DAPO's soft over-long punishment, see `stepwell.trainer.rewards.overlong`."""

    max_resp_len: int = Field(ge=1)
    """L_max: tokens of a response (of all responses of a trajectory) at which the punishment is
    whole."""
    len: int = Field(ge=1)
    """L_cache: the punishment grows over the last `len` tokens before `max_resp_len`."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """The whole punishment."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongBufferConfig:
        if self.len > self.max_resp_len:
            raise ValueError(
                f"len ({self.len}) is larger than max_resp_len ({self.max_resp_len}): the "
                "punishment would begin below 0 tokens; make len smaller"
            )
        return self


class SandboxFusionConfig(Section):
    """A SandboxFusion server (github.com/bytedance/SandboxFusion), verl's names."""

    named_by = "url"

    url: str = Field(pattern="^https?://.")
    """Address of the server, or of its `/run_code`, e.g. http://localhost:8080."""
    max_concurrent: int = Field(default=64, ge=1)
    """Programs that run there at once."""


class RewardConfig(_Scoring):
    """Scoring of rollouts whose agent returned None; a string alone is the `function`."""

    function: str | None = None
    """Function, as in `by_data_source`, for samples whose data source is not named there. null: the
    usual one of the data source (gsm8k, MATH, AIME, MBPP, …)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `function` with every call, or to the class once."""
    by_data_source: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """The function (its name, or {function, kwargs}) by the task's `data_source`."""
    manager: Literal["auto", "naive", "parallel", "batch", "group"] = "auto"
    """naive: a call per sample. parallel: the same in processes of their own. batch: a call with
    the lists of all. group: a call with the lists of one group's trajectories. auto: parallel for
    the built-ins that compute, else naive. Of verl's names, dapo is auto, prime and remote are
    parallel."""
    reward_key: str = Field(default="score", min_length=1)
    """The number in a dict result; its other keys are metrics."""
    timeout_s: float = Field(default=60.0, gt=0)
    """One call may take this long. A process is killed then; a thread cannot be, and is left."""
    max_attempts: int = Field(default=2, ge=1)
    """Calls before a score is missing for good and its trajectory is left out."""
    concurrency: int = Field(default=64, ge=1)
    """Calls at once."""
    sandbox_fusion: SandboxFusionConfig | None = None
    """The server that runs the programs of the built-in `code` (its `url`, or a section); null:
    this machine does."""

    @field_validator("manager", mode="before")
    @classmethod
    def _of_verl(cls, manager: Any) -> Any:
        if manager == "rate_limited":
            raise ValueError(
                "manager is 'rate_limited': use auto, and set concurrency for the calls at once "
                "(remote, llm_judge and reward_model wait as a server's 429 and Retry-After say)"
            )
        return _MANAGERS.get(manager, manager) if isinstance(manager, str) else manager

    @model_validator(mode="after")
    def _complete(self) -> RewardConfig:
        if self.function is None and self.kwargs:
            raise ValueError(
                f"kwargs {', '.join(self.kwargs)} are for function, which is missing; name it, or "
                "put them into by_data_source"
            )
        named = [self.function, *(each.function for each in self.by_data_source.values())]
        if self.sandbox_fusion is not None and not any(n in (None, CODE) for n in named):
            raise ValueError(
                f"sandbox_fusion is given, but no function is {CODE!r}, which runs programs there; "
                "set function to it, or sandbox_fusion to null"
            )
        return self

    def worker_processes(self, function: str) -> int:
        """Processes for the calls of `function`; 0: threads."""
        if function == CODE and self.sandbox_fusion is not None:
            return 0  # it only waits, and `max_concurrent` is of all calls
        heavy = self.manager == "auto" and function.removeprefix("boxed_") in _HEAVY
        return min(4, os.cpu_count() or 1) if heavy or self.manager == "parallel" else 0


def _listed_kinds(value: Any) -> Any:
    if value == "all":
        return get_args(BranchKind)
    return (value,) if isinstance(value, str) else value


class RolloutConfig(CallSampling):
    agent: str | None = None
    """`package.module:name` or `path/to/file.py:name` of `async def agent(task, base_url, api_key)
    -> float | None` (or a list of rewards, one per call), run on the tasks of `data`; or of slime's
    `async def generate(args, sample, sampling_params) -> Sample`; or a file of tools (`tools.yaml`,
    verl's `tool_config_path`), which the policy then has; null: agents that nobody here starts call
    the gateway, and their traffic is trained on."""
    agent_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of slime's `args`, over those that Stepwell knows, for a `generate` of slime's form:
    `{apply_chat_template: true}` has prompts as text."""
    harness: HarnessConfig | None = None
    """An agent that is a command: a preset's name (`claude_code`, `codex`, `mini_swe_agent`, …), or
    a section. Then `agent` is `harness`; and by default `timeout_s` is what the harness and its
    grading may take, `group_deadline_s` 1.5 times all attempts, `concurrency` 16."""
    environment: OpenEnvConfig | None = None
    """An OpenEnv server that answers the policy: its address, or a section. Then `agent` is
    `environment`."""
    train_branches: Annotated[tuple[BranchKind, ...], BeforeValidator(_listed_kinds)] | None = (
        Field(default=None, min_length=1)
    )
    """Calls that are trained, by what they are for: `main`, `all`, or a list of `main`,
    `sub_agent` (a conversation of its own, while another goes on) and `side` (titles, summaries,
    probes: offered no tools where others are, or one token long). null: `[main, sub_agent]` of
    harnesses and of agents that nobody here starts, `all` of an agent's function."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the responses' texts that rewards, and functions of slime's
    form, get. slime's default is false."""
    n: int = Field(default=8, ge=1)
    """Rollouts per prompt (the group size of GRPO)."""
    min_n: int = Field(default=2, ge=1)
    """A group is trained with fewer rollouts, down to this many; below it is dropped."""
    max_outstanding_groups: int = Field(default=16, ge=1)
    """Groups open or ready at once: how far generation may run ahead of training."""
    concurrency: int = Field(default=64, ge=1)
    """Agents running at once in one worker. As many more rollouts of a harness are set up or graded
    meanwhile."""
    workers: int = Field(default=1, ge=1)
    """Processes that run agents, on all nodes of the cluster."""
    timeout_s: float = Field(default=120.0, gt=0)
    """One rollout may take this long; then it is aborted with the reason "timeout"."""
    group_deadline_s: float = Field(default=300.0, gt=0)
    """A group is closed after this long with the rollouts it has. Prompts of an evaluation, which
    are begun together, have it as many times as their rollouts fill all slots."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries per rollout; the last failure aborts the rollout for good. An attempt that the worker,
    the gateway, its engines or the pool failed is made again and not counted."""
    reward: RewardConfig | None = None
    """Scores rollouts whose agent returned None: a reward function's name, or a section."""
    overlong_buffer: OverlongBufferConfig | None = None
    """Taken off the reward of a long trajectory, whoever gave it; null: nothing."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_harness_needs(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        if raw.get("environment") is not None and raw.get("agent") is None:
            raw = {**raw, "agent": ENVIRONMENT}
        if (harness := raw.get("harness")) is None:
            return raw
        whole = SETTLE_S
        for section, seconds in ((harness, 600.0), (_part(harness, "grade"), 120.0)):
            given = _part(section, "timeout_s", seconds)
            if section is not None and isinstance(given, int | float):
                whole += given
        timeout_s, attempts = raw.get("timeout_s", whole), raw.get("max_attempts", 2)
        filled: dict[str, Any] = {"timeout_s": timeout_s, "concurrency": 16}
        if raw.get("agent") is None:
            filled["agent"] = HARNESS
        if isinstance(timeout_s, int | float) and isinstance(attempts, int):
            filled["group_deadline_s"] = 1.5 * timeout_s * attempts
        return {**filled, **{k: v for k, v in raw.items() if k != "agent" or v is not None}}

    @model_validator(mode="after")
    def _harness_is_the_agent(self) -> RolloutConfig:
        for name, section in ((HARNESS, self.harness), (ENVIRONMENT, self.environment)):
            if section is None and self.agent == name:
                raise ValueError(
                    f"agent is {name!r}, but {name} is missing; name one, e.g. "
                    + {
                        HARNESS: "harness: claude_code",
                        ENVIRONMENT: "environment: http://HOST:8000",
                    }[name]
                )
        if self.environment is not None and self.agent != ENVIRONMENT:
            raise ValueError(
                f"agent is {self.agent!r}, but environment is given, too; leave one of them out"
            )
        if self.harness is None:
            return self
        if self.agent != HARNESS:
            raise ValueError(
                f"agent is {self.agent!r}, but harness is given, too; leave one of them out"
            )
        if self.timeout_s < (needed := self.harness.whole_s - SETTLE_S):
            grading = "" if self.harness.grade is None else " + grade.timeout_s"
            raise ValueError(
                f"timeout_s is {self.timeout_s:g}, but harness.timeout_s{grading} is {needed:g}: "
                "it could never end; leave timeout_s out"
            )
        return self

    @model_validator(mode="after")
    def _bounds(self) -> RolloutConfig:
        if self.agent is None and self.agent_args:
            raise ValueError(
                f"agent_args is {self.agent_args}, but agent is null: nobody reads it; name a "
                "generate function of slime's form in agent, or leave agent_args out"
            )
        if self.min_n > self.n:
            raise ValueError(
                f"rollout.n is {self.n}, but a group needs rollout.min_n = {self.min_n} rollouts: "
                f"none would be trained; set rollout.min_n={self.n}, or rollout.n to {self.min_n} "
                "or more"
            )
        if self.timeout_s * self.max_attempts > self.group_deadline_s:
            raise ValueError(
                f"timeout_s × max_attempts = {self.timeout_s:g} × {self.max_attempts} exceeds "
                f"group_deadline_s ({self.group_deadline_s:g}); the last attempt could never finish"
            )
        return self

    @property
    def trained_branches(self) -> tuple[BranchKind, ...]:
        """Kinds of calls that are trained."""
        if self.train_branches is not None:
            return self.train_branches
        is_function = self.agent not in (None, HARNESS)
        return get_args(BranchKind) if is_function else ("main", "sub_agent")


def _part(section: Any, key: str, default: Any = None) -> Any:
    """A key's value, as given in a section that may be text, a mapping, or made already."""
    if isinstance(section, Mapping):
        return section.get(key, default)
    return getattr(section, key, default)
