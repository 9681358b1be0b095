"""Erasure of a trajectory from the rows of a group that goes on.

    row                                            what becomes of it
    ───                                            ──────────────────
    steps of it                                    written anew: an index and a version are left of
                                                   each, and no picture; those of siblings stay
                                                   byte for byte
    a prompt that no step of a sibling begins with   written anew, empty
    opened, completed, aborted                     written anew, without metadata, reward and reason
    reward, mark                                   deleted

A row that is written anew stays in its place, so that a replay goes through the same history: what
made the group ready, and when, comes out as it was. Owns no state and writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from stepwell.datapool import ops
from stepwell.datapool.codec import HOLLOW_BYTES, encoder, hollow
from stepwell.datapool.core.log_rows import Log, PromptStored, StepsStored, read
from stepwell.datapool.core.records import DELETED, GroupRecord
from stepwell.datapool.types import OWNER


class Erasure(NamedTuple):
    """Changes of a group's rows."""

    deleted: tuple[int, ...] = ()
    written: tuple[tuple[int, str, bytes, bytes], ...] = ()
    """Row, kind, head and payload."""

    @classmethod
    def of(cls, log: Log, group: GroupRecord, uids: Collection[str]) -> Erasure:
        """The changes that erase these trajectories of a group.

        Raises:
            JournalError: a row cannot be read.
        """
        deleted: list[int] = []
        written: list[tuple[int, str, bytes, bytes]] = []
        heads = log.heads(group.rows)
        told = [
            (row, kind, *read(kind, head))
            for row, (kind, head) in zip(group.rows, heads, strict=True)
        ]
        # By rows: a sibling that was aborted has no steps any more, and the archive reads its rows.
        stored = [record for *_, record in told if isinstance(record, StepsStored)]
        needed = {row for each in stored for uid, row, _ in each.steps if uid not in uids}
        for row, kind, now, number, record in told:
            payload = b""
            if isinstance(record, StepsStored):
                if not any(uid in uids for uid, _, _ in record.steps):
                    continue
                record, payload = _without(record, uids, log.read([row])[0])
            elif isinstance(record, PromptStored):
                if row in needed:
                    continue
            elif getattr(record, "trajectory_uid", None) not in uids:
                continue
            elif isinstance(record, ops.SetReward | ops.Mark):
                deleted.append(row)
                continue
            elif isinstance(record, ops.OpenTrajectory):
                record = replace(record, metadata=only_owner(record.metadata))
            elif isinstance(record, ops.CompleteTrajectory):
                record = replace(record, reward=None, metadata={})
            elif isinstance(record, ops.AbortTrajectory):
                record = replace(record, reason=DELETED)
            else:
                continue
            written.append((row, kind, encoder.encode((now, number, record)), payload))
        return cls(tuple(deleted), tuple(written))


def only_owner(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without all but the owner, whose nobody else may become."""
    return {name: value for name, value in metadata.items() if name == OWNER}


def _without(
    stored: StepsStored, uids: Collection[str], payload: bytes
) -> tuple[StepsStored, bytes]:
    """A row of steps, hollow where they are of these trajectories. Where siblings have steps in it,
    each stays at its place in the row."""
    is_shared = any(uid not in uids for uid, _, _ in stored.steps)
    steps: list[tuple[str, int | None, int]] = []
    pieces: list[bytes] = []
    at = 0
    for uid, prompt_row, n_bytes in stored.steps:
        piece = payload[at : at + n_bytes]
        at += n_bytes
        if uid in uids:
            piece = hollow(piece, n_bytes if is_shared else HOLLOW_BYTES)
            prompt_row = None
        steps.append((uid, prompt_row, len(piece)))
        pieces.append(piece)
    pictures = {i: own for i, own in stored.pictures.items() if stored.steps[i][0] not in uids}
    return replace(stored, steps=steps, pictures=pictures), b"".join(pieces)
