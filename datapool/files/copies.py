"""Copies of trajectories that a trainer keeps in its run's folder, and the deletion from them.

    RUN/trained/*.jsonl          what optimizer steps were trained on   (`trained.py`)
    RUN/validation/*.jsonl       rollouts of evaluations                (`trainer/samples.py`)
    RUN/rollouts{,.old}.jsonl    rollouts as text                       (`trainer/samples.py`)
    RUN/recordings.jsonl         where batches are recorded             (`trainer/recording.py`)

    trainer     lock ─► write all but what is deleted ─► unlock
    deletion    lock ─► tombstones ─► unlock; look for what names them without the lock;
                for each file that has any: lock ─► write it anew without ─► unlock

A trainer that has a batch when something of it is deleted writes none of that, now or after a
restart: `deleted.jsonl` names it. A deletion that was killed is done by the next one, which takes
out all that tombstones name. Lines that stay are the bytes that they were. A recording of a batch
would no longer replay what was recorded, so it goes whole.

Owns the lock, the tombstones and the list of places. Does not own what the files mean, or weights.
"""

from __future__ import annotations

import fcntl
import glob
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from stepwell.datapool.files.tombstones import DELETED, add_tombstones, read_tombstones, tombstone
from stepwell.datapool.files.trained import TRAINED
from stepwell.datapool.sealed import (
    damaged,
    is_sealed,
    read_lines,
    sealed,
    unsealed,
    written_durably,
)

ROLLOUTS: Final = "rollouts.jsonl"
OLD: Final = "rollouts.old.jsonl"
VALIDATION: Final = "validation"
"""Folder of the evaluations' samples: `step_{n}.jsonl`."""
LOCK: Final = "copies.lock"
RECORDINGS: Final = "recordings.jsonl"
FIELD: Final = "{rollout_id}"
"""Number of the batch in the name of a recording."""
PICTURES: Final = "pictures"
"""Folder of the pictures of recordings, beside them."""
_NAMES: Final = re.compile(rb'"(?:trajectory_uid|prompt_uid|user)":\s*("(?:[^"\\]|\\.)*")')
_REMEDY: Final = "it could still hold what is deleted: remove it, then delete again"


class TrainerCopies:
    """The copies in one run's folder.

    Args:
        run: the folder; what is not there yet is made when it is written.
    """

    def __init__(self, run: Path) -> None:
        self._run = run

    @contextmanager
    def writing(self) -> Iterator[frozenset[str]]:
        """The uids of deleted trajectories: whoever writes copies leaves them out. No more are
        deleted inside the block.

        Raises:
            OSError: the folder cannot be written.
            DamagedFileError: the tombstones are not what was written.
        """
        self._run.mkdir(parents=True, exist_ok=True)
        with open(self._run / LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self.deleted()

    def deleted(self) -> frozenset[str]:
        """The uids of deleted trajectories. Raises DamagedFileError as `writing`."""
        return frozenset(each.value for each in read_tombstones(self._run / DELETED))

    def note_recordings(self, where: Path) -> None:
        """Note where batches are recorded, durably, before one is.

        Args:
            where: path of the files, with `FIELD` in it.

        Raises:
            OSError: it cannot be written.
        """
        with self.writing():
            path, noted = self._run / RECORDINGS, self._recorded()
            if (name := str(where.absolute())) not in noted:
                with written_durably(path) as file:
                    for each in (*noted, name):
                        file.write(sealed(orjson.dumps({"files": each})))

    def delete(
        self, kind: Literal["trajectory", "user"], *values: str, with_groups: bool = False
    ) -> list[str]:
        """Delete trajectories, or all of users; the uids of those that were here. When it returns,
        no file has a byte of them, and none will have: a trainer leaves them out.

        Args:
            with_groups: also all others of their groups.

        Raises:
            DamagedFileError: a file cannot be read, so that it could still hold one.
            OSError: a file cannot be written; delete again.
        """
        if not values:
            return []
        if kind == "trajectory":
            self._add_tombstones(values)
        key = "trajectory_uid" if kind == "trajectory" else "user"
        found = self._find({key: frozenset(values)})
        if with_groups and found:
            found |= self._find({"prompt_uid": frozenset(filter(None, found.values()))})
        self._add_tombstones(found)
        gone = self.deleted()  # also what one who was killed left
        self._remove_drafts()
        for path, has_seals in self._files():
            self._rewrite(path, has_seals, gone)
        self._remove_recordings(gone)
        return list(found)

    def _add_tombstones(self, uids: Collection[str]) -> None:
        with self.writing() as deleted:
            if new := [uid for uid in dict.fromkeys(uids) if uid not in deleted]:
                add_tombstones(self._run / DELETED, [tombstone("trajectory", uid) for uid in new])

    # -- lines -------------------------------------------------------------------------------

    def _files(self) -> Iterator[tuple[Path, bool]]:
        """Files of lines, and whether their lines are sealed."""
        for folder in (TRAINED, VALIDATION):
            for path in sorted((self._run / folder).glob("*.jsonl")):
                yield path, True
        for name in (ROLLOUTS, OLD):  # in this order: a trainer may rename one to the other
            if (self._run / name).is_file():
                yield self._run / name, False

    def _find(self, wanted: Mapping[str, Collection[str]]) -> dict[str, str | None]:
        """The trajectories with a line that has one of these values, and their groups."""
        found: dict[str, str | None] = {}
        marks = {_written(value) for values in wanted.values() for value in values}
        for path, _ in self._files():
            for line in _lines(path):
                if not line.endswith(b"\n") or marks.isdisjoint(_NAMES.findall(line)):
                    continue
                row = _row(path, line)
                if any(row.get(key) in values for key, values in wanted.items()):
                    found[row["trajectory_uid"]] = row.get("prompt_uid")
        return found

    def _rewrite(self, path: Path, has_seals: bool, gone: frozenset[str]) -> None:
        """Write a file anew without what is deleted, if it has any."""
        marks = {_written(uid) for uid in gone}

        def is_meant(line: bytes) -> bool:
            if not line.endswith(b"\n"):
                return True
            if has_seals:
                _check_seal(path, line)
            return not marks.isdisjoint(_NAMES.findall(line))

        if not any(map(is_meant, _lines(path))):  # and nobody adds any of it
            return
        with self.writing():
            if not path.exists():  # the oldest go
                return
            with written_durably(path) as file:
                for line in _lines(path):
                    if not is_meant(line):
                        file.write(line)
                    elif line.endswith(b"\n"):  # else half a line of a writer that was killed
                        file.write(_without(_row(path, line), line, gone))

    def _remove_drafts(self) -> None:
        """Remove what writers that were killed had begun: a live one holds the lock."""
        with self.writing():
            drafts = [*self._run.glob("rollouts*.tmp")]
            for name in (TRAINED, VALIDATION):
                drafts += (self._run / name).glob("*.tmp")
            drafts += [d for where in self._recorded() for d in _matching(where, r"\..*\.tmp")]
            for draft in drafts:
                draft.unlink(missing_ok=True)

    # -- recordings --------------------------------------------------------------------------

    def _recorded(self) -> list[str]:
        path = self._run / RECORDINGS
        found = []
        for at, line in read_lines(path) if path.is_file() else ():
            if line is None:
                remedy = "remove it, and the recordings that a deletion shall reach"
                raise damaged(path, f"the line at byte {at} is not what was written", remedy)
            found.append(str(orjson.loads(line)["files"]))
        return found

    def _recordings(self) -> list[Path]:
        return [path for where in self._recorded() for path in _matching(where)]

    def _remove_recordings(self, gone: frozenset[str]) -> None:
        """Remove the recordings of batches that had a deleted trajectory, and pictures that no
        other recording names."""
        # Without the lock, since there may be hundreds of gigabytes: nobody records any of it now.
        if not (had := [path for path in self._recordings() if _holds(path, gone)]):
            return
        with self.writing():
            every = self._recordings()
            removed = [path for path in had if _holds(path, gone)]  # some may be replaced
            for folder in {path.parent for path in removed}:
                pictures = {picture.stem: picture for picture in (folder / PICTURES).glob("*.png")}
                named: dict[bool, set[str]] = {True: set(), False: set()}
                for path in every if pictures else ():
                    if path.parent == folder:
                        named[path in removed] |= _strings(path.read_bytes(), pictures)
                for digest in named[True] - named[False]:
                    pictures[digest].unlink()
            for path in removed:  # last: one who was killed finds them again
                path.unlink()


def _written(value: str) -> bytes:
    """A value as JSON has it."""
    return orjson.dumps(value)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:  # the oldest go
        return


def _check_seal(path: Path, data: bytes) -> None:
    try:
        unsealed(data)
    except ValueError as e:
        raise damaged(path, str(e), _REMEDY) from e


def _row(path: Path, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = orjson.loads(line)
    except ValueError as e:
        raise damaged(path, f"a line is no JSON: {e}", _REMEDY) from e
    return row


def _without(row: dict[str, Any], line: bytes, gone: Collection[str]) -> bytes:
    """A line without trajectories; the first of a file in `trained/` lists them."""
    if "trajectory_uid" in row:
        return b"" if row["trajectory_uid"] in gone else line
    kept, removed = [], set()
    for each in row["trajectories"]:
        if each["trajectory_uid"] in gone:
            removed.add(each["prompt_uid"])
        else:
            kept.append(each)
    row["trajectories"] = kept
    if "rewards" in row:  # of a group's trajectories, whichever they are
        row["rewards"] = {k: v for k, v in row["rewards"].items() if k not in removed}
    del row["digest"]
    return sealed(orjson.dumps(row))


def _matching(where: str, end: str = "") -> list[Path]:
    """The recordings there.

    Args:
        end: a regular expression of what follows the name.
    """
    name = re.compile(re.escape(where).replace(re.escape(FIELD), r"\d+") + end)
    found = glob.glob(glob.escape(where).replace(FIELD, "[0-9]*") + "*" * bool(end))
    return [Path(path) for path in sorted(found) if name.fullmatch(path)]


def _holds(recording: Path, uids: Collection[str]) -> bool:
    try:
        data = recording.read_bytes()
    except FileNotFoundError:  # another deletion removed it
        return False
    if is_sealed(data):  # else it is slime's own
        _check_seal(recording, data)
    return bool(_strings(data, uids))


def _strings(data: bytes, wanted: Collection[str]) -> set[str]:
    """The texts among `wanted` that are strings in a pickle: each has its length before it."""
    by_length: dict[int, dict[bytes, str]] = {}
    for text in wanted:
        encoded = text.encode()
        by_length.setdefault(len(encoded), {})[encoded] = text
    found = set()
    for n, texts in by_length.items():
        for begin in (b"X" + n.to_bytes(4, "little"), *([bytes((0x8C, n))] if n < 256 else [])):
            at = data.find(begin)
            while at >= 0:
                start = at + len(begin)
                if (same := texts.get(data[start : start + n])) is not None:
                    found.add(same)
                at = data.find(begin, at + 1)
    return found
