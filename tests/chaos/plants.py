"""Plants: deliberate faults of the product, one at a time, that the verifier has to notice. A
verifier that misses one would miss the same defect in the product.

    planted.py ──STEPWELL_CHAOS_PLANT=silent_abort──► the run's processes and Ray's actors
                                                              │ site/sitecustomize.py calls `arm`
                                                              ▼
    import of `Plant.module` ──► its code runs ──► `Plant.install` replaces a function

Nothing of this is in the product's code. A fault that the pool would do again while it replays its
journal is not done there: the journal says what the pool was asked, and a restart must not hide it.

Does not own the runs and what is expected of them (`planted.py`).
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import ModuleType
from typing import Any, Final

PLANT: Final = "STEPWELL_CHAOS_PLANT"
"""Environment variable: name of the plant."""
ACK_TO_CHECKPOINT_S = 3.0
"""`ack_before_durable` leaves so long for a kill in between."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A deliberate fault.

    Args:
        module: whose import installs it.
        install: replaces a method or a function of that module.
        noticed_as: kinds of violations, at least one of which must name it.
        kill_at: optimizer steps after which the driver is killed, just before a checkpoint is
            complete; 0: no kill, the fault shows by itself.
        steps: optimizer steps of the run.
    """

    module: str
    install: Callable[[ModuleType], None]
    noticed_as: frozenset[str]
    kill_at: int = 0
    steps: int = 12


def every(n: int, first: int) -> Callable[[], bool]:
    """True at the `first` call (from 1), and at every n-th after it."""
    numbers = count(1)
    return lambda: (number := next(numbers)) >= first and (number - first) % n == 0


# -- the pool ------------------------------------------------------------------------------------


def _lose_step(channel: Any) -> None:
    """A Step in 500 is answered as stored and is gone: the last of a trajectory."""
    complete, seen, due = channel.Channel._complete, [0], [150]

    def lossy(self: Any, record: Any, closing: Any) -> None:
        seen[0] += len(record.steps)
        if not self.replaying and seen[0] >= due[0] and len(record.steps) > 1:
            due[0] += 500
            self.steps.release(record.steps[-1:])
            record.steps = record.steps[:-1]
        complete(self, record, closing)

    channel.Channel._complete = lossy


def _abort_silently(channel: Any) -> None:
    """Every fifth finished rollout is aborted, with a reason that others have honestly."""
    complete, hits = channel.Channel._complete, every(5, first=7)

    def aborting(self: Any, record: Any, closing: Any) -> None:
        if self.replaying or not hits():
            complete(self, record, closing)
            return
        self._abort(record, channel.Closing(record.prompt_uid, "abort", None, "cancelled"))
        self._decide(self.records.groups[record.prompt_uid])

    channel.Channel._complete = aborting


def _drop_silently(channel: Any) -> None:
    """Every eighth group that is ready is dropped for infrastructure, and nothing has failed."""
    decide, hits = channel.decide, every(8, first=9)

    def dropping(group: Any, rules: Any, now: float) -> Any:
        found = decide(group, rules, now)
        if not found.readiness.is_due or group.readiness.is_due or not hits():
            return found
        return found._replace(verdict=channel.Drop("infrastructure"))

    channel.decide = dropping


def _serve_acked(pool: Any) -> None:
    """Every fifth ack is answered, and its groups are served again."""
    ack, hits = pool.DataPool._ack, every(5, first=2)

    def forgetful(self: Any, op: Any, now: float) -> None:
        if not hits():
            ack(self, op, now)
        elif (lease := self.leases.end(op.lease_id, "acked", now)) is not None:
            self._give_back(lease, now)

    pool.DataPool._ack = forgetful
    pool._ANSWERS[pool.ops.Ack] = forgetful


def _lose_archived(archived: Any) -> None:
    """The archive lacks a trajectory of every fifth group."""
    conversations, hits = archived.conversations, every(5, first=3)

    def lossy(channel: str, rows: Sequence[Any]) -> list[Any]:
        found: list[Any] = conversations(channel, rows)
        return found[:-1] if hits() else found

    archived.conversations = lossy


# -- the gateway ---------------------------------------------------------------------------------


def _change_version(call: Any) -> None:
    """Every tenth Step names the version before the one that sampled it."""
    step, hits = call.Calls._step, every(10, first=30)

    def outdated(self: Any, *args: Any) -> Any:
        found = step(self, *args)
        if not found.policy_version or not hits():
            return found
        spans = tuple(replace(s, version=s.version - 1) for s in found.version_spans)
        return replace(found, policy_version=found.policy_version - 1, version_spans=spans)

    call.Calls._step = outdated


def _zero_log_probs(call: Any) -> None:
    """Every tenth Step has zeros for log-probs."""
    step, hits = call.Calls._step, every(10, first=30)

    def zeroed(self: Any, *args: Any) -> Any:
        found = step(self, *args)
        return (
            replace(found, rollout_log_probs=[0.0] * len(found.response_ids)) if hits() else found
        )

    call.Calls._step = zeroed


# -- rollouts and the trainer ----------------------------------------------------------------------


def _reward_failures(worker: Any) -> None:
    """A rollout whose agent raised is completed with reward 0."""
    abort = worker.RolloutWorker._abort

    async def rewarding(self: Any, base_url: str, reason: str, **options: Any) -> bool:
        if not reason.startswith("OnPurposeError"):
            answer: bool = await abort(self, base_url, reason, **options)
            return answer
        await self._gateway.ask(f"{base_url}/v1/complete_trajectory", {"reward": 0.0})
        return True

    worker.RolloutWorker._abort = rewarding


def _skip_prompts(source: Any) -> None:
    """Every tenth prompt is never handed out."""
    take, hits = source.PromptSource.next, every(10, first=8)

    def skipping(self: Any) -> Any:
        if hits():
            take(self)
        return take(self)

    source.PromptSource.next = skipping


def _ack_early(loop: Any) -> None:
    """Groups are acked before the checkpoint that contains them is written."""
    checkpoint = loop.Trainer.checkpoint

    async def early(self: Any) -> None:
        await self.batches.settle(self.batches.consumed)
        await asyncio.sleep(ACK_TO_CHECKPOINT_S)
        await checkpoint(self)

    loop.Trainer.checkpoint = early


def _change_taken(change: Callable[[Any], Any]) -> Callable[[ModuleType], None]:
    """Install `change` of every third group that training takes."""

    def install(batches: Any) -> None:
        mark, hits = batches.TrainedChannel._mark, every(3, first=5)

        def changed(self: Any, groups: Any) -> Any:
            taken: Sequence[Any] | None = mark(self, groups)
            return None if taken is None else [change(g) if hits() else g for g in taken]

        batches.TrainedChannel._mark = changed

    return install


def _double_step(group: Any) -> Any:
    """The last Step of each trajectory comes twice."""

    def doubled(t: Any) -> Any:
        last = t.steps[-1]
        again = replace(last, step_index=last.step_index + 1)
        return replace(t, steps=(*t.steps[:-1], replace(last, is_last=False), again))

    return replace(group, trajectories=tuple(map(doubled, group.trajectories)))


def _drop_last_token(group: Any) -> Any:
    """The last Step of each trajectory lacks its last token."""

    def cut(step: Any) -> Any:
        n = len(step.response_ids) - 1
        if n < 1:
            return step
        spans = tuple(replace(s, end=min(s.end, n)) for s in step.version_spans if s.start < n)
        return replace(
            step,
            response_ids=step.response_ids[:n],
            rollout_log_probs=step.rollout_log_probs[:n],
            version_spans=spans,
            policy_version=min((s.version for s in spans), default=step.policy_version),
        )

    trajectories = (replace(t, steps=(*t.steps[:-1], cut(t.steps[-1]))) for t in group.trajectories)
    return replace(group, trajectories=tuple(trajectories))


def _swap_rewards(group: Any) -> Any:
    """The first two trajectories have each other's reward."""
    if len(group.trajectories) < 2:
        return group
    one, other, *rest = group.trajectories
    rewards = one.steps[-1].reward, other.steps[-1].reward

    def scored(t: Any, reward: float | None) -> Any:
        return replace(t, steps=(*t.steps[:-1], replace(t.steps[-1], reward=reward)))

    swapped = (scored(one, rewards[1]), scored(other, rewards[0]), *rest)
    return replace(group, trajectories=swapped)


def _swap_pictures(batches: Any) -> None:
    """Two pictures of one size of a batch are trained in each other's place."""
    pictures = batches.Batches.pictures

    async def swapped(self: Any, groups: Any) -> Any:
        found = await pictures(self, groups)
        by_size: dict[tuple[int, int], list[str]] = {}
        for each in (p for g in groups for s in g.steps for p in s.pictures):
            same = by_size.setdefault((each.width, each.height), [])
            if each.digest not in same:
                same.append(each.digest)
        for one, other, *_ in (same for same in by_size.values() if len(same) > 1):
            found |= {one: found[other], other: found[one]}
        return found

    batches.Batches.pictures = swapped


_POOL, _BATCHES = "stepwell.datapool.core", "stepwell.trainer.batches"
_CALL = "stepwell.gateway.call"


def _plant(module: str, install: Callable[[Any], None], *noticed_as: str, **other: int) -> Plant:
    return Plant(module, install, frozenset(noticed_as), **other)


PLANTS: Final[dict[str, Plant]] = {
    "lost_step": _plant(f"{_POOL}.channel", _lose_step, "steps_lost", steps=16),
    "silent_abort": _plant(f"{_POOL}.channel", _abort_silently, "silent_aborts"),
    "silent_drop": _plant(f"{_POOL}.channel", _drop_silently, "silent_drops"),
    "acked_again": _plant(f"{_POOL}.pool", _serve_acked, "trained_twice"),
    "lost_archived": _plant(
        "stepwell.datapool.files.archive.conversations", _lose_archived, "not_archived"
    ),
    "wrong_version": _plant(_CALL, _change_version, "versions_wrong"),
    "zeroed_log_probs": _plant(_CALL, _zero_log_probs, "steps_changed"),
    "failure_rewarded": _plant(
        "stepwell.trainer.rollout.worker", _reward_failures, "rewards_from_failures", steps=20
    ),
    "skipped_prompt": _plant("stepwell.trainer.data.source", _skip_prompts, "groups_lost"),
    "ack_before_durable": _plant(
        "stepwell.trainer.loop", _ack_early, "steps_lost", kill_at=6, steps=10
    ),
    "doubled_step": _plant(_BATCHES, _change_taken(_double_step), "trained_twice"),
    "dropped_token": _plant(_BATCHES, _change_taken(_drop_last_token), "steps_changed"),
    "swapped_pictures": _plant(_BATCHES, _swap_pictures, "steps_changed"),
    "swapped_rewards": _plant(_BATCHES, _change_taken(_swap_rewards), "rewards_from_failures"),
}


# -- arming ----------------------------------------------------------------------------------------


class _OnImport:
    """Finds one module, and installs a plant in it once its code has run."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != self._plant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            self._plant.install(module)

        loader.exec_module = run_and_install
        return spec


def arm() -> None:
    """The plant that the environment names is installed when its module is imported."""
    finder: Any = _OnImport(PLANTS[os.environ[PLANT]])
    sys.meta_path.insert(0, finder)
