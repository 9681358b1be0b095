"""Builders for the DataPool's tests: small steps, and a pool whose clock the test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepwell.datapool import ChannelConfig, DataPool, DataPoolError, Lease, PoolConfig, Step, ops
from stepwell.datapool import questions as asked
from stepwell.datapool.codec import PackedLease, PackedStep, in_trajectories, pack
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.segments import segment_path, segments_in
from tests.builders import step_of

DAY = 86_400.0

CHANGES = {
    "open_group",
    "open_trajectory",
    "submit_step",
    "submit_steps",
    "apply_steps",
    "complete_trajectory",
    "abort_trajectory",
    "put_pictures",
    "read_pictures",
    "drop_group",
    "delete",
    "delete_trajectory",
    "set_reward",
    "dry_run",
    "lease_batch",
    "lease_packed",
    "fetch_batch",
    "ack",
    "nack",
    "renew",
    "shutdown",
    "get_statistics",
    "why_closed",
}


def newest_segment(folder: Path) -> Path:
    """The file that the journal in `folder` writes to."""
    return segment_path(folder, segments_in(folder)[-1])


class SyncPool(DataPool):
    """A DataPool whose operations are methods, each at `now`: `pool.submit_step(step, now=3.0)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *args, now, **kwargs: self._do(OPERATIONS[name](*args, **kwargs), now)

    def _do(self, op: Any, now: float) -> Any:
        """Metadata is looked at and copied by who makes the operation, as clients do."""
        if hasattr(op, "metadata"):
            op = replace(op, metadata=ops.metadata_of(op.metadata))
        return self.apply(op, now)

    def open_group(
        self, prompt_uid, n_rollouts, deadline_s=None, min_rollouts=1, *args, now, **kwargs
    ):
        op = ops.OpenGroup(prompt_uid, n_rollouts, min_rollouts, deadline_s, *args, **kwargs)
        return self._do(op, now)

    def submit_step(self, step: Step, channel: str = "train", *, now: float) -> str:
        return self.submit_steps([step], channel, now=now)[0]

    def submit_steps(
        self, steps: Sequence[Step], channel: str = "train", *, now: float
    ) -> list[Any]:
        answers = self.apply_steps(steps, channel, now=now)
        refused = [a for a in answers if isinstance(a, DataPoolError)]
        if not refused:
            return answers
        if len(answers) == 1:
            raise refused[0]
        rest = f"({len(refused)} of {len(answers)} steps refused; the others are applied)"
        raise type(refused[0])(f"{refused[0]} {rest}")

    def apply_steps(
        self,
        steps: Sequence[Step | tuple[str, str, PackedStep]],
        channel: str = "train",
        *,
        now: float,
    ) -> list[Any]:
        """An outcome or a refusal for each; steps packed already come with their uids."""
        triples = [
            (s.trajectory_uid, s.prompt_uid, pack(s)) if isinstance(s, Step) else s for s in steps
        ]
        answers = self.apply(ops.SubmitSteps(in_trajectories(triples), channel), now)
        return [a.error() if isinstance(a, ops.Refusal) else a for a in answers]

    def lease_packed(self, *args: Any, now: float, **kwargs: Any) -> PackedLease | None:
        """None if there is nothing to serve."""
        order = ("n_rollouts", "channel", "batch_size", "lease_s", "request_id")
        lease = self.apply(ops.LeaseBatch(**dict(zip(order, args, strict=False)), **kwargs), now)
        return lease if isinstance(lease, PackedLease) else None

    def lease_batch(self, *args: Any, now: float, **kwargs: Any) -> Lease | None:
        lease = self.lease_packed(*args, now=now, **kwargs)
        return None if lease is None else lease.unpack()

    def fetch_batch(self, *args: Any, now: float, **kwargs: Any) -> list[Step] | None:
        lease = self.lease_batch(*args, now=now, **kwargs)
        if lease is None:
            return None
        self.apply(ops.Ack(lease.lease_id), now)
        return lease.steps

    def mark(
        self, prompt_uid=None, trajectory_uid=None, channel="train", *, now: float, **marks: Any
    ) -> Any:
        return self.apply(ops.Mark(prompt_uid, trajectory_uid, marks, channel), now)

    def dry_run(
        self, selection: SelectionConfig | None = None, *args: Any, now: float, **kwargs: Any
    ) -> Any:
        fields = None if selection is None else selection.model_dump()
        return self.apply(asked.DryRunOf(fields, *args, **kwargs), now)

    def list_groups(self, *args: Any, now: float, **filters: Any) -> Any:
        return self._listed(asked.ListGroups, *args, now=now, **filters)

    def list_trajectories(self, *args: Any, now: float, **filters: Any) -> Any:
        return self._listed(asked.ListTrajectories, *args, now=now, **filters)

    def read_trajectories(self, *args: Any, now: float, **filters: Any) -> Any:
        return self._listed(asked.ReadTrajectories, *args, now=now, **filters)

    def _listed(self, question: Any, *args: Any, now: float, **filters: Any) -> Any:
        about = dict(zip(LISTED, args, strict=False))
        about |= {name: filters.pop(name) for name in LISTED if name in filters}
        return self.apply(question(**about, filters=filters), now)


LISTED = ("channel", "cursor", "limit", "newest_first")
OPERATIONS: dict[str, Any] = {
    "open_trajectory": ops.OpenTrajectory,
    "resume_trajectory": ops.ResumeTrajectory,
    "complete_trajectory": ops.CompleteTrajectory,
    "abort_trajectory": ops.AbortTrajectory,
    "drop_group": ops.DropGroup,
    "put_pictures": ops.PutPictures,
    "read_pictures": asked.ReadPictures,
    "set_reward": ops.SetReward,
    "delete": ops.Delete,
    "delete_trajectory": ops.DeleteTrajectory,
    "advance_version": ops.AdvanceVersion,
    "ack": ops.Ack,
    "nack": ops.Nack,
    "renew": ops.Renew,
    "release_leases": ops.ReleaseLeases,
    "shutdown": ops.Shutdown,
    "get_statistics": asked.GetStatistics,
    "wait_available": asked.WaitAvailable,
    "wait_credit": asked.WaitCredit,
    "get_events": asked.GetEvents,
    "why_closed": asked.WhyClosed,
    "read_ends": asked.ReadEnds,
    "find_uids": asked.FindUids,
}


class ClockedPool:
    """A DataPool that reads `now` from an attribute, plus shorthands for common histories."""

    def __init__(self, config: PoolConfig) -> None:
        self.pool = SyncPool(config)
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.pool, name)
        return partial(method, now=self.now) if name in CHANGES else method

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick(self.now)

    def step(self, trajectory_uid: str, prompt_uid: str, index: int = 0, **fields: Any) -> Step:
        return step_of(trajectory_uid, prompt_uid, index, **fields)

    def finish(self, prompt_uid: str, *trajectory_uids: str, **kwargs: Any) -> None:
        """One step and a completion for each trajectory."""
        for uid in trajectory_uids:
            self.submit_step(step_of(uid, prompt_uid), **kwargs)
            self.complete_trajectory(uid, **kwargs)

    def stats(self, channel: str = "train") -> dict[str, Any]:
        stats: dict[str, Any] = self.get_statistics(channel)
        return stats


class JournaledPool:
    """A pool over a journal in `folder`, at a time that the test moves."""

    def __init__(self, folder: Path, now: float = 1000.0, **config) -> None:
        self.folder = folder
        self.now = now
        self.journal = Journal(folder, "process")
        self.pool = SyncPool(PoolConfig(**config))
        self.pool.pictures.store = PictureFolder(folder / PICTURES, power=False)
        restore(self.pool, self.journal)
        self.pool.pictures.find_orphans(now)

    def __call__(self, method: str, *args, **kwargs):
        try:
            return getattr(self.pool, method)(*args, **kwargs, now=self.now)
        finally:
            self.pool.write_counts()
            self.journal.flush()
            self.pool.spill()
            self.pool.pictures.sweep()

    def later(self, days: float) -> None:
        self.now += days * DAY
        while (due := self.pool.next_deadline()) is not None and due <= self.now:
            self.pool.tick(self.now)
        self.pool.write_counts()
        self.journal.flush()
        self.pool.pictures.sweep()
        if self.journal._is_asked:
            self.erase()

    def erase(self) -> None:
        """Erase as the actor's journal does by itself, soon if the pool asks, else in an hour."""
        self.journal.erase()

    def say(self, uid: str, prompt_uid: str, text: str, index: int = 0) -> str:
        """One step in which `text` stands as ids, log-probs' neighbour and metadata."""
        step = Step(
            prompt_ids=list(text.encode()),
            response_ids=list(text.encode()),
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            step_index=index,
            metadata={"said": text},
        )
        return self("submit_step", step)

    def holds(self, text: str) -> bool:
        """True if a file of the journal has these bytes, as text or as token ids."""
        ids = b"".join(bytes([b, 0, 0, 0]) for b in text.encode())
        files = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        return any(form in data for data in files for form in (text.encode(), ids))

    def groups(self, channel: str = "train") -> dict:
        return self("get_statistics", channel)["groups"]

    def restart(self, **config) -> JournaledPool:
        self.journal.close()
        return JournaledPool(self.folder, self.now, **config)


@pytest.fixture
def make_step() -> Callable[..., Step]:
    return step_of


@pytest.fixture
def make_pool() -> Callable[..., ClockedPool]:
    """`make_pool(n_rollouts=2, …)`: a pool whose channels have these limits."""
    return lambda remembered_uids=1_000_000, **limits: ClockedPool(
        PoolConfig(default=ChannelConfig(**limits), remembered_uids=remembered_uids)
    )


@pytest.fixture
def pool(make_pool: Callable[..., ClockedPool]) -> ClockedPool:
    return make_pool()
