"""The steps of a channel: each is stored once, relative to the one it extends, in memory or, once
there are too many, in the log alone.

    step ──► known already? late? beyond the end? ──► other tokens than its base? ──► stored
              "duplicate", "late", StepIndexError      UnknownBaseError: send it whole

    stored: in memory ──spill, over the limit──► in the log; the header stays
                  │                                    │
                  └──────────────► read ◄──────────────┘       copies, for whoever asks

Counts what is in memory. Does not own the layout of a step (`codec.py`), the steps, which their
trajectories have, the limits, nor when a trajectory begins (`channel.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from zlib import crc32

from stepwell.datapool import errors
from stepwell.datapool.codec import (
    HEADER_BYTES,
    PICTURES,
    SPILLED,
    Header,
    PackedStep,
    PackedTrajectory,
    Prompt,
    as_root,
    chain_pictures,
    chain_tokens,
    relative,
    shadow_bytes,
    unpack,
)
from stepwell.datapool.core.group_log import GroupLog
from stepwell.datapool.core.records import TrajectoryRecord

MAX_STEP_BYTES = 1 << 30


class StepStore:
    """Checks, packs and keeps the steps of one channel.

    Args:
        channel: its name, for messages.
        log: the rows that have the payloads.
    """

    def __init__(self, channel: str, log: GroupLog) -> None:
        self._channel = channel
        self._log = log
        self.memory_bytes = 0
        """Payloads and prompts in memory."""

    # -- a step that was sent ----------------------------------------------------------------

    def header_of(self, uid: str, step: PackedStep) -> Header:
        """Return the header of a step that was sent.

        Raises:
            InvalidStepError: it came without its bytes, or with too many.
        """
        n_bytes, prompt = len(step.payload), step.prompt
        if (
            n_bytes <= HEADER_BYTES
            or (header := step.header).flags & SPILLED
            or (header.base_index < 0) is (prompt is None)
        ):
            raise errors.InvalidStepError(
                f"a step of trajectory {uid!r} in channel {self._channel!r} is packed without its "
                f"payload, or with {'no' if prompt is None else 'a'} prompt, which its base "
                "contradicts; pack it with codec.pack"
            )
        if (n_bytes := n_bytes + len(prompt or b"")) > MAX_STEP_BYTES:
            raise errors.InvalidStepError(
                f"step {uid!r}[{header.step_index}] in channel {self._channel!r} has {n_bytes} "
                f"bytes; at most {MAX_STEP_BYTES} can be stored, leave something out"
            )
        return header

    def fit(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> PackedStep:
        """Return a new step of a trajectory as it is stored: relative to its parent.

        Raises:
            StepIndexError: its index contradicts the step that is marked as the last one.
            UnknownBaseError: the tokens that it is relative to are not those that are stored.
        """
        last, highest, index = record.last_index, record.max_index, header.step_index
        if last is not None or (index < highest and header.is_last):
            if last is not None and index > last:
                why = f"lies beyond the step marked is_last, {last}"
            elif last is not None and header.is_last:
                why = f"is marked is_last, and so is step {last}; mark one"
            elif header.is_last:
                why = f"is marked is_last, but step {highest} is stored; mark the one with the"
                why += " highest step_index"
            else:
                why = ""
            if why:
                uid = record.trajectory_uid
                raise errors.StepIndexError(
                    f"step {uid!r}[{index}] in channel {self._channel!r} {why}"
                )
        if step.prompt is not None:
            return self.with_parent(record, step, header)
        base = record.step(header.base_index)
        if (
            base is None
            or base.crc != header.base_crc
            or (record.pictures and base.has_pictures and not header.flags & PICTURES)
        ):
            raise self.unknown_base(record.trajectory_uid, header)
        return step

    def unknown_base(self, uid: str, step: Header) -> errors.UnknownBaseError:
        return errors.UnknownBaseError(
            f"step {uid!r}[{step.step_index}] in channel {self._channel!r} is packed relative to "
            f"step {step.base}, which is not stored, or with other tokens; send it whole"
        )

    def is_same(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> bool:
        """Return whether a step has the content of the stored one of its index, however it is
        packed.

        Raises:
            UnknownBaseError: as `fit`.
        """
        if header.base is not None:
            base = record.step(header.base)
            if base is None or base.crc != header.base_crc:
                raise self.unknown_base(record.trajectory_uid, header)
        ours = self.read(record.chain(header.step_index))
        if ours[0] == step:
            return True
        theirs = [] if header.base is None else self.read(record.chain(header.base))
        uids = record.trajectory_uid, record.prompt_uid
        stored_step, *_ = unpack(PackedTrajectory(*uids, ours))
        sent_step, *_ = unpack(PackedTrajectory(*uids, [step, *theirs]))
        # The stored one's parent follows from the tokens, which are compared.
        return stored_step == replace(sent_step, parent_index=stored_step.parent_index)

    def with_parent(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> PackedStep:
        """Return a step that came with a whole prompt as it is stored: relative to its parent. That
        is the one that it declares, if its prompt begins with that one's tokens; else the longest
        stored step of which this is true. One that declares a parent that has not come yet is
        stored as it is."""
        if step.prompt is None:
            return step
        declared = header.parent_index
        if declared is not None:
            if (parent := record.step(declared)) is None:
                return step
            if self._begins_with(record, step, parent.header):
                return relative(step, parent.header)
        if not header.has_more:
            for base in _with_equal_sums(record, step.prompt, header.step_index):
                if not base.has_more and self._begins_with(record, step, base):
                    return relative(step, base)
        return as_root(step)

    def _begins_with(self, record: TrajectoryRecord, step: PackedStep, base: Header) -> bool:
        prompt, n_bytes = step.prompt or b"", 4 * base.n_tokens
        if len(prompt) < n_bytes:
            return False
        known, pictures = memoryview(prompt)[:n_bytes], step.pictures
        before = [picture for picture in pictures if picture.at < base.n_tokens]
        if crc32(shadow_bytes(known, before) if before else known) != base.crc:
            return False
        chain = self.loaded(record.chain(base.step_index))
        return known == chain_tokens(chain) and before == (
            chain_pictures(chain) if base.flags & PICTURES else []
        )

    # -- bytes -------------------------------------------------------------------------------

    def release(self, steps: Sequence[PackedStep]) -> None:
        """Steps that are dropped."""
        for step in steps:
            if not (self._log.may_spill and step.is_spilled):
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
            if self._log.journal is None:
                raise errors.JournalError("spilled steps cannot be read: the pool has no journal")
            rows = list(dict.fromkeys(step.place[0] for step in spilled))
            loaded = dict(zip(rows, self._log.journal.read(rows), strict=True))
            for step in spilled:
                row, at, size = step.place
                step.payload = loaded[row][at : at + size]
        return copies

    def spill(self, limit: int | None) -> None:
        """Let what came since the last call, which the log has now, leave memory: the newest first,
        down to `limit` bytes (None: any number may stay)."""
        steps, self._log.spillable = self._log.spillable, []
        if limit is None:
            return
        for step, place in reversed(steps):
            if self.memory_bytes <= limit:
                return
            if not step.is_spilled:
                self.memory_bytes -= len(step.payload)
                step.spill(place)


def _with_equal_sums(record: TrajectoryRecord, prompt: Prompt, before: int) -> list[Header]:
    """Return the headers of the steps of a smaller index whose CRC-32 the prompt begins with, the
    longest first. Walks through the prompt once: a trajectory may have hundreds of steps."""
    headers = [s.header for s in record.steps if s.step_index < before]
    headers.sort(key=lambda h: (h.n_tokens, -h.step_index))
    ids, at, crc = memoryview(prompt), 0, 0
    found: list[Header] = []
    for base in headers:
        end = 4 * base.n_tokens
        if end > len(ids):
            break
        crc, at = crc32(ids[at:end], crc), end
        if crc == base.crc:
            found.append(base)
    return found[::-1]
