"""Builders for the DataPool's tests: small steps, and a pool whose clock the test moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool import ChannelConfig, DataPool, PoolConfig, Step
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.segments import segment_path, segments_in

DAY = 86_400.0

CHANGES = {
    "open_group",
    "open_trajectory",
    "submit_step",
    "submit_steps",
    "apply_steps",
    "complete_trajectory",
    "abort_trajectory",
    "drop_group",
    "delete",
    "set_reward",
    "dry_run",
    "lease_batch",
    "fetch_batch",
    "ack",
    "nack",
    "renew",
    "shutdown",
    "get_statistics",
}


def newest_segment(folder: Path) -> Path:
    """The file that the journal in `folder` writes to."""
    return segment_path(folder, segments_in(folder)[-1])


class ClockedPool:
    """A DataPool that reads `now` from an attribute, plus shorthands for common histories."""

    def __init__(self, config: PoolConfig) -> None:
        self.pool = DataPool(config)
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.pool, name)
        return partial(method, now=self.now) if name in CHANGES else method

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick(self.now)

    def step(self, trajectory_uid: str, prompt_uid: str, index: int = 0, **fields: Any) -> Step:
        return build_step(trajectory_uid, prompt_uid, index, **fields)

    def finish(self, prompt_uid: str, *trajectory_uids: str, **kwargs: Any) -> None:
        """One step and a completion for each trajectory."""
        for uid in trajectory_uids:
            self.submit_step(build_step(uid, prompt_uid), **kwargs)
            self.complete_trajectory(uid, **kwargs)

    def stats(self, channel: str = "train") -> dict[str, Any]:
        stats: dict[str, Any] = self.get_statistics(channel)
        return stats


def build_step(trajectory_uid: str, prompt_uid: str = "p", index: int = 0, **fields: Any) -> Step:
    return Step(
        prompt_ids=fields.pop("prompt_ids", [1, 2, 3]),
        response_ids=fields.pop("response_ids", [4, 5]),
        rollout_log_probs=fields.pop("rollout_log_probs", [-0.5, -0.25]),
        trajectory_uid=trajectory_uid,
        prompt_uid=prompt_uid,
        step_index=index,
        **fields,
    )


class JournaledPool:
    """A pool over a journal in `folder`, at a time that the test moves."""

    def __init__(self, folder: Path, now: float = 1000.0, **config) -> None:
        self.folder = folder
        self.now = now
        self.journal = Journal(folder, "process")
        self.pool = DataPool(PoolConfig(**config))
        restore(
            self.pool,
            self.journal,
            self.journal.rows(),
            self.journal.states(),
            self.journal.read,
        )

    def __call__(self, method: str, *args, **kwargs):
        try:
            return getattr(self.pool, method)(*args, **kwargs, now=self.now)
        finally:
            self.pool.write_counts()
            self.journal.flush()
            self.pool.written()

    def later(self, days: float) -> None:
        self.now += days * DAY
        while (due := self.pool.next_deadline()) is not None and due <= self.now:
            self.pool.tick(self.now)
        self.pool.write_counts()
        self.journal.flush()
        if self.journal._is_asked:
            self.erase()

    def erase(self) -> None:
        """What the actor's journal does by itself, soon if the pool asks, else in an hour."""
        self.journal._erase_now()

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
        """Whether a file of the journal has these bytes, as text or as token ids."""
        ids = b"".join(bytes([b, 0, 0, 0]) for b in text.encode())
        files = [path.read_bytes() for path in self.folder.iterdir()]
        return any(form in data for data in files for form in (text.encode(), ids))

    def groups(self, channel: str = "train") -> dict:
        return self("get_statistics", channel)["groups"]

    def restart(self, **config) -> JournaledPool:
        self.journal.close()
        return JournaledPool(self.folder, self.now, **config)


@pytest.fixture
def make_step() -> Callable[..., Step]:
    return build_step


@pytest.fixture
def make_pool() -> Callable[..., ClockedPool]:
    """`make_pool(n_rollouts=2, …)`: a pool whose channels have these limits."""
    return lambda remembered_uids=1_000_000, **limits: ClockedPool(
        PoolConfig(default=ChannelConfig(**limits), remembered_uids=remembered_uids)
    )


@pytest.fixture
def pool(make_pool: Callable[..., ClockedPool]) -> ClockedPool:
    return make_pool()
