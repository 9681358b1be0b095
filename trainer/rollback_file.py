"""This module passes the request for a roll-back from a command to the trainer, so that both find
it in the run's folder.

    command ── rollback.json, locked while it waits ──► trainer, which looks several times a second
       ▲                                                   │
       └────────── rollback-answer.json ◄── rolled back ───┘

The lock is `flock`: what a command that was killed had asked for is not done. Owns both files.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.datapool.sealed import read_sealed, sealed_json

REQUEST = "rollback.json"
ANSWER = "rollback-answer.json"
LOOK_S = 0.1
_REMEDY = "delete it and ask again (`stepwell rollback`)"


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    to: int | None
    """None: the version before."""


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    version: int | None = None
    weights_of: int | None = None
    error: str | None = None


class RollBackFile:
    """Both files of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._request = folder / REQUEST
        self._answer = folder / ANSWER

    @contextmanager
    def asked(self, to: int | None) -> Iterator[Callable[[], Answer | None]]:
        """Ask; the value gives the answer once there is one.

        Raises:
            BlockingIOError: another command asks.
        """
        request = Request(uuid.uuid4().hex, to)
        draft = self._request.with_name(f".{REQUEST}-{request.id}")
        with draft.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(sealed_json(asdict(request)))
            file.flush()
            try:
                if self._waits():
                    raise BlockingIOError("another roll-back is under way")
                os.replace(draft, self._request)
                yield lambda: self._read(request)
            finally:
                draft.unlink(missing_ok=True)
                if (now := self._read_request()) is not None and now.id == request.id:
                    self._request.unlink(missing_ok=True)

    def taken(self) -> Request | None:
        """What somebody asks for and waits for."""
        request = self._read_request()
        if request is None:
            return None
        waits = self._waits()
        self._request.unlink(missing_ok=True)
        return request if waits else None

    def answer(self, request: Request, **answer: int | str) -> None:
        draft = self._answer.with_name(f".{ANSWER}")
        draft.write_bytes(sealed_json({"id": request.id, **answer}))
        os.replace(draft, self._answer)

    def _waits(self) -> bool:
        try:
            with self._request.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _read_request(self) -> Request | None:
        try:
            return Request(**read_sealed(self._request, _REMEDY))
        except FileNotFoundError:
            return None

    def _read(self, request: Request) -> Answer | None:
        try:
            answer = Answer(**read_sealed(self._answer, _REMEDY))
        except FileNotFoundError:
            return None
        return answer if answer.id == request.id else None


def wait_for(answer: Callable[[], Answer | None], alive: Callable[[], bool]) -> Answer | None:
    """The answer; None: whoever is asked has ended without one."""
    while True:
        lives = alive()  # before the look: it may answer as its last act
        if (found := answer()) is not None or not lives:
            return found
        time.sleep(LOOK_S)
