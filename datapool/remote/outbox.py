"""This module sends steps to the pool so that a prompt travels once: packed relative to those sent
before them, and asked again for room.

    submit ──► packed, relative to its base where that was sent lately ──► its shard ──► outcomes
                  ▲                                                           │
                  ├─ the pool lacks pictures: once more, after those ─────────┤
                  ├─ the pool does not hold the base: once more, whole ───────┤
                  └─ the channel blocks: wait until the trajectory is open ───┘

Pictures travel when the pool asks for them: it mostly has them from the turn before, or from a
sibling. Owns what is sent, and how often. Does not own the layout (`codec.py`), nor the connection
(`shard.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from stepwell.datapool.codec import Base, PackedStep, in_trajectories, pack
from stepwell.datapool.errors import DataPoolError, InvalidStepError, UnknownPictureError
from stepwell.datapool.ops import (
    OpenTrajectory,
    PutPictures,
    Refusal,
    SubmitOutcome,
    SubmitSteps,
)
from stepwell.datapool.remote.shard import Caller
from stepwell.datapool.types import Step

MAX_RECENT = 200_000
"""Recent steps that are remembered, some 300 bytes each; the trajectories added to longest ago go
first."""
PUT_BYTES = 4 << 20
"""Bytes of pictures that one call stores: a few ms of the pool's."""
_NONE: Mapping[int, Base] = {}
Results: TypeAlias = list[SubmitOutcome | Refusal]
_Bytes: TypeAlias = Mapping[str, bytes]
PictureSource: TypeAlias = _Bytes | Callable[[Collection[str]], _Bytes | Awaitable[_Bytes]]
"""PNG by digest; or a function that gives those that it is asked for, when the pool lacks them."""


class Outbox:
    """The steps that producers send through one client.

    Args:
        pool: the way there, to all of its shards.
    """

    def __init__(self, pool: Caller) -> None:
        self._pool = pool
        self.recent = RecentSteps()

    async def submit(
        self,
        steps: Sequence[Step],
        channel: str,
        timeout_s: float | None,
        pictures: PictureSource | None = None,
    ) -> Results:
        """Each step's outcome or refusal; waits up to `timeout_s` (None: for ever) for room."""
        results = await self._send(steps, channel, range(len(steps)))
        if Refusal in map(type, results):  # as hardly ever
            await self._send_again(steps, channel, range(len(steps)), results, pictures)
            blocked = _refused(range(len(steps)), results, "PoolFullError")
            if timeout_s != 0 and blocked:
                # The channel blocks: steps of new groups wait here, in their producer.
                new = {steps[i].trajectory_uid: steps[i].prompt_uid for i in blocked}
                opening = (OpenTrajectory(t, p, channel=channel) for t, p in new.items())
                calls = (self._pool.call(op, timeout_s) for op in opening)
                # Whatever refuses one of them refuses its steps, too.
                await asyncio.gather(*calls, return_exceptions=True)
                await self._replace(steps, channel, blocked, results)
                await self._send_again(steps, channel, blocked, results, pictures)
        return results

    async def put(
        self,
        trajectory_uid: str,
        pictures: Mapping[str, bytes],
        channel: str,
        prompt_uid: str | None = None,
        owner: str | None = None,
    ) -> None:
        """Store pictures, some MB a call."""
        part: dict[str, bytes] = {}
        n_bytes = 0
        for digest, data in pictures.items():
            if part and n_bytes + len(data) > PUT_BYTES:
                await self._pool.call(PutPictures(trajectory_uid, part, channel, prompt_uid, owner))
                part, n_bytes = {}, 0
            part[digest] = data
            n_bytes += len(data)
        if part:
            await self._pool.call(PutPictures(trajectory_uid, part, channel, prompt_uid, owner))

    async def put_missing(
        self, steps: Iterable[Step], digests: Collection[str], channel: str, source: PictureSource
    ) -> bool:
        """Store pictures that the pool lacks, for each trajectory whose steps refer to them; false
        if the source has none of them."""
        known: Any = source
        if callable(source):
            known = source(tuple(digests))
            if isinstance(known, Awaitable):
                known = await known
        wanted: dict[tuple[str, str], dict[str, bytes]] = {}
        for step in steps:
            for picture in step.pictures:
                if picture.digest in digests and picture.digest in known:
                    own = wanted.setdefault((step.trajectory_uid, step.prompt_uid), {})
                    own[picture.digest] = known[picture.digest]
        for (trajectory_uid, prompt_uid), pictures in wanted.items():
            await self.put(trajectory_uid, pictures, channel, prompt_uid)
        return bool(wanted)

    async def _send_again(
        self,
        steps: Sequence[Step],
        channel: str,
        which: Collection[int],
        results: Results,
        pictures: PictureSource | None,
    ) -> None:
        """Send those again that the pool lacks pictures, or the base, of."""
        if pictures is not None:
            await self._send_pictures(steps, channel, which, results, pictures)
        if unknown := _refused(which, results, "UnknownBaseError"):
            self.recent.clear()
            await self._replace(steps, channel, unknown, results)

    async def _send_pictures(
        self,
        steps: Sequence[Step],
        channel: str,
        which: Collection[int],
        results: Results,
        source: PictureSource,
    ) -> None:
        """Store the pictures that steps were refused for, and send those steps again, with the ones
        that are relative to them."""
        if not _refused(which, results, "UnknownPictureError"):
            return
        # Steps that came after one that was refused, too: what is new in each.
        later = _refused(which, results, "UnknownBaseError")
        refused = _refused(which, results, "UnknownPictureError", "UnknownBaseError")
        digests = {
            d
            for i in refused
            if isinstance(refusal := results[i], Refusal)
            and isinstance(error := refusal.error(), UnknownPictureError)
            for d in error.digests
        }
        digests |= {picture.digest for i in later for picture in steps[i].pictures}
        try:
            if not await self.put_missing([steps[i] for i in refused], digests, channel, source):
                return
        except DataPoolError as e:
            for i in refused:
                results[i] = Refusal.of(e)
            return
        await self._replace(steps, channel, refused, results)

    async def _replace(
        self, steps: Sequence[Step], channel: str, which: Collection[int], results: Results
    ) -> None:
        """Send steps again, for other results."""
        for i, result in zip(which, await self._send(steps, channel, which), strict=True):
            results[i] = result

    async def _send(self, steps: Sequence[Step], channel: str, which: Iterable[int]) -> Results:
        """Return the results of steps, each sent relative to the parent that it names if that was
        sent before; in one call."""
        packed: list[tuple[str, str, PackedStep]] = []
        malformed: dict[int, Refusal] = {}
        for at, i in enumerate(which):
            step = steps[i]
            try:
                packed.append(
                    (step.trajectory_uid, step.prompt_uid, self.recent.pack(step, channel))
                )
            except InvalidStepError as e:
                malformed[at] = Refusal.of(e)
        results: Results = []
        if packed:
            try:
                call = self._pool.call(SubmitSteps(in_trajectories(packed), channel))
                self.recent.remember()
                results = await call
            except DataPoolError as e:  # of the call: nothing was acknowledged
                results = [Refusal.of(e)] * len(packed)
        for at, refusal in malformed.items():
            results.insert(at, refusal)
        return results


class RecentSteps:
    """Recent steps by trajectory."""

    def __init__(self, limit: int = MAX_RECENT) -> None:
        self._limit = limit
        self._steps: OrderedDict[tuple[str, str], dict[int, Base]] = OrderedDict()
        """(trajectory_uid, channel) -> step_index -> step"""
        self._n = 0
        self._packed: list[tuple[Step, str, int]] = []
        """Steps that were packed and are not remembered yet: channel and CRC-32 of each."""

    def __len__(self) -> int:
        return self._n

    def pack(self, step: Step, channel: str) -> PackedStep:
        """Pack a step relative to its parent, if that is known. `remember` it once it is sent."""
        base = None
        if (parent := step.parent_index) is not None:
            key = step.trajectory_uid, channel
            if self._packed and parent not in self._steps.get(key, _NONE):
                self.remember()  # perhaps it is sent together with its parent
            base = self._steps.get(key, _NONE).get(parent)
        packed = pack(step, base)
        self._packed.append((step, channel, packed.crc))
        return packed

    def remember(self) -> None:
        """Remember the steps that were packed. To be called when they are sent: their digests are
        made while the pool works."""
        packed, self._packed = self._packed, []
        for step, channel, crc in packed:
            key = step.trajectory_uid, channel
            if step.is_last:
                self.end(*key)
                continue
            known = self._steps.setdefault(key, {})
            self._n += step.step_index not in known
            known[step.step_index] = Base.of(step, crc)
            self._steps.move_to_end(key)
        while self._n > self._limit and len(self._steps) > 1:
            self.end(*next(iter(self._steps)))

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        self._n -= len(self._steps.pop((trajectory_uid, channel), ()))

    def clear(self) -> None:
        self._steps.clear()
        self._n = 0


def _refused(which: Iterable[int], results: Sequence[Any], *kinds: str) -> list[int]:
    """Indices of results that are refusals of one of these kinds."""
    found = ((i, results[i]) for i in which)
    return [i for i, result in found if isinstance(result, Refusal) and result.kind in kinds]
