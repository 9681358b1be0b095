"""`python -m tests.chaos journal-damage`: random damage to a journal or a checkpoint is harmless or
raises; none is silent.


A writer process applies groups of Steps to a DataPool over a journal and tells, through a pipe,
what is about to be durable and what was acknowledged; then it is killed (SIGKILL). Its segments are
small, so that many come, are cleaned and go. Each trial
copies what it left, damages one file (a flipped bit, a cut, a removal), and opens it as a pool's
actor does. The pipe is the independent record: a pool that opens must hold exactly what was
acknowledged, perhaps with the transaction that was under way. A journal that is refused is
salvaged, and the pool over it is held against the acknowledgements, too: a group that it would
serve must be live by them and as they left it, so that nothing acked is trained again; and each
group that is live by them and is not served must be named in the report, or its number, where the
damage took every row of it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch

from benchmarks.checks import BenchResult
from stepwell.datapool.codec import encoder
from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import DamagedFileError, DataPoolError, JournalError
from stepwell.datapool.store import cleaning, index
from stepwell.datapool.store import journal as journal_module
from stepwell.datapool.store.folder import ACKED_NAME
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.salvage import salvage
from stepwell.datapool.store.segments import segment_path, segments_in
from stepwell.datapool.types import Step
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.errors import CheckpointError
from tests.chaos.trials import result_of
from tests.datapool.conftest import SyncPool

Outcome = Literal["harmless", "raised", "silent"]
KINDS = ("flip", "cut", "removal")
LIVES = (
    ("process", 9, False),
    ("process", 120, True),
    ("power", 25, False),
    ("process", 350, False),
)
"""Durability; how many transactions a writer acknowledged before it was killed; whether a pool was
started over it since, and shut down."""
NEWEST, ANY = "newest segment", "any segment"
REPOSITORY = Path(__file__).parents[2]


# --- the writer ---


def write(folder: Path, durability: Literal["process", "power"], seed: int) -> None:
    """Groups come, are completed, leased and acked, until somebody kills this process."""
    journal_module.SEGMENT_BYTES, index.SLACK_BYTES, cleaning.SLICE_BYTES = 30_000, 50_000, 4000
    chance = random.Random(seed)
    pool = SyncPool(PoolConfig(default=ChannelConfig(n_rollouts=2)))
    journal = Journal(folder, durability)
    restore(pool, journal)
    open_: list[str] = []
    for k in range(1_000_000):
        uid = f"p{k}"
        pool.open_group(uid, 2, now=time.time())
        open_.append(uid)
        prompt = np.arange(chance.randrange(5, 400), dtype=np.int32)
        for t in "ab":
            length = chance.randrange(1, 200)
            pool.submit_steps(
                [
                    Step(
                        prompt_ids=prompt,
                        response_ids=np.array([chance.randrange(1000) for _ in range(length)]),
                        rollout_log_probs=np.array([-chance.random() for _ in range(length)]),
                        reward=chance.random(),
                        trajectory_uid=uid + t,
                        prompt_uid=uid,
                        step_index=0,
                        policy_version=k,
                        is_last=False,
                    )
                ],
                now=time.time(),
            )
        if len(open_) > 3:  # what waits is completed later, in transactions of its own
            done = open_.pop(chance.randrange(len(open_)))
            for t in "ab":
                pool.complete_trajectory(done + t, reward=chance.random(), now=time.time())
        if chance.random() < 0.3 and (lease := pool.lease_batch(now=time.time())) is not None:
            pool.ack(lease.lease_id, now=time.time())
        pool.write_counts()
        say("about", content(pool))
        journal.flush()
        say("acked", {})


def say(what: str, groups: Mapping[str, str]) -> None:
    print(json.dumps([what, groups]), flush=True)


def content(pool: DataPool) -> dict[str, str]:
    """Each live group: a digest of all that a consumer would get of it."""
    channel = pool.channel("train")
    found = {}
    for uid, group in channel.records.groups.items():
        digest = hashlib.sha256(f"{group.terms} {group.delivery} {group.readiness.is_due}".encode())
        for record in sorted(group.trajectories, key=lambda record: record.trajectory_uid):
            name = record.trajectory_uid
            digest.update(f"{name} {record.closing} {record.outcome}".encode())
            digest.update(encoder.encode(channel.packed(record)))
        found[uid] = digest.hexdigest()[:16]
    return found


# --- what it left ---


@dataclass(frozen=True, slots=True)
class Left:
    """A killed writer's folder, and what it told."""

    folder: Path
    durability: str
    acknowledged: Mapping[str, str]
    under_way: Mapping[str, str] | None
    """Content with the unacknowledged transaction, which may be there; None: there was none."""
    moments: Sequence[Mapping[str, str]]
    """After each transaction: group -> content."""


def leave(folder: Path, durability: str, n: int, closed: bool, seed: int) -> Left:
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.chaos.journal_damage",
            str(folder),
            durability,
            str(seed),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    if child.stdout is None:
        raise RuntimeError("the writer has no pipe")
    lines = [child.stdout.readline() for _ in range(2 * n)]
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    told = [json.loads(line) for line in lines if line.endswith("\n")]
    if len(told) < 2 * n:
        raise RuntimeError(f"the writer ended by itself, after {len(told)} of {2 * n} lines")
    n_acked = sum(what == "acked" for what, _ in told)
    moments = [{}, *(groups for what, groups in told if what == "about")]
    under_way = moments[n_acked + 1] if len(moments) > n_acked + 1 else None
    if closed:
        open_pool(folder, durability)
    return Left(folder, durability, moments[n_acked], under_way, moments)


def open_pool(folder: Path, durability: str, *, served: bool = False) -> dict[str, str]:
    """Start a pool over the folder and return the content that it holds.

    Args:
        served: only what a consumer would get, now or once it is complete.
    """
    journal = Journal(folder, "power" if durability == "power" else "process", lock_timeout_s=0)
    try:
        pool = SyncPool(PoolConfig(default=ChannelConfig(n_rollouts=2)))
        restore(pool, journal)
        found = content(pool)
        if served:
            groups = pool.channel("train").records.groups
            found = {u: c for u, c in found.items() if groups[u].marks.trainable is not False}
        counts = pool.get_statistics("train", now=time.time())["groups"]
    finally:
        journal.close()
    held = sum(counts[state] for state in ("open", "ready", "leased", "acked", "dropped"))
    if held != counts["submitted"]:
        raise AssertionError(f"groups are not conserved: {counts}")
    return found


# --- trials ---


@dataclass(frozen=True, slots=True)
class Trial:
    kind: str
    """flip, cut or removal."""
    file: str
    outcome: Outcome
    said: str
    """The error, or what was found instead."""
    served_again: tuple[str, ...] = ()
    """Groups that a pool over the salvaged journal serves and that are not live, or not so."""
    unnamed: tuple[str, ...] = ()
    """Groups that it does not serve and that the report does not name."""
    told: bool = True
    """False if the error does not name the damaged file of a checkpoint."""

    @property
    def failed(self) -> bool:
        return bool(self.outcome == "silent" or self.served_again or self.unnamed or not self.told)


def damage(path: Path, kind: str, chance: random.Random) -> None:
    if kind == "removal":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if not data:
        return
    if kind == "cut":
        del data[chance.randrange(len(data)) :]
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def try_journal(left: Left, copy: Path, kind: str, file: str, chance: random.Random) -> Trial:
    shutil.copytree(left.folder, copy)
    numbers = segments_in(copy)
    segment = numbers[-1] if file == NEWEST else chance.choice(numbers)
    path = copy / file if file == ACKED_NAME else segment_path(copy, segment)
    damage(path, kind, chance)
    try:
        found = open_pool(copy, left.durability)
    except DataPoolError as e:
        again, unnamed = salvaged(left, copy)
        return Trial(kind, file, "raised", str(e), again, unnamed)
    if found in (left.acknowledged, left.under_way):
        return Trial(kind, file, "harmless", "")
    missing = left.acknowledged.items() - found.items()
    return Trial(kind, file, "silent", f"{len(missing)} groups are not as acknowledged")


def salvaged(left: Left, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Groups that are served again after a salvage, and groups that are lost without a name."""
    try:
        [report] = salvage(folder)
    except JournalError as e:
        if "nothing can be saved" in str(e):  # nothing is served, and it says so
            return (), ()
        raise
    found = open_pool(folder, left.durability, served=True)
    true = [left.acknowledged, *([] if left.under_way is None else [left.under_way])]
    again = tuple(u for u, c in found.items() if all(c != moment.get(u) for moment in true))
    named = {u for uids in (*report.dropped.values(), *report.doubtful.values()) for u in uids}
    nameless = report.nameless.get("train", [])
    unnamed = tuple(
        uid
        for uid in set.intersection(*map(set, true)) - found.keys() - named
        if not any(first <= number_of(uid) <= last for first, last in nameless)
    )
    return again, unnamed


def number_of(uid: str) -> int:
    """The pool's number of a group: the writer begins p0, p1, … in order."""
    return int(uid[1:]) + 1


def save_checkpoint(folder: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    store = CheckpointStore(folder, keep=2)
    state = {
        "backend": {f"w{k}": torch.randn(64, 64, generator=generator) for k in range(8)},
        "pending": [{"question": "1 + 1", "seed": seed}],
    }
    path = store.save(7, state, {"model_path": "examples/quickstart/model", "backend": "torch"})
    store.score(7, 0.5)
    return path


def load_checkpoint(folder: Path) -> bytes:
    store = CheckpointStore(folder, keep=2)
    path = store.find("auto")
    if path is None:
        return b""
    return pickle.dumps((store.about(path), store.scores(), plain(store.load(path))))


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def try_checkpoint(left: Path, copy: Path, kind: str, file: str, chance: random.Random) -> Trial:
    shutil.copytree(left, copy)
    sound = load_checkpoint(copy)
    damage(copy / file, kind, chance)
    try:
        found = load_checkpoint(copy)
    except (CheckpointError, DamagedFileError) as e:
        names_it = Path(file).name in str(e)
        return Trial(kind, file, "raised", str(e), told=names_it)
    return Trial(kind, file, "harmless" if found == sound else "silent", "")


def run_trials(n: int, seed: int, folder: Path) -> list[Trial]:
    """`n` trials, all kinds on all files in turn; the same for the same seed, but for the moments
    at which writers are killed."""
    chance = random.Random(seed)
    lives = [
        leave(folder / f"life-{k}", durability, count, closed, chance.randrange(1 << 30))
        for k, (durability, count, closed) in enumerate(LIVES if n > 30 else LIVES[:2])
    ]
    checkpoints = folder / "checkpoints"
    name = save_checkpoint(checkpoints, seed).name
    found: list[Trial] = []
    journal_files = [NEWEST, ANY, ANY, ACKED_NAME]
    checkpoint_files = sorted(f"{name}/{p.name}" for p in (checkpoints / name).iterdir())
    places: list[tuple[Callable[..., Trial], str]] = [(try_journal, file) for file in journal_files]
    places += [(try_checkpoint, file) for file in [*checkpoint_files, "scores.json"]]
    for k in range(n):
        attempt, file = places[k % len(places)]
        kind = chance.choices(KINDS, (6, 2, 1))[0]
        left = chance.choice(lives) if attempt is try_journal else checkpoints
        copy = folder / f"copy-{k}"
        found.append(attempt(left, copy, kind, file, chance))
        for used in folder.glob(f"copy-{k}*"):
            shutil.rmtree(used)
    return found


def summary(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    for trial in trials:
        place = f"{trial.kind} {trial.file}"
        counts.setdefault(place, Counter())[trial.outcome] += 1
    total = Counter(trial.outcome for trial in trials)
    return {
        "seed": seed,
        "trials": len(trials),
        "outcomes": {outcome: total[outcome] for outcome in get_args(Outcome)},
        "by_kind": {place: dict(counts[place]) for place in sorted(counts)},
        "served_again": sum(len(trial.served_again) for trial in trials),
        "unnamed": sum(len(trial.unnamed) for trial in trials),
        "failures": [
            [t.kind, t.file, t.outcome, t.said, list(t.served_again), list(t.unnamed)]
            for t in trials
            if t.failed
        ],
    }


async def run(
    *,
    trials: int = 200,
    seed: Annotated[int | None, "default: a random one"] = None,
) -> BenchResult:
    def try_all(seed: int, folder: Path) -> Mapping[str, Any]:
        return summary(run_trials(trials, seed, folder), seed)

    return result_of(try_all, seed, "stepwell-damage-")


if __name__ == "__main__":  # the writer, which is killed
    _, writes_to, how, number = sys.argv
    write(Path(writes_to), "power" if how == "power" else "process", int(number))
