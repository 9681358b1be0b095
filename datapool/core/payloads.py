"""Bytes of a channel's steps: in memory, or in the log alone once there are too many of them.

    put ──► in memory ──written, over the limit──► in the log; the header stays
                  │                                    │
                  └──────────────► read ◄──────────────┘       copies, for whoever asks

Counts what is in memory. Does not own the steps, which their trajectories have, nor the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.core.log_rows import Writer
from stepwell.datapool.errors import JournalError


class Payloads:
    """The account of one channel."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.memory_bytes = 0
        """Payloads and prompts in memory."""
        self._unflushed: list[tuple[PackedStep, tuple[int, int, int]]] = []
        """Steps that came in since the log was last flushed, and where it has them."""

    def put(self, step: PackedStep) -> None:
        """A step is stored now."""
        self.memory_bytes += len(step.payload)

    def in_row(self, steps: Iterable[PackedStep], row: int) -> None:
        """The payloads of these steps, one after the other, are this row of the log."""
        at = 0
        for step in steps:
            self._unflushed.append((step, (row, at, len(step.payload))))
            at += len(step.payload)

    def release(self, steps: Sequence[PackedStep]) -> None:
        """Steps that are dropped."""
        for step in steps:
            if not step.is_spilled:
                self.memory_bytes -= len(step.payload)
                step.payload = b""  # if it was not flushed, nothing is left to spill

    def loaded(self, steps: Sequence[PackedStep]) -> Sequence[PackedStep]:
        """Return the steps with their payloads, to look at only: themselves if all are in memory,
        else copies as from `read`."""
        return self.read(steps) if any(step.is_spilled for step in steps) else steps

    def read(self, steps: Iterable[PackedStep]) -> list[PackedStep]:
        """Copies with their payloads; what is on disk is read, and stays there.

        Raises:
            JournalError: a payload cannot be read back.
        """
        copies = [PackedStep(step.prompt, step.payload) for step in steps]
        spilled = [step for step in copies if step.is_spilled]
        if spilled:
            if self._writer.log is None:
                raise JournalError("spilled steps cannot be read: the pool has no journal")
            rows = list(dict.fromkeys(step.place[0] for step in spilled))
            loaded = dict(zip(rows, self._writer.log.read(rows), strict=True))
            for step in spilled:
                row, at, size = step.place
                step.payload = loaded[row][at : at + size]
        return copies

    def written(self, limit: int | None) -> None:
        """The log was flushed: what came since may leave memory, the newest first, down to `limit`
        bytes (None: any number may stay)."""
        steps, self._unflushed = self._unflushed, []
        if limit is None:
            return
        for step, place in reversed(steps):
            if self.memory_bytes <= limit:
                return
            if not step.is_spilled:
                self.memory_bytes -= len(step.payload)
                step.spill(place)
