"""Bytes of a channel's steps: in memory, or in the log alone once there are too many of them.

    put ──► in memory ──written, over the limit──► in the log; the header stays
                  │                                    │
                  └──────────────► read ◄──────────────┘       copies, for whoever asks

Counts what is in memory. Does not own the steps, which their trajectories have, nor the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.core.rows import Writer
from stepwell.datapool.errors import JournalError


class Payloads:
    """The account of one channel."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.memory_bytes = 0
        """Payloads and prompts in memory."""
        self._unwritten: list[tuple[PackedStep, int]] = []
        """Steps that came in since the log was last flushed, and their rows."""

    def put(self, step: PackedStep, row: int | None) -> None:
        """A step is stored now, and in this row of the log."""
        self.memory_bytes += len(step.payload)
        if row is not None:
            self._unwritten.append((step, row))

    def release(self, steps: Sequence[PackedStep]) -> None:
        """Steps that are dropped."""
        for step in steps:
            if not step.is_spilled:
                self.memory_bytes -= len(step.payload)
                step.payload = b""  # if it is among the unwritten, nothing is left to spill

    def loaded(self, steps: Sequence[PackedStep]) -> Sequence[PackedStep]:
        """As `read`, to look at only: not copied where they are in memory."""
        return self.read(steps) if any(step.is_spilled for step in steps) else steps

    def read(self, steps: Iterable[PackedStep]) -> list[PackedStep]:
        """Copies with their payloads; what is on disk is read, and stays there.

        Raises:
            JournalError: a payload cannot be read back.
        """
        copies = [PackedStep(step.prompt, step.payload) for step in steps]
        spilled = [step for step in copies if step.is_spilled]
        if spilled:
            load = self._writer.load
            if load is None:
                raise JournalError(f"row {spilled[0].row} cannot be read: the pool has no journal")
            for step, payload in zip(spilled, load([s.row for s in spilled]), strict=True):
                step.payload = payload
        return copies

    def written(self, limit: int | None) -> None:
        """The log was flushed: what came since may leave memory, the newest first, down to `limit`
        bytes (None: any number may stay)."""
        steps, self._unwritten = self._unwritten, []
        if limit is None:
            return
        for step, row in reversed(steps):
            if self.memory_bytes <= limit:
                return
            if not step.is_spilled:
                self.memory_bytes -= len(step.payload)
                step.spill(row)
