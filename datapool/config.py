"""The section `pool`: limits and defaults per channel."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Durability: TypeAlias = Literal["none", "process", "power"]


def members_of(annotation: Any) -> list[Any]:
    """`A | B` and `Annotated[A | B, …]` as A and B."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [m for arg in get_args(annotation) for m in members_of(arg)]
    return [annotation]


def at_home(path: Path) -> Path:
    """`path` with its first `~` replaced: a shell leaves that to us in KEY=VALUE."""
    return Path(os.path.expanduser(path))


AT_HOME: Final = AfterValidator(os.path.expanduser)
TextPath: TypeAlias = Annotated[str, AT_HOME]
"""A path that stays text, as one with a field in it, or an id on the hub in its place."""


@functools.cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """The docstring of each field of each class of a module, by the class's qualified name; none
    if its source is not here, as that of a session's."""
    found: dict[str, dict[str, str]] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return found

    def read(body: list[ast.stmt], path: str) -> None:
        for at, after in pairwise([*body, ast.Pass()]):
            if isinstance(at, ast.ClassDef):
                read(at.body, f"{path}{at.name}.")
            elif isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef):
                read(at.body, f"{path}{at.name}.<locals>.")
            match at, after:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found.setdefault(path[:-1], {})[name] = inspect.cleandoc(text)

    read(ast.parse(source).body, "")
    return found


class Described(BaseModel):
    """A model whose JSON schema has the docstrings of its fields. They are read from its source
    when somebody asks for the schema: pydantic's `use_attribute_docstrings` reads them at each
    import, a quarter of what importing a configuration takes."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for model in cls.__mro__:
            if issubclass(model, Described):
                for name, text in _meanings(model.__module__).get(model.__qualname__, {}).items():
                    properties.get(name, {}).setdefault("description", text)
        return found


class Section(Described):
    """Base of every section of a configuration: unknown keys are refused, and nothing changes. Its
    validator is built when it validates for the first time: most processes get theirs pickled."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    named_by: ClassVar[str | None] = None
    """The key that text alone stands for: `reward: math` is `reward: {function: math}`."""
    spelled_out: ClassVar[Callable[[str], dict[str, str]] | None] = None
    """Makes a section of text alone where sections differ by `kind`; None: the text is the kind."""

    @field_validator("*")
    @classmethod
    def _home(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(at_home(v) if isinstance(v, Path) else v for v in value)
        return at_home(value) if isinstance(value, Path) else value

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {cls.named_by: value} if cls.named_by and isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any) -> Any:
        """YAML reads on, off, yes and no as booleans, and Python takes those for 1 and 0: here they
        are text, which no number is."""
        if not isinstance(value, Mapping):
            return value
        wrong = {
            k: str(v).lower() for k, v in value.items() if isinstance(v, bool) and cls._counts(k)
        }
        return {**value, **wrong} if wrong else value

    @classmethod
    def _counts(cls, name: str) -> bool:
        """True if the field takes numbers, and neither booleans nor text."""
        field = cls.model_fields.get(name)
        takes = [] if field is None else members_of(field.annotation)
        return bool({int, float} & {*takes}) and not {bool, str, Path, Any} & {*takes}


class SelectionConfig(Section):
    """Filters on a channel's ready groups, and the order in which they are served
    (`selection/`)."""

    order: str = "fifo"
    """`fifo` (by readiness), `freshest`, or the dotted path of a function `(GroupInfo) -> float`;
    the smallest is served first."""

    filters: tuple[str, ...] = ()
    """Judges of each group once it is ready, in order; the first that objects decides:
    `zero_variance` (DAPO's dynamic sampling), `scored`, `all_correct(1.0)`, `all_wrong(0.0)`, or
    dotted paths of `(GroupInfo) -> Verdict | None`."""


class ChannelConfig(Section):
    """Limits and defaults of one channel."""

    n_rollouts: int = Field(default=1, ge=1)
    """Complete trajectories that make an *undeclared* group ready. A group declared with
    `open_group` has its own number; a fetch may ask for another one."""

    max_queue_size: int | None = Field(default=None, ge=1)
    """Ready groups kept before `overflow` acts; null = unlimited."""

    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of step payloads kept in memory, and of their pictures, each once, before `overflow`
    acts; null = unlimited. `spill` leaves pictures out: they are on disk anyway."""

    overflow: Literal["drop_oldest", "block", "spill"] = "drop_oldest"
    """Action beyond `max_queue_size` or `max_bytes`: `drop_oldest` drops the oldest ready group
    (for bytes, if none is ready, the oldest open one), and no producer ever waits; `block` lets new
    groups wait until something is leased (steps of groups already open never do); `spill` moves
    payloads to disk, `max_bytes` only, for as long as they are over the limit."""

    max_outstanding_groups: int | None = Field(default=None, ge=1)
    """Open + ready groups beyond which `open_group` waits: how far generation may run ahead of
    the consumer; null = unlimited. Steps are never refused."""

    limit_without_consumer: bool = True
    """Apply `max_outstanding_groups` before somebody consumes the channel: before a group is
    leased or acked, or a policy version announced. False for the train channel of `stepwell
    serve`: agents do not wait for a trainer that nobody has started."""

    max_ahead_versions: int | None = Field(default=None, ge=0)
    """Policy versions that generation may run ahead: at version v at most (v + 1 +
    max_ahead_versions) x `groups_per_version` groups are ever started, dropped ones not counted
    (AReaL's staleness control); null = unlimited. `advance_version` sets v, which counts from the
    version announced before the first group."""

    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that one policy version consumes; needed by `max_ahead_versions`."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Ready groups whose oldest token is more than this many policy versions old are not served
    but dropped, as `stale`; null = served at any age."""

    on_stale: Literal["drop", "return"] = "drop"
    """`return` flags the drop so that the prompt's source issues it again (`get_events`); so it is
    for the train channel of a run whose `async_training.mode` has windows."""

    siblings_wait_s: float = Field(default=60.0, gt=0)
    """Seconds that an *undeclared* group with enough complete trajectories waits for those of it
    that are open, so that they are not late."""

    group_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from a group's first sight until it is served with what is complete, or dropped if
    that is less than its `min_rollouts`. `open_group(deadline_s=…)` overrides it; null = never."""

    group_idle_s: float | None = Field(default=None, gt=0)
    """The same from a group's last step or new trajectory on: closes what its agent left open,
    however long a live one takes. null = never."""

    reward_wait_s: float | None = Field(default=None, gt=0)
    """Seconds that a ready group is held for rewards that come late (`set_reward`). Then it is
    served without them, for the trainer's reward function to score; with the filter `scored` it is
    dropped, as `unscored`. null = not held; with that filter, held without end."""

    hold_s: float | None = Field(default=None, gt=0)
    """Seconds that every group is held from its last complete trajectory on, scored or not: in them
    people's feedback (`set_reward`, `mark`, the gateway's `/v1/feedback`) changes what is trained.
    `reward_wait_s` begins after them. null = not held."""

    lease_s: float = Field(default=600.0, gt=0)
    """Seconds a consumer may hold a lease before its groups are given to the next one, unless it
    renews. Trainer, slime and verl do, each third of it: a crash is noticed after this time."""

    selection: SelectionConfig = SelectionConfig()
    """Order and filters."""

    @model_validator(mode="after")
    def _consistent(self) -> ChannelConfig:
        if self.max_ahead_versions is not None and self.groups_per_version is None:
            raise ValueError(
                "max_ahead_versions needs groups_per_version: how many groups one version consumes"
            )
        if self.overflow == "spill" and self.max_bytes is None:
            raise ValueError("overflow is 'spill' but max_bytes is null; set the bytes to keep")
        return self


class ArchiveConfig(Section):
    """Files of all that left the pool, trained or dropped: every trajectory with its text, tokens,
    reward and the reason."""

    enabled: bool = True
    """False: what is consumed or dropped is erased from the journal within an hour and kept
    nowhere."""

    dir: Path | None = None
    """Folder of the files, on a disk of the node that each shard is on; null = `archive` in the
    run's folder. A pool that no run starts has no archive unless this names one."""

    keep_days: float = Field(default=30.0, gt=0)
    """Days after a trajectory left the pool that its file is removed; sooner with a shorter
    `retention_days`."""

    max_gb: float = Field(default=10.0, gt=0)
    """Gigabytes (10^9 bytes) of files and catalogue of all shards together; beyond it the oldest
    files go."""


BACKLOG_BYTES = 1 << 30
"""Bytes of journal rows of a pool that wait for the archiver at most; what leaves beyond it is not
archived."""


class PoolConfig(Section):
    """The DataPool: a default for every channel, and channels that differ."""

    default: ChannelConfig = ChannelConfig()
    """Used by every channel that is not named in `channels`."""

    channels: dict[str, ChannelConfig] = Field(default_factory=dict)
    """Channels with limits of their own, for instance `val: {n_rollouts: 4}`. A channel named
    here takes nothing from `default`."""

    durability: Durability = "process"
    """Failures that an acknowledged change survives: `none` (no failure; the pool is memory only),
    `process` (the actor killed at any point), `power` (the machine losing power: one fsync per
    commit)."""

    journal_dir: Path | None = None
    """Folder of the journal, on a disk that a restarted actor sees; null = a temporary one that
    lives as long as the process that starts the pool."""

    memory_limit_bytes: int | None = Field(default=None, ge=1)
    """Bytes of step payloads kept in memory by all channels; beyond it payloads stay in the journal
    only and are read back when they are leased. null = everything in memory."""

    shards: int = Field(default=1, ge=1)
    """Actors that hold the groups, spread by prompt_uid. What bounds memory is of all of them
    together: each takes its part."""

    retention_days: float | None = Field(default=None, gt=0)
    """Days after its first step or declaration that a group is dropped, as `retention`, whatever
    became of it, and erased from the journal's files some seconds later; it is not archived. What
    was consumed or dropped before is erased from the journal within an hour of its archiving
    (`archive`; without one, of its leaving), and from the archive after this age, too. Stored
    Responses in a gateway's memory have no age. null = kept until it is consumed or dropped."""

    archive: ArchiveConfig = ArchiveConfig()
    """Files of what left the pool."""

    remembered_uids: int = Field(default=1_000_000, ge=0)
    """Uids of closed trajectories, groups and leases remembered (of each, per channel) so that a
    late or repeated call gets its right answer and revives nothing. About 0.3 kB each."""

    def channel(self, name: str) -> ChannelConfig:
        """The configuration of channel `name`."""
        return self.channels.get(name, self.default)

    @property
    def archive_dir(self) -> Path | None:
        """The folder of the archive; None if there is none."""
        archived = self.archive.enabled and self.durability != "none"
        return self.archive.dir if archived else None

    @property
    def backlog_bytes(self) -> int:
        """Bytes of rows of one shard that may wait to be archived."""
        return 0 if self.archive_dir is None else BACKLOG_BYTES // self.shards

    @model_validator(mode="after")
    def _has_a_disk(self) -> PoolConfig:
        channels = {"default": self.default, **self.channels}
        spilling = [f"overflow: spill of {n}" for n, c in channels.items() if c.overflow == "spill"]
        if self.memory_limit_bytes is not None:
            spilling.append("memory_limit_bytes")
        if spilling and self.durability == "none":
            raise ValueError(
                f"durability is 'none', so there is no journal for {' and '.join(spilling)} to "
                "keep payloads in; set durability to process or power"
            )
        return self
