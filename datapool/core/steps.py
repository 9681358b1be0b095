"""The steps of a channel: each is stored once, relative to the one it extends.

    step ──► known already? late? beyond the end? ──► other tokens than its base? ──► stored
              "duplicate", "late", StepIndexError      UnknownBaseError: send it whole

Does not own the layout of a step (`codec.py`), where its bytes are (`payloads.py`), nor when a
trajectory begins (`channel.py`).
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from stepwell.datapool import errors
from stepwell.datapool.codec import (
    Header,
    PackedStep,
    PackedTrajectory,
    Prompt,
    as_root,
    chain_tokens,
    relative,
    unpack,
)
from stepwell.datapool.core.payloads import Payloads
from stepwell.datapool.core.records import TrajectoryRecord

MAX_STEP_BYTES = 1 << 30


class StepStore:
    """Checks and packs the steps of one channel.

    Args:
        channel: its name, for messages.
        payloads: the bytes of stored steps.
    """

    def __init__(self, channel: str, payloads: Payloads) -> None:
        self._channel = channel
        self._payloads = payloads

    def header_of(self, uid: str, step: PackedStep) -> Header:
        """Return the header of a step that was sent.

        Raises:
            InvalidStepError: it came without its bytes, or with too many.
        """
        if step.is_spilled or ((header := step.header).base_index < 0) is (step.prompt is None):
            raise errors.InvalidStepError(
                f"a step of trajectory {uid!r} in channel {self._channel!r} is packed without its "
                f"payload, or with {'no' if step.prompt is None else 'a'} prompt, which its base "
                "contradicts; pack it with codec.pack"
            )
        if (n_bytes := len(step.payload) + len(step.prompt or b"")) > MAX_STEP_BYTES:
            raise errors.InvalidStepError(
                f"step {uid!r}[{header.step_index}] in channel {self._channel!r} has {n_bytes} "
                f"bytes; at most {MAX_STEP_BYTES} can be stored, leave something out"
            )
        return header

    def check_index(self, record: TrajectoryRecord, step: Header) -> None:
        """Check the index of a step against the one marked as the last.

        Raises:
            StepIndexError: it contradicts the step that is marked as the last one.
        """
        last, highest = record.last_index, record.max_index
        if last is not None and step.step_index > last:
            why = f"lies beyond the step marked is_last, {last}"
        elif last is not None and step.is_last:
            why = f"is marked is_last, and so is step {last}; mark one"
        elif step.is_last and highest > step.step_index:
            why = f"is marked is_last, but step {highest} is stored; mark the one with the highest"
            why += " step_index"
        else:
            return
        raise errors.StepIndexError(
            f"step {record.trajectory_uid!r}[{step.step_index}] in channel {self._channel!r} {why}"
        )

    def check_base(self, record: TrajectoryRecord, step: Header) -> None:
        """Check that the step which this one is relative to is stored.

        Raises:
            UnknownBaseError: the tokens that it is relative to are not those that are stored.
        """
        if step.base_index >= 0:
            base = record.step(step.base_index)
            if base is None or base.crc != step.base_crc:
                raise self.unknown_base(record.trajectory_uid, step)

    def unknown_base(self, uid: str, step: Header) -> errors.UnknownBaseError:
        return errors.UnknownBaseError(
            f"step {uid!r}[{step.step_index}] in channel {self._channel!r} is packed relative to "
            f"step {step.base}, which is not stored, or with other tokens; send it whole"
        )

    def is_same(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> bool:
        """Return whether a step has the content of the stored one of its index, however it is
        packed.

        Raises:
            UnknownBaseError: as `check_base`.
        """
        self.check_base(record, header)
        ours = self._payloads.read(record.chain(header.step_index))
        if ours[0] == step:
            return True
        theirs = [] if header.base is None else self._payloads.read(record.chain(header.base))
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
            if self._begins_with(record, step.prompt, parent.header):
                return relative(step, parent.header)
        if not header.has_more:
            for base in _with_equal_sums(record, step.prompt, header.step_index):
                if not base.has_more and self._begins_with(record, step.prompt, base):
                    return relative(step, base)
        return as_root(step)

    def _begins_with(self, record: TrajectoryRecord, prompt: Prompt, base: Header) -> bool:
        n_bytes = 4 * base.n_tokens
        if len(prompt) < n_bytes or crc32(known := memoryview(prompt)[:n_bytes]) != base.crc:
            return False
        return known == chain_tokens(self._payloads.loaded(record.chain(base.step_index)))


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
