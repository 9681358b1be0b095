"""This module answers what the pages ask, out of the pool and the run's folder.

    /ui/api/groups …  ──► Dashboard.groups …  ──► DataPoolClient: a page of a listing
    /ui/api/live      ──► Live ──► Dashboard.tick ──► statistics, events, alerts

Answers are plain values, ready to be JSON. Every listing is a page with a cursor, so what a page
costs does not grow with what is stored. Owns no data. Does not own HTTP (`router.py`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypedDict, Unpack

import orjson
from pydantic import ValidationError

from stepwell.datapool.branches import parents
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import (
    DamagedFileError,
    DataPoolError,
    InvalidRequestError,
    SelectionError,
    TrajectoryClosedError,
    UnknownTrajectoryError,
)
from stepwell.datapool.files.archive.conversations import ends_texts
from stepwell.datapool.files.archive.lookup import Located, locate, why_closed
from stepwell.datapool.files.trained import with_rewards
from stepwell.datapool.inspect.events import Event
from stepwell.datapool.inspect.pages import ExportedTrajectory, GroupRow, Page, TrajectoryRow
from stepwell.datapool.ops import Mark
from stepwell.datapool.questions import ReadDeparted, ReadEnds
from stepwell.datapool.selection import Marks
from stepwell.datapool.selection.built_in import FILTERS, ORDERS, read_name
from stepwell.datapool.types import TRAIN, Trajectory
from stepwell.gateway.dialects.params import refusal
from stepwell.gateway.errors import RequestError, UnknownItemError
from stepwell.gateway.pool_access import PoolAccess
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.ui.alerts import Recent, alerts
from stepwell.gateway.ui.comparison import MOST_RUNS, Comparison
from stepwell.gateway.ui.live import Live
from stepwell.gateway.ui.run_folder import RunFolder
from stepwell.gateway.ui.trajectories import last_words, prefixes, said, shown, tokens

if TYPE_CHECKING:
    from stepwell.datapool.files.archive.reader import ArchiveReader
    from stepwell.datapool.files.tombstones import Tombstone

PAGE: Final = 100
EVENTS_A_TICK: Final = 200
EVENTS_A_PAGE: Final = 1000
MOST_TRIED: Final = 2000
"""Ready groups of a dry run: some 0.3 ms each, during which the pool answers nobody else."""
LISTED: Final = 1000
MOST_SORTED: Final = 2000
"""Newest trajectories of the pool that are looked through for a search or an order: some 20 µs of
the pool each, of a search some 50 µs."""
MOST_GROUPS: Final = 500
"""Newest groups of the pool that are, likewise: some 20 µs for each of their trajectories."""
MOST_SHOWN: Final = 64
"""Trajectories of an archived group that are laid side by side."""
LAST_RECORDS: Final = 20
"""Optimizer steps that the lag histogram sums up."""

_Row: TypeAlias = Mapping[str, Any]
_Orders: TypeAlias = Mapping[str, Callable[[_Row], Any]]


def _lower(name: str) -> Callable[[_Row], str | None]:
    return lambda row: None if row[name] is None else row[name].lower()


def _marked(row: _Row) -> str | None:
    """Marks as lists show them."""
    marks: Marks = row["marks"]
    said = {True: ["trainable"], False: ["not trainable"], None: []}[marks.trainable]
    return " ".join([*said, *sorted(marks.tags), marks.note or ""]).strip() or None


_TRAJECTORY_ORDERS: Final[_Orders] = {
    "time": itemgetter("opened_at"),
    "reward": itemgetter("reward"),
    "turns": itemgetter("n_steps"),
    "tokens": itemgetter("n_unique_tokens"),
    "version": itemgetter("newest_version"),
    "state": lambda row: (row["state"], row["reason"] or ""),
    "group": itemgetter("group_state"),
    "attempt": itemgetter("attempt"),
    "marks": _marked,
    "first": _lower("first"),
    "last": _lower("last"),
    "uid": itemgetter("trajectory_uid"),
    "prompt": itemgetter("prompt_uid"),
}
_GROUP_ORDERS: Final[_Orders] = {
    "time": itemgetter("opened_at"),
    "first": _lower("first"),
    "state": itemgetter("state"),
    "rollouts": itemgetter("n_complete"),
    "reward": itemgetter("reward_mean"),
    "spread": itemgetter("reward_std"),
    "version": itemgetter("newest_version"),
    "turns": itemgetter("n_steps"),
    "tokens": itemgetter("n_tokens"),
    "delivery": itemgetter("delivery"),
    "marks": _marked,
    "why": itemgetter("reason"),
    "prompt": itemgetter("prompt_uid"),
}
_EVENT_ORDERS: Final[_Orders] = {
    "time": itemgetter("time"),
    "first": _lower("first"),
    "uid": itemgetter("trajectory_uid"),
    "kind": itemgetter("kind"),
    "reason": lambda row: row["data"].get("reason"),
    "complete": lambda row: row["data"].get("complete"),
    "returned": lambda row: bool(row["data"].get("returned")),
    "prompt": itemgetter("prompt_uid"),
}
"""Values that lists are sorted by; the archive's are `catalogue.ORDERS`."""


class Wanted(TypedDict):
    """The page of a list of the pool that somebody asks for."""

    channel: str
    cursor: str | None
    search: str | None
    """Words that its texts must have."""
    order: str | None
    ascending: str | None
    """Any text: the smallest first."""
    filters: Mapping[str, Any]


class _Found(NamedTuple):
    """A trajectory that somebody looks at: of the pool, of the archive, or of a sample."""

    trajectory: Trajectory
    columns: Sequence[Mapping[str, Any]] | None
    """Columns that the trainer computed, by step; None: it is shown as the pool has it."""
    channel: str | None
    """Channel of the pool that it is in; None: it is not from the pool."""
    step: int | None
    """The optimizer step that trained on it."""
    archived: dict[str, Any] | None = None
    """The archive's row of it, with its `fate` and late `feedback`."""


class Dashboard:
    """The data that the dashboard of one gateway shows.

    Args:
        statistics: the gateway's own figures.
        running: how many calls of a trajectory are generated now.
        folder: of the run; None: this gateway knows none.
        archive: folder of what left the pool; None: there is none.
        read_only: the run is over; nothing can be marked.
    """

    def __init__(
        self,
        pool_access: PoolAccess,
        tokenizer: ChatTokenizer,
        *,
        statistics: Callable[[], dict[str, Any]],
        running: Callable[[str], int],
        folder: Path | None,
        archive: Path | None,
        read_only: bool,
    ) -> None:
        self.pool, self.ask = pool_access.pool, pool_access.ask
        self.read_only = read_only
        self.live = Live(self.tick)
        self._statistics, self._running = statistics, running
        self._folder = None if folder is None else RunFolder(folder)
        self._archive = archive
        self._comparison = None if folder is None else Comparison(folder)
        self._decode = tokenizer.decode
        self._text_of = lru_cache(1 << 16)(tokenizer.token_text)
        self._recent = Recent()
        self._cursor: str | None = None
        """Cursor behind the events that the last tick has seen."""

    # -- the run -----------------------------------------------------------------------------

    async def about(self) -> dict[str, Any]:
        """Facts that stay as they are while a page is open."""
        run = {} if self._folder is None else await asyncio.to_thread(self._folder.run)
        return {
            "run": run,
            "read_only": self.read_only,
            "has_archive": self._archive is not None,
            "channels": list(await self.ask(self.pool.get_statistics())),
            "filters": [name for name, rule in FILTERS.items() if callable(rule)],
            "orders": list(ORDERS),
        }

    async def tick(self) -> bytes:
        """JSON that every page is sent each second."""
        said: dict[str, Any] = {"at": time.time(), "gateway": self._statistics(), "pool": None}
        said["is_over"] = self.read_only
        unrecorded = said["gateway"]["recording"]["unrecorded"]
        stored = said["gateway"]["calls"].get("stored", 0)
        said["calls"] = self._recent.of_calls(stored, unrecorded, said["at"])
        try:
            said["pool"] = await self.ask(self.pool.get_statistics())
            if not self.read_only:
                said["shards"] = await self.ask(self.pool.describe())
            is_first = self._cursor is None
            events, self._cursor = await self._events(self._cursor)
            self._recent.add(events)
            # What happened before is asked for by the page that shows it.
            said["events"] = [] if is_first else events[-EVENTS_A_TICK:]
            said["recent"] = self._recent.of_channels(said["pool"], said["at"])
        except DataPoolError as e:
            said["pool_error"] = str(e)
        if self._folder is not None:
            try:
                steps = await asyncio.to_thread(self._folder.steps)
                last = await asyncio.to_thread(self._folder.records, steps[-1:])
            except DamagedFileError as e:  # of gateway and pool the pages are told all the same
                said["metrics_error"] = str(e)
            else:
                said |= {"metrics": last[0] if last else None, "optimizer_steps": len(steps)}
            said["metrics_age_s"] = await asyncio.to_thread(self._folder.metrics_age_s)
        said["alerts"] = self._recent.dated(alerts(said), said["at"])
        return as_json(said)

    async def metrics(self, key: Sequence[str]) -> dict[str, Any]:
        """Curves of the run, and how far behind the tokens of its last steps were."""
        if self._folder is None:
            return {"series": {}, "keys": [], "lag": []}
        folder = self._folder
        last = await asyncio.to_thread(lambda: folder.records(folder.steps()[-LAST_RECORDS:]))
        judged = await asyncio.to_thread(lambda: folder.records(folder.evaluated()[-1:]))
        lag: dict[str, float] = {}
        for record in last:
            for metric, n in record.items():
                if metric.startswith("off_policy/lag_") and metric.endswith("/tokens"):
                    name = metric.split("/")[1].removeprefix("lag_")
                    lag[name] = lag.get(name, 0.0) + (n or 0.0)
        both = (*last, *judged)
        numeric = {k for r in both for k, v in r.items() if isinstance(v, int | float)}
        return {
            "series": await asyncio.to_thread(folder.series, key),
            "keys": sorted(numeric),
            "lag": sorted(lag.items(), key=lambda item: (_least(item[0]), item[0])),
        }

    async def runs(self) -> dict[str, Any]:
        """Names of the folders of runs beside this one's, which can be compared."""
        if self._comparison is None:
            return {"this": None, "runs": [], "most": MOST_RUNS}
        names = await asyncio.to_thread(self._comparison.names)
        this = self._comparison.folder.name
        return {"this": this if this in names else next(iter(names), None), "runs": names} | {
            "most": MOST_RUNS
        }

    async def compare(self, run: Sequence[str], key: Sequence[str]) -> dict[str, Any]:
        """Curves of these runs, and the figures that they have."""
        if self._comparison is None:
            raise UnknownItemError("this gateway knows no run's folder", "run")
        curves = await asyncio.to_thread(self._comparison.curves, run, key)
        return {"runs": curves, "keys": await asyncio.to_thread(self._comparison.keys, run)}

    async def compare_csv(self, run: Sequence[str], key: Sequence[str]) -> str:
        """Every optimizer step of these runs, as CSV."""
        if self._comparison is None:
            raise UnknownItemError("this gateway knows no run's folder", "run")
        return await asyncio.to_thread(self._comparison.as_csv, run, key)

    async def batches(
        self, cursor: int | None, order: str | None, ascending: str | None
    ) -> dict[str, Any]:
        """Optimizer steps, the newest first, page by page, and which of them have a sample; or the
        first ones of the `MOST_SORTED` newest in order of a metric (`looked` says of how many, if
        there are more)."""
        if self._folder is None:
            return {"items": [], "cursor": None, "looked": None}
        steps = await asyncio.to_thread(self._folder.steps)
        sampled = set(await asyncio.to_thread(self._folder.sampled))
        is_newest = order in (None, "step") and not ascending
        older = [s for s in steps if cursor is None or s < cursor]
        page = older[: -(PAGE if is_newest else MOST_SORTED) - 1 : -1]
        records = await asyncio.to_thread(self._folder.records, page)
        items = [record | {"sampled": record["step"] in sampled} for record in records]
        is_last = len(older) == len(page)
        if is_newest:
            return {"items": items, "cursor": None if is_last else page[-1], "looked": None}
        known = sorted({name for item in items for name in item})
        if items and order not in (None, *known):
            raise RequestError(f"order is {order!r:.80}; there are {', '.join(known)}", "order")

        def value(row: _Row) -> float | None:
            found = row.get(order or "step")
            return found if isinstance(found, int | float) else None

        items = _in_order(items, value, descending=not ascending)[:PAGE]
        return {"items": items, "cursor": None, "looked": None if is_last else len(page)}

    async def batch(self, step: int | None) -> dict[str, Any]:
        """One optimizer step: its metrics, and the sample of what it was trained on."""
        record = about = None
        if self._folder is not None and step is not None:
            record = await asyncio.to_thread(self._folder.record, step)
            about = await asyncio.to_thread(self._folder.about, step)
        if record is None and about is None:
            raise UnknownItemError(f"step is {step}, which this run has no record of", "step")
        return {"step": step, "record": record, "sample": about}

    # -- listings ----------------------------------------------------------------------------

    async def groups(self, **wanted: Unpack[Wanted]) -> dict[str, Any]:
        """Groups with the first message of each, as `_listed`."""
        channel, filters = wanted["channel"], wanted["filters"]

        async def read(cursor: str | None, limit: int) -> Page[GroupRow]:
            listed = self.pool.list_groups(channel, cursor, limit, newest_first=True, **filters)
            page = await self.ask(listed)
            if self._folder is None:
                return page
            rows = await asyncio.to_thread(with_rewards, self._folder.path, page.items)
            return Page(tuple(rows), page.cursor)

        return await self._listed(read, _GROUP_ORDERS, MOST_GROUPS, wanted)

    async def trajectories(self, **wanted: Unpack[Wanted]) -> dict[str, Any]:
        """Trajectories with what was said first and last in each, as `_listed`."""
        channel, filters = wanted["channel"], wanted["filters"]

        async def read(cursor: str | None, limit: int) -> Page[TrajectoryRow]:
            return await self.ask(
                self.pool.list_trajectories(channel, cursor, limit, newest_first=True, **filters)
            )

        return await self._listed(read, _TRAJECTORY_ORDERS, MOST_SORTED, wanted)

    async def _listed(
        self,
        read: Callable[[str | None, int], Awaitable[Page[GroupRow] | Page[TrajectoryRow]]],
        orders: _Orders,
        most: int,
        wanted: Wanted,
    ) -> dict[str, Any]:
        """Rows of the pool with their texts, the newest first, page by page. With a search or
        another order: the first ones of the `most` newest that pass the filters; `looked` says of
        how many, if there are more."""
        channel, cursor, search = wanted["channel"], wanted["cursor"], wanted["search"]
        order, ascending = wanted["order"], wanted["ascending"]
        value = _order_of(orders, order)
        is_newest = order in (None, "time") and not ascending and search is None
        rows: list[GroupRow | TrajectoryRow] = []
        while True:
            page = await read(cursor, PAGE if is_newest else min(LISTED, most))
            rows += page.items
            cursor = page.cursor
            if is_newest or cursor is None or len(rows) >= most:
                break
        looked = None if is_newest or cursor is None else len(rows)
        items = [_fields(row) | {"first": None, "last": None} for row in rows]
        if has_texts := search is not None or order in ("first", "last"):
            items = await self._with_texts(channel, items)
        if search is not None:
            words = search.lower().split()
            said = [" ".join(filter(None, (i["first"], i["last"]))).lower() for i in items]
            found = [all(word in text for word in words) for text in said]
            items = list(compress(items, found))
        if not is_newest:
            items = _in_order(items, value, descending=not ascending)[:PAGE]
        if not has_texts:
            items = await self._with_texts(channel, items)
        return {"items": items, "cursor": cursor if is_newest else None, "looked": looked}

    async def _with_texts(self, channel: str, items: Sequence[_Row]) -> list[dict[str, Any]]:
        """Rows of trajectories, or of groups, with the first message of a user and the last reply,
        as far as messages were kept."""
        uids = [item.get("trajectory_uid") or item["prompt_uid"] for item in items]
        found: dict[str, dict[str, str | None]] = {}
        for i in range(0, len(uids), PAGE):
            asked = ReadEnds(tuple(uids[i : i + PAGE]), channel)
            ends = await self.ask(self.pool.call(asked))
            found |= await asyncio.to_thread(ends_texts, ends)
        return [{**item, **found.get(uid, {})} for uid, item in zip(uids, items, strict=True)]

    async def events(
        self,
        channel: str | None,
        kinds: Sequence[str] | None,
        reason: str | None,
        order: str | None,
        ascending: str | None,
    ) -> dict[str, Any]:
        """Recent events, the newest first, or the first ones of the `MOST_SORTED` newest in another
        order (`looked` says of how many, if there are more); with them, the reasons that groups
        left the pool for."""
        value = _order_of(_EVENT_ORDERS, order)
        found, _ = await self._events(None, channel, kinds)
        chosen = [e for e in reversed(found) if reason in (None, e.data.get("reason"))]
        reasons = sorted({e.data["reason"] for e in found if "reason" in e.data})
        is_newest = order in (None, "time") and not ascending
        newest = chosen[: PAGE * 5 if is_newest else MOST_SORTED]

        def said(uids: Iterable[str]) -> dict[str, str]:
            with _reader(self._archive) as archive:
                return archive.first_messages(list(dict.fromkeys(uids)))

        # Of what has left; what waits to be archived has none for some seconds.
        items = [_fields(event) | {"first": None} for event in newest]
        if order != "first" and not is_newest:
            items = _in_order(items, value, descending=not ascending)[: PAGE * 5]
        if self._archive is not None:
            texts = await asyncio.to_thread(said, [item["prompt_uid"] for item in items])
            items = [item | {"first": texts.get(item["prompt_uid"])} for item in items]
        if order == "first":
            items = _in_order(items, value, descending=not ascending)[: PAGE * 5]
        looked = None if is_newest or len(newest) == len(chosen) else len(newest)
        return {"items": items, "total": len(chosen), "reasons": reasons, "looked": looked}

    async def _events(
        self, cursor: str | None, channel: str | None = None, kinds: Sequence[str] | None = None
    ) -> tuple[list[Event], str | None]:
        """All that the pool remembers after the cursor, which is a bounded number."""
        found: list[Event] = []
        while True:
            page = await self.ask(self.pool.get_events(cursor, channel, kinds, EVENTS_A_PAGE))
            found += page.events
            if not page.events:
                return found, page.cursor
            cursor = page.cursor

    # -- one group, one trajectory -----------------------------------------------------------

    async def group(self, channel: str, prompt_uid: str, step: int | None) -> dict[str, Any]:
        """Its rollouts side by side and the tree of their prefixes: as an optimizer step was
        trained on it, if one is named whose sample is kept; else as the pool has it, or the
        archive."""
        folder, named = self._folder, dict[str, Any](prompt_uid=prompt_uid)
        if step is not None and folder is not None:
            trained = await asyncio.to_thread(folder.group, prompt_uid, step)
            about = await asyncio.to_thread(folder.about, step) or {"trajectories": []}
            rows = [row for row in about["trajectories"] if row["prompt_uid"] == prompt_uid]
            if rows:
                both = await self._side_by_side(trained)
                return {"group": None, "trajectories": rows, "step": step} | both
        page = await self.ask(self.pool.list_groups(channel, None, 1, **named))
        if not page.items:
            return await self._archived_group(channel, prompt_uid)
        listed = await self.ask(self.pool.list_trajectories(channel, None, 1000, **named))
        whole = await self.ask(self.pool.read_trajectories(channel, None, 1000, **named))
        found = await asyncio.to_thread(lambda: [each.trajectory for each in whole.unpack()])
        both = await self._side_by_side(found)
        both["prefixes"]["partial"] = whole.cursor is not None
        return {"group": page.items[0], "trajectories": listed.items, "step": None} | both

    async def _archived_group(self, channel: str, prompt_uid: str) -> dict[str, Any]:
        """A group that left the pool, as it was archived."""

        def read() -> tuple[list[dict[str, Any]], list[Trajectory]]:
            with _reader(self._archive) as archive:
                rows = _each_once(archive.group(prompt_uid))
                whole = [archive.read(row["uid"]) for row in rows[:MOST_SHOWN]]
            return rows, [each.trajectory for each in whole if each is not None]

        rows, whole = await asyncio.to_thread(read) if self._archive is not None else ([], [])
        if not rows:
            rows, whole = await self._waiting_group(prompt_uid)
        if not rows:
            raise UnknownItemError(
                f"prompt_uid is {prompt_uid!r:.200}, which is neither in channel {channel!r} nor "
                "in the archive; groups that were trained on are under Batches, others under "
                "Recently gone",
                "prompt_uid",
            )
        both = await self._side_by_side(whole)
        return {
            "group": None,
            "trajectories": _as_listed(rows),
            "step": None,
            "archived": True,
        } | both

    async def _waiting_group(
        self, prompt_uid: str
    ) -> tuple[list[dict[str, Any]], list[Trajectory]]:
        """Rows and trajectories of a group that waits to be archived."""
        left = await self.ask(self.pool.call(ReadDeparted(prompt_uid)))

        def read() -> list[tuple[ExportedTrajectory, dict[str, Any]]]:
            from stepwell.datapool.files.archive.reader import waiting

            return [each for each in waiting(left) if each[1]["prompt_uid"] == prompt_uid]

        found = await asyncio.to_thread(read) if left else []
        whole = [exported.trajectory for exported, _ in found[:MOST_SHOWN]]
        return [row for _, row in found], whole

    async def _side_by_side(self, of: Sequence[Trajectory]) -> dict[str, Any]:
        tree = await asyncio.to_thread(prefixes, of, self._decode)
        return {"prefixes": tree, "last": last_words(of, self._decode)}

    async def trajectory(
        self, channel: str | None, trajectory_uid: str, step: int | None, whole: str | None = None
    ) -> dict[str, Any]:
        """A trajectory: as an optimizer step was trained on it, if one is named whose sample is
        kept; else of the pool, a sample, or the archive. A page asks for the messages of later
        steps when they are looked at; a program, for `whole` ones."""
        found = await self._find(channel, trajectory_uid, step)
        trajectory, archived, row = found.trajectory, found.archived or {}, None
        tree = await asyncio.to_thread(
            shown, trajectory, found.columns, self._decode, whole=whole is not None
        )
        if found.channel is not None:
            named = dict[str, Any](trajectory_uid=trajectory_uid)
            page = await self.ask(self.pool.list_trajectories(found.channel, None, 1, **named))
            row = next(iter(page.items), None)
        return {
            "trajectory_uid": trajectory_uid,
            "prompt_uid": trajectory.prompt_uid,
            "channel": found.channel or archived.get("channel") or channel or TRAIN,
            "attempt": trajectory.attempt,
            "metadata": trajectory.metadata,
            "reward": archived.get("reward", trajectory.reward),
            "running": self._running(trajectory_uid),
            "step": found.step,
            "row": row,
            "archived": found.archived,
            **tree,
        }

    async def tokens(
        self,
        channel: str | None,
        trajectory_uid: str,
        step: int | None,
        index: int | None,
        start: int | None,
    ) -> dict[str, Any]:
        """Tokens and messages of one of its steps."""
        found = await self._find(channel, trajectory_uid, step)
        steps = found.trajectory.steps
        at = next((i for i, each in enumerate(steps) if each.step_index == (index or 0)), None)
        if at is None:
            name = f"{trajectory_uid!r:.200}"
            raise UnknownItemError(f"index is {index}; {name} has no such step", "index")
        parent = (await asyncio.to_thread(parents, steps))[at]
        known = 0 if parent is None else steps[parent].n_tokens
        columns = None if found.columns is None else found.columns[at]
        answer = tokens(steps[at], known, columns, self._text_of, start)
        return answer | {"messages": said(steps[at], known, self._decode)}

    async def picture(self, channel: str, trajectory_uid: str, digest: str) -> bytes:
        """PNG of a picture that a step of a trajectory refers to, in the pool or the archive."""
        try:
            found = await self.ask(self.pool.read_pictures(trajectory_uid, [digest], channel))
            return found[digest]
        except (TrajectoryClosedError, UnknownTrajectoryError):
            if self._archive is None:
                raise

        def read() -> bytes:
            with _reader(self._archive) as archive:
                whole = archive.read(trajectory_uid)
                png = None if whole is None else whole.pictures.get(digest)
            if png is None:
                raise UnknownItemError(
                    f"digest is {digest!r:.80}, which is of no picture of trajectory "
                    f"{trajectory_uid!r:.200}; what has left the pool is in the archive some "
                    "seconds later",
                    "digest",
                )
            return png

        return await asyncio.to_thread(read)

    async def _find(self, channel: str | None, uid: str, step: int | None) -> _Found:
        if step is not None and (found := await self._trained(uid, step)) is not None:
            return found
        statistics = await self.ask(self.pool.get_statistics())
        channels = [channel] if channel in statistics else statistics
        located: Located | None = await self.ask(locate(uid, self.pool, channels, self._archive))
        if located is not None and located.is_live:
            return _Found(located.exported.trajectory, None, located.channel, None)
        if located is None or located.row is None:
            await self._refuse_deleted(uid)
        row = None if located is None or located.row is None else _told(located.row)
        if (found := await self._trained(uid, None, row)) is not None:
            return found
        if located is not None:
            return _Found(located.exported.trajectory, None, located.channel, None, row)
        if (why := await self.ask(why_closed(uid, self.pool, statistics))) is not None:
            raise UnknownItemError(
                f"of trajectory {uid!r:.200} nothing is kept any more: {why}", "trajectory_uid"
            )
        raise UnknownItemError(
            f"trajectory_uid is {uid!r:.200}, which is neither in the pool nor in a sample of what "
            "was trained on"
            + (", nor in the archive" if self._archive is not None else "")
            + "; look for the beginning of it under Archive",
            "trajectory_uid",
        )

    async def _trained(
        self, uid: str, step: int | None, row: dict[str, Any] | None = None
    ) -> _Found | None:
        """A trajectory of the sample of an optimizer step, or of the last one that has it."""
        if self._folder is None:
            return None
        trained = await asyncio.to_thread(self._folder.trained, uid, step)
        if trained is None:
            return None
        return _Found(trained[1].trajectory, trained[1].columns, None, trained[0], row)

    # -- the archive -------------------------------------------------------------------------

    async def archive(
        self,
        query: str | None,
        search: str | None,
        order: str | None,
        ascending: str | None,
        cursor: str | None,
    ) -> dict[str, Any]:
        """Trajectories that left the pool, filtered, searched and sorted, page by page."""

        def read() -> dict[str, Any]:
            from stepwell.datapool.files.archive.reader import parse

            with _reader(self._archive) as archive:
                page = archive.rows(
                    parse(query or ""),
                    search,
                    order=order or "time",
                    descending=not ascending,
                    cursor=cursor,
                    limit=PAGE,
                )
            return {"items": [_told(row) for row in page.items], "cursor": page.cursor}

        return await self._of_archive(read)

    async def prompts(
        self, which: str | None, order: str | None, ascending: str | None, cursor: str | None
    ) -> dict[str, Any]:
        """Prompts with the rewards of all their tries, page by page; `which`: `never` or `always`
        rewarded."""

        def read() -> dict[str, Any]:
            from stepwell.datapool.files.archive.reader import prompt_cursor

            way = dict[str, Any](order=order or "time", descending=not ascending)
            with _reader(self._archive) as archive:
                rows = archive.prompts(
                    never_rewarded=which == "never",
                    always=which == "always",
                    cursor=cursor,
                    limit=PAGE + 1,
                    **way,
                )
            items, more = rows[:PAGE], len(rows) > PAGE
            return {"items": items, "cursor": prompt_cursor(items[-1], **way) if more else None}

        return await self._of_archive(read)

    async def find(self, uid: str) -> dict[str, Any]:
        """Find the page of a uid, or of the beginning of one: `page` and its `params`, or `items`
        to choose from; or what was `deleted`, and when."""
        for name in await self.ask(self.pool.get_statistics()):
            if (await self.ask(self.pool.list_groups(name, None, 1, prompt_uid=uid))).items:
                return {"page": "group", "params": {"prompt_uid": uid, "channel": name}}
            listed = self.pool.list_trajectories(name, None, 1, trajectory_uid=uid)
            if (await self.ask(listed)).items:
                return {"page": "trajectory", "params": {"uid": uid, "channel": name}}

        def read() -> dict[str, Any]:
            with _reader(self._archive) as archive:
                rows, deleted = archive.find(uid), archive.was_deleted(uid)
            about = None if deleted is None else {"uid": deleted.value, "at": deleted.at}
            return {"items": rows, "deleted": about}

        found: dict[str, Any] = {"items": [], "deleted": None}
        if self._archive is not None:
            found = await self._of_archive(read)
        rows, deleted = found["items"], found["deleted"]
        if not any(uid in (row["uid"], row["prompt_uid"]) for row in rows):
            if deleted is not None and deleted["uid"] == uid:
                return {"items": [], "deleted": deleted}
            from stepwell.datapool.files.archive.unarchived import begun

            rows = [*await self.ask(begun(self.pool, uid)), *rows]
        uids = {row["uid"]: row for row in rows}
        of = next((row for row in rows if row["prompt_uid"] == uid), None)
        if of is not None and uid not in uids:
            params = {"prompt_uid": uid, "channel": of["channel"]}
            return {"page": "group", "params": params}
        if len(uids) == 1:
            return {"page": "trajectory", "params": {"uid": next(iter(uids))}}
        if not rows and deleted is None:
            await self._find(None, uid, None)  # of a sample
            return {"page": "trajectory", "params": {"uid": uid}}
        return {"items": [_told(row) for row in uids.values()], "deleted": deleted}

    async def _of_archive(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._archive is None:
            raise RequestError("this run has no archive (pool.archive.enabled is false)", None)
        try:
            return await asyncio.to_thread(read)
        except InvalidRequestError as e:
            raise RequestError(str(e), "query") from e

    async def _refuse_deleted(self, uid: str) -> None:
        """
        Raises:
            UnknownItemError: the trajectory was deleted from the archive.
        """

        def deletion() -> Tombstone | None:
            with _reader(self._archive) as archive:
                return archive.was_deleted(uid)

        deleted = None if self._archive is None else await asyncio.to_thread(deletion)
        if deleted is not None and deleted.value == uid:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(deleted.at))
            raise UnknownItemError(
                f"trajectory {uid!r:.200} was deleted at {at}; nothing of it is kept",
                "trajectory_uid",
            )

    # -- curation ----------------------------------------------------------------------------

    async def mark(
        self,
        channel: str,
        prompt_uid: str | None,
        trajectory_uid: str | None,
        marks: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Mark a group or a trajectory; `before` undoes it."""
        if trajectory_uid is not None:
            page: Any = self.pool.list_trajectories(channel, trajectory_uid=trajectory_uid)
        else:
            page = self.pool.list_groups(channel, prompt_uid=prompt_uid)
        before = [row.marks.as_dict() for row in (await self.ask(page)).items]
        mark = self.pool.call(Mark(prompt_uid, trajectory_uid, dict(marks or {}), channel))
        return {"before": before[0] if before else None, "after": (await self.ask(mark)).as_dict()}

    async def reward(
        self, channel: str, trajectory_uid: str | None, reward: float | None
    ) -> dict[str, Any]:
        """Set the outcome reward; `before` undoes it, if there was one."""
        if trajectory_uid is None or reward is None:
            raise RequestError("trajectory_uid or reward is missing; send both", "reward")
        listed = self.pool.list_trajectories(channel, trajectory_uid=trajectory_uid)
        before = [row.outcome for row in (await self.ask(listed)).items]
        set_ = self.pool.set_reward(trajectory_uid, reward, channel=channel)
        return {"before": before[0] if before else None, "outcome": await self.ask(set_)}

    async def dry_run(
        self, channel: str, batch_size: int | None, selection: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Try what would be served now. Rules are built-in: a page names no code to be loaded."""
        rules = None
        if selection is not None:
            try:
                rules = SelectionConfig.model_validate(selection)
            except ValidationError as e:
                first = e.errors(include_url=False)[0]
                raise refusal([{**first, "loc": ("selection", *first["loc"])}]) from e
            rules = _built_in(rules)
        ready = (await self.ask(self.pool.get_statistics(channel)))["groups"]["ready"]
        if ready > MOST_TRIED:
            raise RequestError(
                f"channel {channel!r} has {ready} ready groups; a dry run looks at each of them "
                f"and holds the pool up meanwhile, so here it takes {MOST_TRIED} at most",
                "channel",
            )
        run = await self.ask(self.pool.dry_run(rules, channel, batch_size or 1))
        return {"counts": run.counts, "decisions": run.decisions[:1000]}

    def close(self) -> None:
        self.live.close()


@contextmanager
def _reader(path: Path | None) -> Iterator[ArchiveReader]:
    """The archive at `path`. Loads Arrow: 30 MB that a gateway whose archive nobody reads need not
    have."""
    from stepwell.datapool.files.archive.reader import ArchiveReader

    yield ArchiveReader(path or Path())


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the archive with what became of it in words."""
    from stepwell.datapool.files.archive.reader import fate

    return row | {"fate": fate(row)}


def _fields(record: GroupRow | TrajectoryRow | Event) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _order_of(orders: _Orders, order: str | None) -> Callable[[_Row], Any]:
    """Value that a list is sorted by.

    Raises:
        RequestError: there is no such order.
    """
    if (found := orders.get(order or "time")) is None:
        raise RequestError(f"order is {order!r:.80}; there are {', '.join(orders)}", "order")
    return found


def _in_order(
    rows: Sequence[dict[str, Any]], value: Callable[[_Row], Any], *, descending: bool
) -> list[dict[str, Any]]:
    """The rows in order of a value; those that have none come last."""
    known = [row for row in rows if value(row) is not None]
    rest = [row for row in rows if value(row) is None]
    return [*sorted(known, key=value, reverse=descending), *rest]


def _each_once(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories of a group of the archive; or, where they are no longer kept themselves,
    those of which a step that came late is."""
    own = [row for row in rows if not row["part"]]
    return own or list({row["uid"]: row for row in rows}.values())


def _as_listed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the archive with the names that the pool's listings have."""
    return [
        _told(row)
        | {
            "trajectory_uid": row["uid"],
            "n_steps": row["turns"],
            "n_tokens": row["tokens"],
            "newest_version": row["version"],
        }
        for row in rows
    ]


def _built_in(rules: SelectionConfig) -> SelectionConfig:
    """`rules`, if all of them are built in, as the parser of built-in rules writes them.

    Raises:
        RequestError: one is not; a page names no code.
    """
    try:
        return SelectionConfig(
            order=read_name("selection.order", rules.order, ORDERS),
            filters=tuple(
                read_name(f"selection.filters[{i}]", each, FILTERS)
                for i, each in enumerate(rules.filters)
            ),
        )
    except SelectionError as e:
        raise RequestError(str(e), "selection") from e


def _least(lag: str) -> float:
    """Lower bound of the lag bucket `0`, `0-1` or `>4`."""
    numbers = re.findall(r"[\d.]+", lag)
    return float(numbers[0]) if numbers else 0.0


def as_json(value: Any) -> bytes:
    """JSON of rows, marks and figures. Integers that a browser would round are texts: of more than
    53 bits, as seeds are."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, _plain, option | orjson.OPT_STRICT_INTEGER)
    except TypeError:
        return orjson.dumps(_exact(orjson.loads(orjson.dumps(value, _plain, option))))


def _exact(value: Any) -> Any:
    """JSON values with each integer that a double cannot hold as its text."""
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_exact, value)]
    return str(value) if isinstance(value, int) and abs(value) >= 1 << 53 else value


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset | set) else repr(value)
