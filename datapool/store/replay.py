"""What the journal holds, made into the state of a pool again.

    rows of live groups, in order ──► the same methods that wrote them ──► Channel
    "closed", "ended"             ──► the memory of what is gone
    states                        ──► counts, as they were, over what the replay counted

While a channel replays it judges, drops and refuses nothing: what was dropped then has no rows any
more. Afterwards the limits and filters of today apply.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.core.channel import Channel
from stepwell.datapool.core.leases import POOL, LeaseRecord
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.core.records import Closing, GroupTerms, Log
from stepwell.datapool.errors import DataPoolError, ReplayError
from stepwell.datapool.selection import Marks

COUNTS = "channel/"
LEASES = "leases"
WHOLE_POOL = "pool"
DAMAGE = (
    DataPoolError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
    EOFError,
    pickle.PickleError,
)
"""What rows and states raise that this release did not write, or not in this order."""
ROWS_BETWEEN_SPILLS = 1024


class LoggedRow(Protocol):
    """A row of the log, as `journal.Row`."""

    @property
    def row(self) -> int: ...
    @property
    def channel(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def head(self) -> bytes: ...
    @property
    def payload(self) -> bytes | None: ...


def restore(
    pool: DataPool,
    log: Log,
    rows: Iterable[LoggedRow],
    states: Mapping[str, bytes],
    load: Callable[[Sequence[int]], Sequence[bytes]],
) -> int:
    """Make an empty pool what the log says; from then on it writes there, and reads payloads back
    with `load`. Returns how many rows there were.

    Raises:
        ReplayError: a row cannot follow the ones before it.
    """
    names = [key.removeprefix(COUNTS) for key in states if key.startswith(COUNTS)]
    channels = {name: _Replay(pool.channel(name)) for name in (*pool.channels, *names)}
    for channel in pool.channels.values():
        channel.replaying = True
    n_rows = 0
    for n_rows, row in enumerate(rows, start=1):
        try:
            head = pickle.loads(row.head)
            if row.channel == POOL:
                _restore_lease(pool, row, head)
            else:
                channels[row.channel].apply(row, head)
        except DAMAGE as e:
            raise ReplayError(
                f"journal row {row.row} ({row.kind} in channel {row.channel!r}) does not follow "
                f"from those before it ({type(e).__name__}: {e}); keep the folder for analysis "
                "and start with an empty journal_dir"
            ) from e
        if n_rows % ROWS_BETWEEN_SPILLS == 0:
            pool.written()
    pool.written()
    _restore_states(pool, states)
    pool.attach(log, load)
    for channel in pool.channels.values():
        channel.replaying = False
        channel.judge_all()
    return n_rows


def _restore_states(pool: DataPool, states: Mapping[str, bytes]) -> None:
    for key, state in states.items():
        try:
            if key == LEASES:
                pool.leases.restore_counts(state)
            elif key == WHOLE_POOL:
                pool.restore_state(state)
            elif key.startswith(COUNTS):
                pool.channels[key.removeprefix(COUNTS)].restore_counts(state)
        except DAMAGE as e:
            raise ReplayError(
                f"journal state {key!r} is not what this release writes "
                f"({type(e).__name__}: {e}); start the release that wrote it, or with an empty "
                "journal_dir"
            ) from e


def _restore_lease(pool: DataPool, row: LoggedRow, head: tuple[Any, ...]) -> None:
    if row.kind == "lease":
        lease_id, channel, prompt_uids, expires_at, request_id = head
        pool.leases.restore(
            LeaseRecord(lease_id, channel, prompt_uids, expires_at, request_id, row.row)
        )
    else:
        lease_id, how = head
        pool.leases.restore_ended(lease_id, how, row.row)


class _Replay:
    """Applies the rows of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._prompts: dict[int, bytes] = {}
        self._kinds: dict[str, Callable[..., str]] = {
            "group": self._group,
            "trajectory": self._trajectory,
            "step": self._step,
            "complete": self._complete,
            "abort": self._abort,
            "due": self._due,
            "reward": self._reward,
            "mark": self._mark,
            "wait": self._wait,
            "retire": self._retire,
            "lease": self._lease,
            "return": self._return,
        }

    def apply(self, row: LoggedRow, head: tuple[Any, ...]) -> None:
        channel = self._channel
        if row.kind == "closed":
            prompt_uid, how, closings = head
            channel.recall(prompt_uid, how, {uid: Closing(*c) for uid, c in closings.items()})
            channel.keep_closed_row(row.row)
        elif row.kind == "prompt":
            # Its group may begin with the very step that brought the prompt.
            self._prompts[row.row] = row.payload or b""
        else:
            prompt_uid = self._kinds[row.kind](row, *head)
            channel.prompt_groups[prompt_uid].rows.append(row.row)

    def _group(
        self,
        _: LoggedRow,
        uid: str,
        terms: tuple[Any, ...],
        metadata: dict[str, Any],
        *at: Any,
    ) -> str:
        self._channel.replay_at(*at)
        self._channel.open_group(uid, GroupTerms(*terms), metadata)
        return uid

    def _trajectory(
        self,
        _: LoggedRow,
        uid: str,
        prompt_uid: str,
        attempt: int,
        metadata: dict[str, Any],
        *at: Any,
    ) -> str:
        self._channel.replay_at(*at)
        self._channel.open_trajectory(uid, prompt_uid, attempt, metadata)
        return prompt_uid

    def _step(self, row: LoggedRow, *head: Any) -> str:
        *fields, prompt_row, now, number = head
        self._channel.replay_at(now, number)
        prompt = None if prompt_row is None else self._prompts[prompt_row]
        step = PackedStep._make((*fields, prompt, row.payload or b""))
        self._channel.submit(step)
        self._channel.adopt(step, row.row, prompt_row)
        return step.prompt_uid

    def _complete(
        self, _: LoggedRow, uid: str, reward: float | None, metadata: dict[str, Any]
    ) -> str:
        self._channel.complete_trajectory(uid, reward, metadata)
        return self._prompt_of(uid)

    def _abort(self, _: LoggedRow, uid: str, reason: str, will_retry: bool) -> str:
        self._channel.abort_trajectory(uid, reason, will_retry)
        return self._prompt_of(uid)

    def _due(self, _: LoggedRow, uid: str) -> str:
        self._channel.close_by_deadline(self._channel.prompt_groups[uid])
        return uid

    def _reward(self, _: LoggedRow, uid: str, reward: float, step_index: int | None) -> str:
        self._channel.set_reward(uid, reward, step_index)
        return self._prompt_of(uid)

    def _mark(self, _: LoggedRow, uid: str, trajectory_uid: str | None, marks: Marks) -> str:
        group = self._channel.prompt_groups[uid]
        record = None if trajectory_uid is None else group.trajectories[trajectory_uid]
        self._channel.put_marks(group, record, marks)
        return uid

    def _wait(self, _: LoggedRow, uid: str, until: float) -> str:
        self._channel.prompt_groups[uid].reward_due = until
        return uid

    def _retire(self, _: LoggedRow, uid: str, reason: str) -> str:
        self._channel.prompt_groups[uid].retired = reason
        return uid

    def _lease(self, _: LoggedRow, uid: str, excluded: tuple[str, ...], n_asked: int) -> str:
        group = self._channel.prompt_groups[uid]
        group.n_asked = n_asked
        self._channel.begin_lease(group, excluded)
        return uid

    def _return(self, _: LoggedRow, uid: str) -> str:
        self._channel.give_back(uid)
        return uid

    def _prompt_of(self, trajectory_uid: str) -> str:
        return self._channel.trajectory_index[trajectory_uid].prompt_uid
