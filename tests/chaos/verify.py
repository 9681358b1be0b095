"""This module compares what the agents wrote down with what became of it, so that a Step that was
lost, doubled, changed, or trained with another reward or version than its own is found.

    agents' log ──every answer──► trained (recorded batches) | in the pool | dropped with a reason
    recorded batch u ═══════════► the ledger's update u+1: the same groups, none of them twice
    trained trajectory ═════════► exactly the calls its agent was answered, log-prob for log-prob,
                                  and the reward that its agent returned
    every trained token ════════► its log-prob again, with the weights of the version it names
    every answer whose group left the pool ──► the archive, log-prob for log-prob
    finished rollout aborted ───► a disturbance at that time that explains it
    group dropped ──────────────► its agents' failures, a disturbance, a restart, or it was trained

A reason that the pool gives is its own word; it counts only where the agents' log or the list of
disturbances (faults, and lives that ended) says the same.

The pool is read from its journal, after the run has ended. What the ledger dropped for good must be
the agents' own doing. Does not own: the processes that were left (`lives.py`).
"""

from __future__ import annotations

import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from stepwell.backends.torch.backend import TorchBackend
from stepwell.config.run import RunConfig
from stepwell.datapool.core.channel import GROUP_DROPPED
from stepwell.datapool.core.log_rows import GroupClosed
from stepwell.datapool.core.log_rows import read as read_row
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.core.readiness import DEADLINE, TOO_FEW_ROLLOUTS
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.archive import parquet
from stepwell.datapool.files.archive.archiver import archive_stopped
from stepwell.datapool.files.archive.folder import TRAJECTORIES, ArchiveFolder
from stepwell.datapool.pictures import shadow_ids
from stepwell.datapool.questions import (
    GetStatistics,
    ListGroups,
    Listing,
    ListTrajectories,
    ReadPictures,
    ReadTrajectories,
)
from stepwell.datapool.remote.lease_keeper import USED
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.store.replay import UNKNOWN, restore
from stepwell.datapool.types import TRAIN, VAL, Step, Trajectory, VersionSpan
from stepwell.layout import CHECKPOINTS
from stepwell.run.checks import training_prompts
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.ledger import LEDGER, Audit, audit, read_ledger
from stepwell.trainer.reclaim import AFTER_CHECKPOINT, LOST_POLICY, PRODUCER_GONE, TRAINED
from stepwell.trainer.recording import load_recording, recordings
from stepwell.trainer.rollout.worker import INFRASTRUCTURE
from tests.chaos.agent import digest_of
from tests.chaos.lives import Disturbance, Run

TOLERANCE = 1e-3
"""Largest difference of a log-prob that is computed again."""
PER_VERSION = 24
"""Steps of one version of which that is done."""
COMMIT_SEEN_S = 1.0
"""After the commit of a version, until a call that begins must not be answered by an older one."""
AGENTS_OWN = frozenset({"raised"})
DUE_TO_RESTART = frozenset({LOST_POLICY, AFTER_CHECKPOINT, PRODUCER_GONE})
"""Drop reasons that a trainer gives only when it starts over a pool that was there before."""
DUE_TO_OUTAGE = frozenset({INFRASTRUCTURE, DEADLINE})
"""Drop reasons of groups that an outage kept from ending."""
CANCELLED = "open_cancelled"
"""The drop reason of a group whose opening an outage cut short: no agent may have begun in it."""
BEFORE_S, AFTER_S = 2.0, 45.0
"""A disturbance explains what happened between so long before it and so long after its end."""
DUE_TO_TRAINING = frozenset({TRAINED, USED})
"""Drop reasons of groups that were trained."""


@dataclass(slots=True)
class Rollout:
    """A rollout as its agent wrote it down."""

    prompt: str
    answered: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By call."""
    reward: float | None = None
    ends: list[str] = field(default_factory=list)
    began_at: float = float("inf")
    last_at: float = 0.0
    """Time of the last line that it wrote; `began_at` is that of its first call."""


class Stored(NamedTuple):
    """A Step in the pool."""

    n_tokens: int
    """Tokens of its response."""
    pictures: list[str]
    """Digests."""


@dataclass(slots=True)
class PoolBooks:
    """Content of the pool's journal."""

    closed: dict[str, str] = field(default_factory=dict)
    """Group -> acked, or why it was dropped; one of the evaluation's that was acked: evaluated."""
    aborted: dict[str, str] = field(default_factory=dict)
    """Trajectory -> why."""
    live: set[str] = field(default_factory=set)
    """Groups."""
    stored: dict[str, dict[str, Stored]] = field(default_factory=lambda: defaultdict(dict))
    """Trajectory of a live group -> call -> its Step."""
    bad_pictures: list[str] = field(default_factory=list)
    """Pictures that those Steps name and the pool has not, or has others for."""
    expired: int = 0
    acked: int = 0
    """Groups that the trainer settled: acked, or closed later as trained."""
    named_lost: set[str] = field(default_factory=set)
    """Groups of which a salvage said that they are lost or dropped."""


@dataclass(slots=True)
class Verdict:
    """Findings of the verifier. `violations` is empty, or something does not hold."""

    violations: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    became: Counter[str] = field(default_factory=Counter)
    """Number of answers, by what became of their Steps."""

    def check(self, holds: bool, kind: str, what: str) -> None:
        if not holds:
            self.figures[kind] += 1
            self.violations.append(f"{kind}: {what}")


async def verify(run: Run) -> Verdict:
    """All of it, after the run has ended."""
    config = run.config()
    rollouts = read_agents(run.agents)
    trained = Trained(config, run.batches)
    pool = read_pool(run.pool)
    found = Verdict()
    found.figures["leases_expired"] = pool.expired
    pool.named_lost |= run.named_lost
    _check_ledger(config, trained, rollouts, found, draws_prompts=run.draws_prompts)
    if run.draws_prompts:
        _check_checkpoint(config, pool, found)
    _check_answers(rollouts, trained, pool, found)
    check_archive(rollouts, await read_archive(config, run.pool), pool, found)
    for lost in pool.bad_pictures:
        found.check(False, "pictures_lost", f"the pool, {lost}")
    check_aborts(rollouts, pool, run.books.disturbances, found)
    check_drops(
        rollouts,
        pool,
        trained.prompts,
        run.books.disturbances,
        found,
        min_n=config.rollout.min_n if run.draws_prompts else 1,
    )
    check_trained(config, run, trained, rollouts, found)
    return found


# -- the books ---------------------------------------------------------------------------------


def read_agents(folder: Path) -> dict[str, Rollout]:
    """By trajectory."""
    rollouts: dict[str, Rollout] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_bytes().splitlines():
            entry = json.loads(line)
            rollout = rollouts.setdefault(entry["trajectory"], Rollout(entry["prompt"]))
            rollout.began_at = min(rollout.began_at, entry.get("began", entry["at"]))
            rollout.last_at = max(rollout.last_at, entry["at"])
            if entry["event"] == "answered":
                rollout.answered[entry["call"]] = entry
                continue
            rollout.ends.append(entry["event"])
            if entry["event"] == "returned":
                rollout.reward = entry["reward"]
    return rollouts


class Trained:
    """The batches of the history that counts, by optimizer step."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        updates = audit(config.run.dir / CHECKPOINTS / LEDGER).updates
        self.groups: dict[int, list[str]] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.doubled: list[str] = []
        self.pictures: dict[str, bytes] = {}
        """PNG by digest."""
        for rollout_id, path in recordings(str(folder)):
            if rollout_id + 1 not in updates:
                continue  # recorded, but the life ended before it was trained
            groups, _, pictures = load_recording(path)
            self.pictures |= pictures
            self.groups[rollout_id + 1] = [g.prompt_uid for g in groups]
            for trajectory in (t for g in groups for t in g.trajectories):
                if trajectory.trajectory_uid in self.trajectories:
                    self.doubled.append(trajectory.trajectory_uid)
                self.trajectories[trajectory.trajectory_uid] = trajectory
        self.bad_pictures = [
            f"picture {digest} was trained as another one"
            for digest, png in self.pictures.items()
            if digest_of(Image.open(io.BytesIO(png))) != digest
        ]

    @property
    def prompts(self) -> set[str]:
        return {t.prompt_uid for t in self.trajectories.values()}

    def steps(self) -> Iterator[Step]:
        for trajectory in self.trajectories.values():
            yield from trajectory.steps


def read_pool(folder: Path) -> PoolBooks:
    """From the copy of a pool's journal: to open it may change it."""
    books = PoolBooks()

    journal = Journal(folder, "process")
    try:
        for row in journal.rows():
            if row.kind == GroupClosed.__name__:
                _, _, closed = read_row(row.kind, row.head)
                if closed.how is not None:
                    is_evaluated = row.channel != TRAIN and closed.how == "acked"
                    books.closed[closed.prompt_uid] = "evaluated" if is_evaluated else closed.how
                for trajectory, closing in closed.closings.items():
                    if closing.aborted is not None:
                        books.aborted[trajectory] = closing.aborted
        pool = DataPool(UNKNOWN)  # one without an archive would delete what waits for it
        pool.pictures.store = PictureFolder(folder / PICTURES, power=False)
        restore(pool, journal)
        for channel in (TRAIN, VAL):
            _read_live(pool, channel, books)
        counts = pool.apply(GetStatistics(TRAIN), time.time())
        books.expired = counts["leases"].get("expired", 0)
        reasons = counts["groups"]["drop_reasons"]
        books.acked = counts["groups"]["acked"] + sum(reasons.get(r, 0) for r in DUE_TO_TRAINING)
    finally:
        journal.close()
    return books


def _read_live(pool: DataPool, channel: str, books: PoolBooks) -> None:
    def pages(listing: type[Listing[Any]]) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            page = pool.apply(listing(channel, cursor), time.time())
            yield from page.items
            if (cursor := page.cursor) is None:
                return

    for group in pages(ListGroups):
        books.live.add(group.prompt_uid)
    for trajectory in pages(ListTrajectories):
        if trajectory.state == "aborted":
            books.aborted[trajectory.trajectory_uid] = trajectory.reason or "aborted"
    cursor: str | None = None
    while True:
        page = pool.apply(ReadTrajectories(channel, cursor), time.time())
        for exported in page.unpack():
            uid = exported.trajectory.trajectory_uid
            steps = exported.trajectory.steps
            for step in steps:
                shown = [picture.digest for picture in step.pictures]
                books.stored[uid][step.metadata["call_id"]] = Stored(len(step.response_ids), shown)
            for digest in {picture.digest for step in steps for picture in step.pictures}:
                try:
                    png = pool.apply(ReadPictures(uid, (digest,), channel), time.time())[digest]
                except DamagedFileError as e:
                    books.bad_pictures.append(f"{uid}: {e}")
                else:
                    if digest_of(Image.open(io.BytesIO(png))) != digest:
                        books.bad_pictures.append(f"{uid}: {digest} is another picture")
        if (cursor := page.cursor) is None:
            return


Archived = Mapping[str, Mapping[str, Sequence[np.ndarray]]]
"""Trajectory -> call -> log-probs of each Step that the archive has of it."""


async def read_archive(config: RunConfig, pool: Path) -> Archived:
    """All attempts and late parts, with what waited in the pool when the run ended.

    Args:
        pool: copy of its journal.
    """
    limits = config.pool_of_run
    if limits.archive_dir is None:
        raise RuntimeError("the run has no archive")
    await archive_stopped(stopped_pool(pool, limits), limits)
    folder = ArchiveFolder(limits.archive_dir)
    found: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for name in folder.names(TRAJECTORIES):
        file = folder.file(TRAJECTORIES, name)
        for group, n_rows in enumerate(parquet.row_groups(file)):
            for row in range(n_rows):
                trajectory = parquet.exported([parquet.read_row(file, group, row)]).trajectory
                for step in trajectory.steps:
                    if step.rollout_log_probs is not None:
                        call = step.metadata["call_id"]
                        found[trajectory.trajectory_uid][call].append(step.rollout_log_probs)
    return found


# -- the comparison ------------------------------------------------------------------------------


def _check_ledger(
    config: RunConfig,
    trained: Trained,
    rollouts: Mapping[str, Rollout],
    found: Verdict,
    *,
    draws_prompts: bool,
) -> None:
    path = config.run.dir / CHECKPOINTS / LEDGER
    n_draws, order = len(audit(path).draws), None
    if draws_prompts:
        source = training_prompts(config)
        order = [source.next()["instance_id"] for _ in range(n_draws)]
    books: Audit = audit(path, order=order)
    for uid in books.doubled:
        found.check(False, "trained_twice", f"the ledger doubles {uid}")
    for uid in trained.doubled:
        found.check(False, "trained_twice", f"trajectory {uid} is in two batches")
    for instance in books.skipped:
        found.check(False, "groups_lost", f"prompt {instance} was skipped")
    final = books.dropped.total() - books.returned
    ends = books.trained + final + len(books.in_flight) + len(books.waiting)
    found.check(ends == n_draws, "groups_lost", f"{n_draws} prompts drawn, {ends} accounted for")
    for entry in read_ledger(path):
        if entry["event"] == "trained":
            batch = trained.groups.get(entry["update"], [])
            found.check(
                set(entry["prompt_uids"]) == set(batch),
                "trained_twice",
                f"update {entry['update']}: ledger {entry['prompt_uids']}, batch {batch}",
            )
        elif entry["event"] == "dropped" and not entry["returned"]:
            uid, reason = entry["prompt_uid"], entry["reason"]
            found.figures[f"dropped for good: {reason}"] += 1
            own = [r for r in rollouts.values() if r.prompt == uid and set(r.ends) & AGENTS_OWN]
            lost = f"group {uid} was dropped for good ({reason})"
            found.check(
                not draws_prompts or len(own) > config.rollout.n - config.rollout.min_n,
                "groups_lost",
                lost,
            )
    found.figures.update(prompts=n_draws, groups_trained=books.trained, returned=books.returned)
    found.figures.update(optimizer_steps=len(books.updates))


def _check_checkpoint(config: RunConfig, pool: PoolBooks, found: Verdict) -> None:
    """The last checkpoint has the ledger's optimizer steps, the pool the ledger's groups."""
    store = CheckpointStore(config.run.dir / CHECKPOINTS)
    books = audit(store.folder / LEDGER)
    state = store.load(store.folder / f"step_{store.steps()[-1]}")
    counts = {"progress": state["progress"].updates, "backend": state["backend"]["updates"]}
    for whose, n in counts.items():
        wrong = f"{n} updates by the checkpoint's {whose}, {len(books.updates)} in the ledger"
        found.check(n == len(books.updates), "trained_twice", wrong)
    # Groups that the pool must have acked: in no update, but in the lease of one, too.
    settled = books.trained + books.dropped["not_trained"]
    wrong = f"the pool has {pool.acked} groups acked or trained, the ledger {settled}"
    found.check(pool.acked == settled, "groups_lost", wrong)


def _check_answers(
    rollouts: Mapping[str, Rollout], trained: Trained, pool: PoolBooks, found: Verdict
) -> None:
    """Every answer's Step is somewhere."""
    prompts = trained.prompts
    for uid, rollout in rollouts.items():
        trajectory = trained.trajectories.get(uid)
        calls = {s.metadata["call_id"] for s in trajectory.steps} if trajectory else set()
        for call, entry in rollout.answered.items():
            found.figures["answers"] += 1
            if call in calls:
                where = "trained"
            elif trajectory is None and call in pool.stored.get(uid, ()):
                answered = Stored(len(entry["log_probs"]), entry["pictures"])
                stored = pool.stored[uid][call]
                found.check(
                    stored == answered, "steps_changed", f"{uid} {call}: {stored}, not {answered}"
                )
                where = "in the pool"
            elif trajectory is None and uid in pool.aborted:
                where = f"aborted: {pool.aborted[uid].partition(':')[0]}"
            elif rollout.prompt in prompts or rollout.prompt in pool.live:
                # Its group is there and whole, but its trajectory is not: it must have ended badly.
                where = "lost" if rollout.reward is not None or trajectory else "never completed"
            elif (how := pool.closed.get(rollout.prompt)) not in (None, "acked"):
                where = f"group {how}"
            elif rollout.prompt in pool.named_lost:
                where = "named by a salvage"
            else:
                where = "lost"
            found.became[where] += 1
            state = pool.closed.get(rollout.prompt, "live" if rollout.prompt in pool.live else "?")
            found.check(
                where != "lost",
                "steps_lost",
                f"call {call} of {uid} ({rollout.prompt}: {state}, agent: {rollout.ends})",
            )


def check_archive(
    rollouts: Mapping[str, Rollout], archived: Archived, pool: PoolBooks, found: Verdict
) -> None:
    """An answer whose group has left the pool, however it did, is in the archive."""
    for uid, rollout in rollouts.items():
        if rollout.prompt in pool.live or rollout.prompt in pool.named_lost:
            continue
        for call, entry in rollout.answered.items():
            kept = archived.get(uid, {}).get(call, ())
            found.figures["answers_archived"] += bool(kept)
            said = np.float32(entry["log_probs"])
            how = pool.closed.get(rollout.prompt, "?")
            found.check(
                any(np.array_equal(log_probs, said) for log_probs in kept),
                "not_archived",
                f"call {call} of {uid} ({rollout.prompt}: {how}): {len(kept)} Steps in the archive",
            )


def explain(disturbances: Sequence[Disturbance], began: float, ended: float) -> bool:
    """True if a disturbance, with the time that the run needs after it, meets [began, ended]."""
    return any(d.began - BEFORE_S <= ended and began <= d.ended + AFTER_S for d in disturbances)


def check_aborts(
    rollouts: Mapping[str, Rollout],
    pool: PoolBooks,
    disturbances: Sequence[Disturbance],
    found: Verdict,
) -> None:
    """A rollout that its agent finished is not aborted, unless a disturbance came between, or its
    group was dropped (`check_drops`)."""
    for uid, rollout in rollouts.items():
        reason = pool.aborted.get(uid)
        if rollout.ends != ["returned"] or reason is None or reason == GROUP_DROPPED:
            continue
        found.figures["finished_and_aborted"] += 1
        found.check(
            explain(disturbances, rollout.last_at, rollout.last_at),
            "silent_aborts",
            f"{uid} returned {rollout.reward} and was aborted ({reason}); nothing had happened",
        )


def check_drops(
    rollouts: Mapping[str, Rollout],
    pool: PoolBooks,
    trained: Collection[str],
    disturbances: Sequence[Disturbance],
    found: Verdict,
    *,
    min_n: int,
) -> None:
    """Each dropped group has a reason that somebody but the pool knows."""
    by_prompt: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts.values():
        by_prompt[rollout.prompt].append(rollout)
    restarts = [d for d in disturbances if d.is_restart]
    for uid, how in pool.closed.items():
        if not how.startswith("dropped") or uid in pool.named_lost:
            continue
        reason, of = how.removeprefix("dropped (").removesuffix(")"), by_prompt[uid]
        began = min((r.began_at for r in of), default=0.0)
        ended = max((r.last_at for r in of), default=float("inf"))
        if reason in DUE_TO_TRAINING:
            is_known = uid in trained
        elif reason in DUE_TO_RESTART:
            is_known = any(began <= d.ended + AFTER_S for d in restarts)
        elif reason == TOO_FEW_ROLLOUTS:
            n_finished = sum(r.ends == ["returned"] for r in of)
            is_known = n_finished < min_n or explain(disturbances, began, ended)
        else:
            may_be = reason in DUE_TO_OUTAGE or (reason == CANCELLED and not of)
            is_known = may_be and explain(disturbances, began, ended)
        what = f"group {uid} was dropped ({reason}); its agents: {[r.ends for r in of]}"
        found.check(is_known, "silent_drops", f"{what}; nobody else knows why")


def check_trained(
    config: RunConfig,
    run: Run,
    trained: Trained,
    rollouts: Mapping[str, Rollout],
    found: Verdict,
) -> None:
    """Check that trained steps are those that agents saw, of the weights that they name."""
    for wrong in trained.bad_pictures:
        found.check(False, "steps_changed", wrong)
    found.figures["pictures_trained"] = len(trained.pictures)
    for trajectory in trained.trajectories.values():
        _check_trajectory(trajectory, rollouts.get(trajectory.trajectory_uid), found)
    _check_versions(config, run, trained, rollouts, found)


def _check_trajectory(trajectory: Trajectory, rollout: Rollout | None, found: Verdict) -> None:
    """It was trained with the steps and the reward of its agent."""
    uid = trajectory.trajectory_uid
    if rollout is None:
        found.check(False, "steps_extra", f"{uid} was trained, but no agent knows it")
        return
    found.figures["trajectories_trained"] += 1
    found.check(
        rollout.reward == trajectory.reward and rollout.ends == ["returned"],
        "rewards_from_failures",
        f"{uid} was trained with {trajectory.reward}; its agent: {rollout.ends}, {rollout.reward}",
    )
    found.check(rollout.prompt == trajectory.prompt_uid, "steps_changed", f"{uid}: another prompt")
    for call, times in Counter(s.metadata["call_id"] for s in trajectory.steps).items():
        found.check(times == 1, "trained_twice", f"{uid} has call {call} {times} times")
    for step in trajectory.steps:
        call = step.metadata["call_id"]
        if (entry := rollout.answered.get(call)) is None:
            found.check(False, "steps_extra", f"{uid} has call {call}, which its agent never saw")
            continue
        same = step.rollout_log_probs is not None and np.array_equal(
            step.rollout_log_probs, np.float32(entry["log_probs"])
        )
        found.check(same, "steps_changed", f"{uid} call {call}: other log-probs than answered")
        shown = [picture.digest for picture in step.pictures]
        same = shown == entry["pictures"]
        found.check(same, "steps_changed", f"{uid} call {call}: other pictures than were shown")
    for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        history = shadow_ids(
            np.concatenate([before.prompt_ids, before.response_ids]), before.pictures
        )
        prompt = shadow_ids(after.prompt_ids, after.pictures)
        extends = np.array_equal(prompt[: len(history)], history)
        found.check(extends, "steps_changed", f"{uid}[{after.step_index}] extends no {before}")


def _check_versions(
    config: RunConfig,
    run: Run,
    trained: Trained,
    rollouts: Mapping[str, Rollout],
    found: Verdict,
) -> None:
    by_version: dict[int, list[tuple[Step, VersionSpan]]] = defaultdict(list)
    for step in trained.steps():
        whole = VersionSpan(step.policy_version, 0, len(step.response_ids))
        for span in step.version_spans or (whole,):
            by_version[span.version].append((step, span))
        entry = rollouts[step.trajectory_uid].answered.get(step.metadata["call_id"])
        began = entry["began"] if entry else 0.0
        committed = [v for at, v in run.commits if at + COMMIT_SEEN_S < began]
        found.check(
            not committed or step.policy_version >= committed[-1],
            "versions_wrong",
            f"{step!r:.120} began when {committed[-1:]} was committed",
        )
    candidates: dict[int, list[Path]] = defaultdict(list)
    candidates[0].append(config.model.path)
    for kept in run.kept:
        candidates[kept.version].append(kept.path)
    for version, spans in sorted(by_version.items()):
        if not candidates[version]:
            found.check(False, "versions_wrong", f"{len(spans)} spans name {version}: never there")
            continue
        sample = spans[:: max(1, len(spans) // PER_VERSION)]
        gaps = [_gaps(config, path, sample, trained.pictures) for path in candidates[version]]
        for i, (step, _) in enumerate(sample):
            gap = min(of[i] for of in gaps)
            found.figures["steps_recomputed"] += 1
            found.check(
                gap <= TOLERANCE,
                "versions_wrong",
                f"{step.trajectory_uid}[{step.step_index}]: not of version {version}, by {gap:.4f}",
            )
    found.figures["versions"] = len(by_version)


def _gaps(
    config: RunConfig,
    path: Path,
    spans: Sequence[tuple[Step, VersionSpan]],
    pictures: Mapping[str, bytes],
) -> list[float]:
    """For each span, how far its log-probs are from those of the weights at `path`."""
    backend = TorchBackend(config.backend, path)
    try:
        batch = backend.convert_with_pictures([replace(step) for step, _ in spans], pictures)
        again = backend.compute_log_probs(batch).numpy()
        gaps = []
        for i, (step, span) in enumerate(spans):
            first = int(batch.offsets[i])
            mine = again[first + span.start : first + span.end]
            said = step.rollout_log_probs
            gaps.append(
                np.inf if said is None else np.abs(mine - said[span.start : span.end]).max()
            )
        return [float(gap) for gap in gaps]
    finally:
        backend.close()
