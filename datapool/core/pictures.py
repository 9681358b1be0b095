"""The pictures of a pool: their bytes, each once for a channel and owner, and the rows that refer
to them.

    put ──► fresh ──a row refers to it──► held ──its last row is deleted──► doomed ──commit──► gone
              └──────────── GRACE_S without a row ────────────────────────────┘

A picture is durable before a row that refers to it, and is there until that row's deletion is.
References belong to rows: an aborted trajectory has no steps any more, and its rows stay. They are
counted from the rows themselves, so that a replay counts them again.

A key is an HMAC of channel, owner and digest: nobody who has a digest of somebody else's picture
can tell whether it is here, and what one user deletes is no other's. Does not own the files
(`store/picture_folder.py`), nor who may read (`channel.py`).
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from stepwell.datapool.errors import DamagedFileError

GRACE_S: Final = 600.0
"""Seconds that a picture waits for the Step that refers to it."""
SWEPT_AT_ONCE: Final = 200
"""Pictures that are removed between two calls: some 10 ms of work."""
SECRET_BYTES: Final = 32
_DIGEST_CHARS: Final = 64


class PictureStore:
    """Bytes of pictures by key, in memory: of a pool that has no journal."""

    in_memory = True

    def __init__(self) -> None:
        self._pictures: dict[str, bytes] = {}
        self._secret = secrets.token_bytes(SECRET_BYTES)

    @property
    def secret(self) -> bytes:
        return self._secret

    def size(self, key: str) -> int:
        """Bytes of a picture; 0: it is not here."""
        return len(self._pictures.get(key, b""))

    def keys(self) -> Collection[str]:
        return self._pictures.keys()

    def put(self, key: str, data: bytes) -> None:
        """
        Raises:
            JournalError: it cannot be written.
        """
        self._pictures[key] = data

    def read(self, key: str) -> bytes:
        """
        Raises:
            DamagedFileError: it is not what was written, or gone.
        """
        try:
            return self._pictures[key]
        except KeyError:
            raise DamagedFileError(f"picture {key} is gone; delete its trajectory") from None

    def remove(self, key: str) -> None:
        self._pictures.pop(key, None)


def references(keys: Mapping[str, str]) -> tuple[str, ...]:
    """Keys by digest, as a row has them."""
    return tuple(digest + key for digest, key in keys.items())


def keys_of(references: Iterable[str]) -> dict[str, str]:
    """Key of each picture that a row refers to, by digest."""
    return {each[:_DIGEST_CHARS]: each[_DIGEST_CHARS:] for each in references}


class _Held:
    """A picture that rows refer to."""

    __slots__ = ("channel", "n_bytes", "n_rows")

    def __init__(self, channel: str, n_bytes: int) -> None:
        self.channel, self.n_bytes, self.n_rows = channel, n_bytes, 0


class PictureReferences:
    """Bytes and references of one pool."""

    def __init__(self) -> None:
        self.store = PictureStore()
        self.n_bytes: Counter[str] = Counter()
        """By channel: bytes of the pictures that rows refer to, each once."""
        self.n_held: Counter[str] = Counter()
        """By channel: number of these pictures."""
        self.doomed: dict[str, None] = {}
        """Keys of pictures that nothing refers to, once what was changed is durable."""
        self._held: dict[str, _Held] = {}
        self.rows: dict[Hashable, tuple[str, ...]] = {}
        """Keys by row of the log; or, without a log, by channel and trajectory."""
        self._fresh: dict[str, tuple[float, str]] = {}
        """Pictures that no row refers to yet: when they came, and for which trajectory."""

    def key(self, channel: str, owner: str, digest: str) -> str:
        named = f"{len(channel)}:{channel}{len(owner)}:{owner}{digest}"
        return hmac.digest(self.store.secret, named.encode(), "sha256").hex()[:32]

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys whose picture is not here."""
        return [key for key in keys if not self.store.size(key)]

    def put(self, key: str, data: bytes, trajectory_uid: str, now: float) -> None:
        """Store a picture for a Step of this trajectory, durably; once more: no-op.

        Raises:
            JournalFullError, JournalError: it cannot be written.
        """
        held = self._held.get(key)
        if not self.store.size(key):
            self.store.put(key, data)
            if held is not None:  # it had been lost
                self.n_bytes[held.channel] += len(data) - held.n_bytes
                held.n_bytes = len(data)
        if held is None:
            self.doomed.pop(key, None)
            self._fresh.pop(key, None)  # the oldest are the first
            self._fresh[key] = now, trajectory_uid

    # -- references --------------------------------------------------------------------------

    def hold(self, channel: str, row: Hashable, keys: Sequence[str]) -> int:
        """Let a row refer to these pictures, and to no others; how many bytes of them no other row
        referred to."""
        before = self.rows.pop(row, ())
        n_new = 0
        for key in keys:
            if (held := self._held.get(key)) is None:
                held = self._held[key] = _Held(channel, self.store.size(key))
                self.n_held[channel] += 1
                self.n_bytes[channel] += held.n_bytes
                n_new += held.n_bytes
                self.doomed.pop(key, None)
                self._fresh.pop(key, None)
            held.n_rows += 1
        if keys:
            self.rows[row] = tuple(keys)
        self._release(before)
        return n_new

    def holds(self, row: Hashable) -> bool:
        return row in self.rows

    def held_by(self, row: Hashable) -> tuple[str, ...]:
        """Keys of the pictures that a row refers to."""
        return self.rows.get(row, ())

    def release(self, rows: Iterable[Hashable]) -> None:
        """These rows are deleted."""
        for row in rows:
            self._release(self.rows.pop(row, ()))

    def _release(self, keys: Iterable[str]) -> None:
        for key in keys:
            held = self._held[key]
            held.n_rows -= 1
            if not held.n_rows:
                del self._held[key]
                self.n_held[held.channel] -= 1
                self.n_bytes[held.channel] -= held.n_bytes
                self.doomed[key] = None

    # -- what nothing refers to --------------------------------------------------------------

    def find_orphans(self, now: float) -> None:
        """Give what is stored and no row refers to its time from now on: after a replay."""
        for key in set(self.store.keys()).difference(self._held, self._fresh):
            self._fresh[key] = now, ""

    def lost(self) -> list[str]:
        """Keys that rows refer to, of pictures that are not here."""
        return self.missing(self._held)

    def forget(self, trajectory_uid: str | None) -> None:
        """Doom what came for a trajectory that is deleted, and has no row yet."""
        meant = [key for key, (_, uid) in self._fresh.items() if uid == trajectory_uid]
        self._doom(meant)

    def expire(self, now: float) -> None:
        """Doom what has waited for `GRACE_S`."""
        while (due := self.next_expiry) is not None and due <= now:
            self._doom([next(iter(self._fresh))])

    @property
    def next_expiry(self) -> float | None:
        """Time at which `expire` may next have something to do; None: never."""
        return next((at + GRACE_S for at, _ in self._fresh.values()), None)

    def _doom(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._fresh[key]
            self.doomed[key] = None

    def sweep(self, at_most: int | None = SWEPT_AT_ONCE) -> None:
        """Remove doomed pictures, some of them. Call when what doomed them is durable.

        Raises:
            OSError: one cannot be removed.
        """
        for key in list(islice(self.doomed, at_most)):
            del self.doomed[key]
            try:
                self.store.remove(key)
            except OSError:
                self.doomed[key] = None  # the last: it holds up no other
                raise
