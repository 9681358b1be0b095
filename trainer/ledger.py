"""The ledger of prompts: what became of every prompt that was handed out, in a file that is only
ever appended to. It proves, over any number of kills, that none was skipped and none trained twice.

    runs/NAME/checkpoints/ledger.jsonl      one object per line, each with its `digest`
      {"event":"issued","prompt_uid":"p7-ab12","instance_id":"p7","channel":"train"}
      {"event":"trained","update":12,"prompt_uids":["p7-ab12"]}
      {"event":"dropped","prompt_uid":"p8-cd34","reason":"deadline","returned":true}
      {"event":"resumed","update":10,"offset":4711}

A prompt's way::

    issued ──► trained at update u
       │
       └─────► dropped (reason) ──returned──► issued again, under a new prompt_uid

A checkpoint remembers how long the ledger was (`offset`). A process that resumes from it says so,
and what was written between that offset and the word `resumed` belongs to a history that was lost:
readers leave it out. Worked example: 10 prompts trained, checkpoint at offset 900, 4 more trained,
kill. The next process writes {"event":"resumed","offset":900}; the 4 are issued and trained again,
and `audit` counts each once.

Owns the file and the audit. Does not own what is issued again (`reclaim.py`, `rollout/`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from stepwell.datapool.sealed import damaged, read_lines, sealed
from stepwell.datapool.types import TRAIN
from stepwell.trainer.errors import CheckpointError

LEDGER = "ledger.jsonl"
NOT_TRAINED = "not_trained"
"""Leased and acked, but in no update: unscored, or filtered."""


class Ledger:
    """Writes the ledger at `path`; None keeps it in memory only, for benches and tests.

    What is written survives the death of the process at once, that of the machine since the last
    `sync`. Not thread-safe but for `sync`.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._fd: int | None = None
        self._offset = 0
        self._open: dict[str, str] = {}
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError as e:
                raise CheckpointError(f"{path} cannot be written ({e}); fix run.dir") from e
            self._offset = os.fstat(self._fd).st_size
            if self._offset and not path.read_bytes().endswith(b"\n"):
                self._append(b"\n")  # the machine died in the middle of a line

    @property
    def offset(self) -> int:
        """Bytes written so far: what a checkpoint remembers."""
        return self._offset

    @property
    def open(self) -> Collection[str]:
        """prompt_uids that were issued and have neither been trained nor dropped."""
        return self._open.keys()

    def issued(self, prompt_uid: str, instance_id: str, channel: str = TRAIN) -> None:
        """The source of `channel` handed out `instance_id`, to become group `prompt_uid`."""
        self._open[prompt_uid] = instance_id
        self._write(event="issued", prompt_uid=prompt_uid, instance_id=instance_id, channel=channel)

    def trained(self, update: int, prompt_uids: Iterable[str]) -> None:
        """These groups were trained in optimizer step `update`."""
        uids = sorted(prompt_uids)
        for uid in uids:
            self._open.pop(uid, None)
        self._write(event="trained", update=update, prompt_uids=uids)

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Before their checkpoint: those of these groups that no update used are dropped."""
        for uid in prompt_uids:
            self.dropped(uid, NOT_TRAINED)

    def dropped(self, prompt_uid: str, reason: str, *, returned: bool = False) -> None:
        """The group will not be trained. No-op if it has ended already or is not of this ledger,
        unless its prompt is issued again all the same: `audit` must see that.

        Args:
            returned: the prompt went back to the source, to be issued again.
        """
        if self._open.pop(prompt_uid, None) is not None or returned:
            self._write(event="dropped", prompt_uid=prompt_uid, reason=reason, returned=returned)

    def resume(self, update: int, offset: int) -> None:
        """Go on from a checkpoint: what was written after `offset` did not happen.

        Raises:
            CheckpointError: the ledger is shorter than `offset`.
            DamagedFileError: it is damaged before it.
        """
        if offset > self._offset:
            raise CheckpointError(
                f"{self._path} has {self._offset} bytes, but the checkpoint of update {update} was "
                f"written when it had {offset}; restore the file, or resume from an older "
                "checkpoint"
            )
        self._write(event="resumed", update=update, offset=offset)
        if self._path is None:
            return
        self._open.clear()
        for entry in read_ledger(self._path):
            match entry["event"]:
                case "issued":
                    self._open[entry["prompt_uid"]] = entry["instance_id"]
                case "trained":
                    for uid in entry["prompt_uids"]:
                        self._open.pop(uid, None)
                case "dropped":
                    self._open.pop(entry["prompt_uid"], None)

    def adopt(self, folder: Path, offset: int) -> int:
        """The run starts from a checkpoint of another run, in `folder`: this ledger begins with the
        first `offset` bytes of the other, in place of what the run began before and has no
        checkpoint of. Returns what to `resume` at."""
        other = folder / LEDGER
        if self._path is None or self._fd is None:
            return offset
        begin = b""
        if other.is_file():
            with other.open("rb") as file:
                begin = file.read(offset)
        with self._path.open("rb") as own:
            has_it = own.read(len(begin)) == begin
        if not has_it:
            os.ftruncate(self._fd, 0)
            self._offset = 0
            self._append(begin)
        return len(begin)

    def ended(self) -> set[str]:
        """prompt_uids that were trained or dropped, by the history that counts. Reads the file."""
        found: set[str] = set()
        for entry in [] if self._path is None else read_ledger(self._path):
            if entry["event"] == "trained":
                found.update(entry["prompt_uids"])
            elif entry["event"] == "dropped":
                found.add(entry["prompt_uid"])
        return found - self._open.keys()

    def sync(self) -> None:
        """Make it survive a power failure; any thread."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _write(self, **entry: Any) -> None:
        self._append(sealed(orjson.dumps(entry)))

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            return
        try:
            # One call per line: a kill comes before it or after it.
            written = os.write(self._fd, line)
        except OSError as e:
            raise CheckpointError(f"{self._path} cannot be written ({e}); free space") from e
        if written != len(line):
            raise CheckpointError(f"{self._path} took {written} of {len(line)} bytes; free space")
        self._offset += written


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The entries that count, in order: without those of histories that were lost to a kill.

    Raises:
        DamagedFileError: a line that counts is damaged.
    """
    entries: list[tuple[int, dict[str, Any] | None]] = []
    for offset, line in read_lines(path):
        entry = None if line is None else orjson.loads(line)
        if entry is not None and entry["event"] == "resumed":
            while entries and entries[-1][0] >= entry["offset"]:
                entries.pop()
        entries.append((offset, entry))
    counted: list[dict[str, Any]] = []
    for offset, entry in entries:
        if entry is None:
            raise damaged(
                path,
                f"the line at byte {offset} is not what was written",
                "put the file back, resume from a checkpoint before that byte (run.resume), or "
                "start over: run.resume=never",
            )
        counted.append(entry)
    return counted


@dataclass(frozen=True, slots=True)
class Audit:
    """Audit of a ledger. `skipped` and `doubled` are empty, or the run is not what it claims."""

    draws: tuple[str, ...]
    """instance_ids in the order in which the source handed them out, returned ones counted once."""
    trained: int
    dropped: Counter[str]
    """Groups by reason, returned ones included."""
    returned: int
    """Dropped groups whose prompt was issued again or waits for it."""
    in_flight: tuple[str, ...]
    """prompt_uids that have been issued and have not ended."""
    waiting: tuple[str, ...]
    """instance_ids that were returned and not issued again yet."""
    doubled: tuple[str, ...]
    """prompt_uids that were trained twice, trained after their drop, issued again after they were
    trained, or trained unissued; instance_ids that were trained more often than drawn."""
    skipped: tuple[str, ...] = ()
    """instance_ids that the source should have handed out and did not (needs `order`)."""
    updates: dict[int, int] = field(default_factory=dict)
    """Optimizer step -> groups trained in it."""


def audit(path: Path, order: Sequence[str] | None = None, channel: str = TRAIN) -> Audit:
    """Read the ledger at `path` and settle every account of `channel`.

    Args:
        order: instance_ids in the order in which the source hands them out. The draws must be its
        beginning: one that is missing was skipped, one that comes again was doubled.

    Raises:
        DamagedFileError: the ledger is damaged.
    """
    issued: dict[str, str] = {}
    ended: dict[str, str] = {}
    returned: Counter[str] = Counter()
    draws: list[str] = []
    times_trained: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    updates: Counter[int] = Counter()
    doubled: list[str] = []
    n_returned = 0
    others: set[str] = set()
    for entry in read_ledger(path):
        match entry["event"]:
            case "issued":
                uid, instance = entry["prompt_uid"], entry["instance_id"]
                if entry.get("channel", TRAIN) != channel:
                    others.add(uid)
                    continue
                issued[uid] = instance
                if returned[instance]:
                    returned[instance] -= 1
                else:
                    draws.append(instance)
            case "trained":
                for uid in entry["prompt_uids"]:
                    if uid in others:
                        continue
                    if uid in ended or uid not in issued:
                        doubled.append(uid)
                    ended[uid] = "trained"
                    times_trained[issued.get(uid, uid)] += 1
                    updates[entry["update"]] += 1
            case "dropped":
                uid = entry["prompt_uid"]
                if uid in others:
                    continue
                if uid in ended:
                    doubled.append(uid)
                ended[uid] = entry["reason"]
                dropped[entry["reason"]] += 1
                if entry["returned"]:
                    n_returned += 1
                    returned[issued.get(uid, uid)] += 1
    drawn = Counter(draws)
    doubled += [i for i, n in times_trained.items() if i in drawn and n > drawn[i]]
    skipped: list[str] = []
    if order is not None:
        expected = Counter(order[: len(draws)])
        skipped = sorted((expected - drawn).elements())
        doubled += sorted((drawn - expected).elements())
    return Audit(
        draws=tuple(draws),
        trained=sum(times_trained.values()),
        dropped=dropped,
        returned=n_returned,
        in_flight=tuple(uid for uid in issued if uid not in ended),
        waiting=tuple(returned.elements()),
        doubled=tuple(doubled),
        skipped=tuple(skipped),
        updates=dict(updates),
    )
