"""Questions to an archive, whose pool runs or has ended.

    find(uid)      a trajectory or a group by its uid, or the beginning of one
    rows           lists: filters, search, order, page by page
    prompts        a row per prompt over all its tries
    read           a trajectory as it was, with its text and tokens
    delete, check  for operators

    "reward < 0.2 and version >= 10 and 'timeout' in text" ──► SQL with its values apart

What is asked goes to the catalogue of each shard, and the answers are merged. What tombstones name
is filtered, whatever the files still hold.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from stepwell.datapool.errors import DamagedFileError, InvalidRequestError
from stepwell.datapool.files.archive.catalogue import FACTS, ORDERS, Catalogue, listed, match_of
from stepwell.datapool.files.archive.conversations import Conversation, conversations
from stepwell.datapool.files.archive.folder import (
    FEEDBACK,
    TRAJECTORIES,
    ArchiveFolder,
    FileName,
    PictureFiles,
)
from stepwell.datapool.files.tombstones import Deletions, Kind, Tombstone, tombstone
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.questions import FOUND, DepartedRows
from stepwell.datapool.store.picture_folder import read_picture
from stepwell.datapool.store.segments import Row
from stepwell.datapool.types import MAX_INT

MOST: Final = 1000
MOST_CHARACTERS: Final = 2000
MOST_DEEP: Final = 30
"""Characters of a query, and brackets in brackets: SQLite's parser takes no more than 100."""
FEW: Final = 5000
"""Trajectories that pass a filter up to which they are looked up one by one; of more, the first
page is found soon by going through all in order."""
NEWEST_HITS: Final = 10_000
"""The newest hits of a search among which the most relevant ones are looked for."""
_NAMES: Final = {name: f't."{name}"' for name in FACTS} | {
    "uid": "t.uid",
    "prompt": "t.prompt_uid",
    "prompt_uid": "t.prompt_uid",
    "prompt_key": "t.prompt",
    "error": "t.reason",
}
PROMPT_ORDERS: Final[Mapping[str, tuple[str, Callable[[dict[str, Any]], Any]]]] = {
    "time": ("newest", lambda row: row["newest"]),
    "tries": ("tries", lambda row: row["tries"]),
    "rewarded": (
        "1.0 * rewarded / scored",
        lambda row: row["rewarded"] / row["scored"] if row["scored"] else None,
    ),
    "mean": ("total / scored", lambda row: row["mean"]),
    "best": ("best", lambda row: row["best"]),
    "solved": ("solved_version", lambda row: row["solved_version"]),
    "source": ("data_source", lambda row: row["data_source"]),
    "first": (
        "lower(coalesce(first, instance))",
        lambda row: _lower(row["instance"] if row["first"] is None else row["first"]),
    ),
}
"""Values that prompts are sorted by: of a catalogue's row, and of a prompt over all shards."""
_OPERATORS: Final[dict[type[ast.cmpop], str]] = {
    ast.Eq: "=",
    ast.NotEq: "IS NOT",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


class Filter(NamedTuple):
    """A condition in SQL, with its values."""

    sql: str
    values: tuple[Any, ...] = ()


ALL: Final = Filter("1")


def parse(text: str) -> Filter:
    """The condition that an expression states.

    Raises:
        InvalidRequestError: it names what there is not, or is no comparison.
    """
    if len(text) > MOST_CHARACTERS:
        raise _refused(text, f"it has more than {MOST_CHARACTERS} characters")
    try:
        found = _parsed(ast.parse(text.strip() or "True", mode="eval").body)
    except SyntaxError as e:
        raise _refused(text, e.msg) from e
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError, MemoryError) as e:  # NUL, or too deep for the parser
        raise _refused(text, str(e) or "it is too deep") from e
    brackets = accumulate((c == "(") - (c == ")") for c in found.sql)
    if max(brackets, default=0) > MOST_DEEP:
        raise _refused(text, "it is too deep")
    return found


def _parsed(node: ast.expr) -> Filter:
    match node:
        case ast.Constant(value=True):
            return ALL
        case ast.BoolOp(op=op, values=parts):
            word = " AND " if isinstance(op, ast.And) else " OR "
            all_of = [_parsed(part) for part in parts]
            values = tuple(v for part in all_of for v in part.values)
            return Filter(word.join(f"({part.sql})" for part in all_of), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _not(_parsed(operand))
        case ast.Compare(left=left, ops=[*operators], comparators=[*right]):
            pairs = zip(operators, [left, *right], right, strict=False)
            all_of = [_compared(operator, a, b) for operator, a, b in pairs]
            values = tuple(v for part in all_of for v in part.values)
            return Filter(" AND ".join(part.sql for part in all_of), values)
        case _:
            raise _refused(ast.unparse(node), "no comparison")


def _not(inner: Filter) -> Filter:
    """The condition of all others: also of those without a value, of which SQL says neither."""
    return Filter(f"({inner.sql}) IS NOT TRUE", inner.values)


def _compared(operator: ast.cmpop, left: ast.expr, right: ast.expr) -> Filter:
    said = f"{ast.unparse(left)} … {ast.unparse(right)}"
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(right, ast.Name):
            raise _refused(said, "`in` takes text, tags or a column on its right")
        inside = _contains(right.id, _value(left, right.id))
        return _not(inside) if isinstance(operator, ast.NotIn) else inside
    is_same = isinstance(operator, ast.Is | ast.Eq)
    is_other = isinstance(operator, ast.IsNot | ast.NotEq)
    if _is_none(right):
        if not (is_same or is_other):
            raise _refused(said, "None is neither more nor less")
        return Filter(f"{_column(left, said)} {'IS' if is_same else 'IS NOT'} NULL")
    sign = _OPERATORS.get(type(operator))
    if sign is None:
        raise _refused(said, "no operator of these")
    if isinstance(left, ast.Name):
        if left.id in ("tag", "tags"):
            if not (is_same or is_other):
                raise _refused(said, "tags are the same or not")
            inside = _contains("tags", _value(right, left.id))
            return inside if is_same else _not(inside)
        return Filter(f"{_column(left, said)} {sign} ?", (_value(right, left.id),))
    if isinstance(right, ast.Name):
        return Filter(f"? {sign} {_column(right, said)}", (_value(left, right.id),))
    raise _refused(said, "it names no column")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _contains(name: str, value: Any) -> Filter:
    if name == "text":
        query = _matched(f'"{value}"')
        return Filter("t.id IN (SELECT rowid FROM words WHERE words MATCH ?)", (query,))
    if name in ("tag", "tags"):
        return Filter("t.id IN (SELECT id FROM tags WHERE tag = ?)", (value,))
    return Filter(f"instr({_column(ast.Name(name), name)}, ?) > 0", (value,))


def _matched(search: str) -> str:
    """The FTS5 query of what somebody typed.

    Raises:
        InvalidRequestError: it has no word.
    """
    text = search.encode(errors="replace").decode().replace("\0", " ")
    if not (query := match_of(text)):
        raise InvalidRequestError(f"search is {search!r:.200}, which has no word; send one")
    return query


def _lower(text: str | None) -> str | None:
    """The text as SQLite lowers it, which knows ASCII alone."""
    return None if text is None else text.encode().lower().decode()


def _column(node: ast.expr, said: str) -> str:
    if not isinstance(node, ast.Name) or node.id not in _NAMES:
        raise _refused(said, "there is no such column")
    return _NAMES[node.id]


def _value(node: ast.expr, name: str) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError) as e:
        raise _refused(ast.unparse(node), "no text and no number") from e
    if name == "time" and isinstance(value, str):
        try:
            return datetime.fromisoformat(value).astimezone().timestamp()
        except (ValueError, OverflowError) as e:  # also beyond the year 9999 in UTC
            raise _refused(value, "no time such as '2026-11-26 14:30'") from e
    if not isinstance(value, str | int | float):
        raise _refused(ast.unparse(node), "no text and no number")
    if isinstance(value, int) and abs(value) >= MAX_INT:
        raise _refused(ast.unparse(node), "its number is not below 2**63")
    try:
        str(value).encode()
    except UnicodeEncodeError as e:
        raise _refused(ascii(value), "it has half a character") from e
    return value


def _refused(text: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"query is {text!r:.200}: {why}; compare {', '.join(sorted(_NAMES))} or tag with ==, !=, "
        "<, <=, >, >= and join with and, or, not; 'words' in text searches what was said"
    )


class Page(NamedTuple):
    """Rows of a list."""

    items: list[dict[str, Any]]
    cursor: str | None
    """Cursor of the next page; None: there is nothing more."""


class ArchiveReader:
    """The archive in a folder; without files it is empty."""

    def __init__(self, path: Path) -> None:
        self.folder = ArchiveFolder(path)

    def _catalogues(self) -> Iterator[tuple[int, Catalogue]]:
        for shard in self.folder.shards():
            if (path := self.folder.catalogue(shard)).is_file():
                try:
                    catalogue = Catalogue(path)
                except sqlite3.DatabaseError as e:
                    raise _damaged(path, e) from e
                try:
                    yield shard, catalogue
                finally:
                    catalogue.close()

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of all shards that are not deleted."""
        found: list[dict[str, Any]] = []
        deletions = self.folder.deletions()
        for shard, catalogue in self._catalogues():
            rows = _query(catalogue, sql, values)
            found += [row | {"shard": shard} for row in rows if not _is_deleted(row, deletions)]
        return found

    # -- lists -------------------------------------------------------------------------------

    def rows(
        self,
        where: Filter = ALL,
        search: str | None = None,
        *,
        order: str = "time",
        descending: bool = True,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Trajectories that pass, in order of one of `ORDERS`; ties by time, those without a value
        last. A search has an order of `relevance`, too.

        Raises:
            InvalidRequestError: no such order, or not a cursor of this list.
        """
        if order not in (*ORDERS, "relevance") or (order == "relevance" and not search):
            raise InvalidRequestError(
                f"order is {order!r:.80}; there are {', '.join(ORDERS)}, and relevance of a search"
            )
        if order == "relevance":
            return Page(self._most_relevant(where, search or "", limit), None)
        way = _way(order, descending)
        after = _places(cursor, way)
        found = [
            [
                row | {"shard": shard}
                for row in _sorted(
                    catalogue, where, search, order, descending, after.get(shard), limit + 1
                )
            ]
            for shard, catalogue in self._catalogues()
        ]

        def key(row: dict[str, Any]) -> Any:
            value = row["time"] if order == "time" else row["sorted"]
            return (value is not None) == descending, value, row["time"] or 0.0

        merged = list(heapq.merge(*found, key=key, reverse=descending))
        for row in merged[:limit]:
            after[row["shard"]] = (row["sorted"], row["id"])
        deletions = self.folder.deletions()
        items = [row for row in merged[:limit] if not _is_deleted(row, deletions)]
        more = len(merged) > limit
        return Page(items, msgspec.json.encode(_Cursor(way, after)).hex() if more else None)

    def _most_relevant(self, where: Filter, search: str, limit: int) -> list[dict[str, Any]]:
        newest = (
            "SELECT rowid AS id, bm25(words) AS rank FROM words WHERE words MATCH ? "
            f"ORDER BY rowid DESC LIMIT {NEWEST_HITS}"
        )
        sql = (
            f"SELECT t.*, rank FROM ({newest}) hits JOIN trajectories t ON t.id = hits.id "
            f"WHERE {where.sql} ORDER BY rank LIMIT {limit}"
        )
        found = self._ask(sql, (_matched(search), *where.values))
        return sorted(found, key=lambda row: row["rank"])[:limit]

    def prompts(
        self,
        *,
        never_rewarded: bool = False,
        always: bool = False,
        order: str = "time",
        descending: bool = True,
        cursor: str | None = None,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """Prompts with what their tries were rewarded, in order of one of `PROMPT_ORDERS`; ties by
        the time of the last try, those without a value last.

        Args:
            cursor: `prompt_cursor` of the last one of the page before.

        Raises:
            InvalidRequestError: no such order, or not a cursor of this list.
        """
        if order not in PROMPT_ORDERS:
            raise InvalidRequestError(
                f"order is {order!r:.80}; there are {', '.join(PROMPT_ORDERS)}"
            )
        where, values = "1", list[Any]()
        if never_rewarded:
            where = "rewarded = 0 AND scored > 0"
        elif always:
            where = "rewarded = scored AND scored > 0"
        value, _ = PROMPT_ORDERS[order]
        after = None if cursor is None else _prompt_place(cursor, _way(order, descending))
        # Sums over shards may be first where no shard's are; the newest of all are of one shard.
        is_first = order == "time" and descending and after is None
        if is_whole := len(self.folder.shards()) > 1 and not is_first:
            sql = "SELECT * FROM prompts"
        else:
            sign, way = ("<", "DESC") if descending else (">", "ASC")
            if after is not None and after.value is None:
                where += f" AND {value} IS NULL AND (newest, prompt) {sign} (?, ?)"
                values = [after.newest, after.prompt]
            elif after is not None:
                beyond = f"({value}, newest, prompt) {sign} (?, ?, ?)"
                where += f" AND ({beyond} OR {value} IS NULL)"
                values = [after.value, after.newest, after.prompt]
            ordered = f"{value} {way} NULLS LAST, newest {way}, prompt {way} LIMIT {limit}"
            sql = f"SELECT * FROM prompts WHERE {where} ORDER BY {ordered}"
        merged: dict[str, dict[str, Any]] = {}
        for row in self._ask(sql, values):
            row.pop("shard")
            merged[row["prompt"]] = _added(merged.get(row["prompt"]), row)
        if not is_whole:
            merged |= self._others(merged)
        for row in merged.values():
            row["mean"] = row.pop("total") / row["scored"] if row["scored"] else None
            row["kind"] = kind_of(row)
        wanted = "never" if never_rewarded else "always" if always else None
        kept = [row for row in merged.values() if wanted in (None, row["kind"])]

        def key(place: _PromptPlace) -> Any:
            return (place.value is not None) == descending, *place[1:]

        placed = [(key(_place_of(row, order, descending)), row) for row in kept]
        if after is not None:
            last = key(after)
            placed = [each for each in placed if (each[0] < last if descending else each[0] > last)]
        placed.sort(key=itemgetter(0), reverse=descending)
        return [row for _, row in placed[:limit]]

    def _others(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same prompts with the tries of all shards: another one may have been rewarded."""
        if len(self.folder.shards()) < 2 or not found:
            return {}
        marks = ", ".join("?" * len(found))
        all_of: dict[str, dict[str, Any]] = {}
        for row in self._ask(f"SELECT * FROM prompts WHERE prompt IN ({marks})", list(found)):
            row.pop("shard")
            all_of[row["prompt"]] = _added(all_of.get(row["prompt"]), row)
        return all_of

    def counts(self) -> dict[str, Any]:
        """Trajectories, prompts and bytes."""
        n = self._ask(
            "SELECT (SELECT count(*) FROM trajectories) AS n, (SELECT count(*) FROM "
            "prompts) AS prompts, (SELECT coalesce(sum(n_bytes), 0) FROM files) AS bytes"
        )
        total = {key: sum(row[key] for row in n) for key in ("n", "prompts", "bytes")}
        return {
            "trajectories": total["n"],
            "prompts": total["prompts"],
            "file_bytes": total["bytes"],
            "all_bytes": self.folder.n_bytes() if self.folder.exists() else 0,
        }

    # -- one ---------------------------------------------------------------------------------

    def find(self, uid: str, limit: int = FOUND) -> list[dict[str, Any]]:
        """Rows of the trajectory, or of the group, with this uid, or the first of those whose uids
        begin with it, in their order; parts that came late are among them."""
        exact = self._ask("SELECT * FROM trajectories t WHERE uid = ? ORDER BY part", (uid,))
        if exact:
            return exact
        if (grouped := self.group(uid)) or not uid:
            return grouped
        end = uid + "\U0010ffff"
        for column in ("uid", "prompt_uid"):
            found = self._ask(
                f"SELECT * FROM trajectories t WHERE {column} >= ? AND {column} < ? "
                f"ORDER BY {column} LIMIT {limit}",
                (uid, end),
            )
            if found:
                return found
        return []

    def group(self, prompt_uid: str) -> list[dict[str, Any]]:
        """Rows of the group with this uid, in the order in which they came here."""
        return self._ask(
            f"SELECT * FROM trajectories t WHERE prompt_uid = ? ORDER BY id LIMIT {MOST}",
            (prompt_uid,),
        )

    def find_exact(self, uid: str) -> bool:
        """Return whether a trajectory with this uid is here."""
        return bool(self._ask("SELECT uid FROM trajectories WHERE uid = ? LIMIT 1", (uid,)))

    def first_messages(self, prompt_uids: Sequence[str]) -> dict[str, str]:
        """The first message of groups, by uid, of those that are here with their text."""
        marks = ", ".join("?" * len(prompt_uids))
        sql = (
            "SELECT uid, prompt_uid, user, tags, time, first FROM trajectories "
            f"WHERE prompt_uid IN ({marks})"
        )
        rows = self._ask(sql, list(prompt_uids)) if prompt_uids else []
        return {row["prompt_uid"]: row["first"] for row in rows if row["first"] is not None}

    def feedback(self, uid: str) -> list[dict[str, Any]]:
        """Rewards that came after the trajectory took none any more."""
        return self._ask("SELECT * FROM feedback WHERE uid = ? ORDER BY part", (uid,))

    def was_deleted(self, uid: str) -> Tombstone | None:
        """The last deletion of the trajectory, or of the whole group, with this uid; else of one
        whose uid begins so."""
        found = [t for t in self.folder.tombstones() if t.kind in ("trajectory", "group")]
        begun = [t for t in found if uid and t.value.startswith(uid)]
        return next((t for t in reversed(found) if t.value == uid), begun[-1] if begun else None)

    def read(
        self, uid: str, channel: str | None = None, attempt: int | None = None
    ) -> ExportedTrajectory | None:
        """The trajectory with this uid; None if it is not here. Of several, in other channels or
        runs, the last attempt, and of these the one that left last.

        Args:
            channel, attempt: of one among several.

        Raises:
            DamagedFileError: its file is not what was written.
        """
        from stepwell.datapool.files.archive import parquet

        rows = [
            row
            for row in self._ask("SELECT * FROM trajectories WHERE uid = ? ORDER BY part", (uid,))
            if channel in (None, row["channel"])
        ]
        whole = [row for row in rows if not row["part"] and attempt in (None, row["attempt"])]
        if not whole and (attempt is not None or not rows):
            return None
        head = max(whole or rows, key=lambda row: (row["attempt"], row["time"] or 0.0))
        chosen = _with_parts(head, [row for row in rows if row["channel"] == head["channel"]])
        found = [self._row(uid, row) for row in chosen]
        paths = {
            digest: self.folder.pictures(row["file"]) / key
            for row in found
            for digest, key in parquet.picture_keys(row).items()
        }
        return replace(parquet.exported(found), pictures=PictureFiles(paths))

    def _row(self, uid: str, row: dict[str, Any]) -> dict[str, Any]:
        from stepwell.datapool.files.archive import parquet

        for _ in range(3):
            path = self.folder.file(TRAJECTORIES, row["file"])
            try:
                found = parquet.read_row(path, row["row_group"], row["row"])
                if found["trajectory_uid"] == uid:
                    return found | {"file": row["file"]}
            except (FileNotFoundError, IndexError):
                pass
            # The archiver merged or rewrote the file since: look the place up again.
            key = uid, row["channel"], row["attempt"], row["part"]
            where = "uid = ? AND channel = ? AND attempt = ? AND part = ?"
            again = self._ask(f"SELECT * FROM trajectories WHERE {where}", key)
            row = again[0] if again else row
        raise DamagedFileError(
            f"{self.folder.file(TRAJECTORIES, row['file'])} lacks trajectory {uid!r}; run "
            "`stepwell archive check`"
        )

    def read_all(
        self,
        where: Filter = ALL,
        search: str | None = None,
        *,
        order: str = "time",
        descending: bool = True,
    ) -> Iterator[ExportedTrajectory]:
        """All trajectories that pass, whole, in the order of `rows`; without those of which only
        the text was imported. By relevance the `NEWEST_HITS` newest alone."""
        cursor = None
        limit = NEWEST_HITS if order == "relevance" else 100  # it has one page
        while True:
            page = self.rows(
                where, search, order=order, descending=descending, cursor=cursor, limit=limit
            )
            for row in page.items:
                if row["part"] or not row["tokens"]:
                    continue
                if found := self.read(row["uid"], row["channel"], row["attempt"]):
                    yield found
            if (cursor := page.cursor) is None:
                return

    # -- operators ---------------------------------------------------------------------------

    def delete(
        self, kind: Kind, *values: str, with_group: bool = False, at: float | None = None
    ) -> list[str]:
        """Delete trajectories, or all of users or with tags; the uids of what was here. When it
        returns, no file and no page of the catalogue has a byte of it.

        Args:
            with_group: also all others of their groups, which were asked the same.
            at: time by the clock of the pool (`pool_time`), of users and tags: what it opens later
                stays. None: that of this machine.

        Raises:
            DamagedFileError: a file cannot be read, so that it could still hold it.
            DataPoolError: somebody reads a catalogue all the time; delete again.
            OSError: the disk is full, or cannot be written; delete again.
        """
        if not self.folder.exists() or not values:
            return []
        now = time.time() if at is None else at
        at = max(now, self._newest())  # a clock of before may have been ahead
        meant = [tombstone(kind, value, at) for value in values]
        self.folder.add_tombstones(meant)
        gone: dict[str, None] = {}
        for shard in self.folder.shards():
            with self.folder.locked(shard):
                archive = _opened(self.folder.path, shard)
                try:
                    if with_group:
                        others = archive.siblings(kind, values)
                        of_group = [tombstone("trajectory", uid) for uid in others]
                        self.folder.add_tombstones(of_group)
                        meant = [*meant, *of_group]
                    archive.hide(meant)
                    gone |= dict.fromkeys(archive.erase())
                finally:
                    archive.close()
        return list(gone)

    def _newest(self) -> float:
        """Time at which the last trajectory that is here left its pool, by the pool's clock; 0.0:
        there is none, or a catalogue cannot be read."""
        newest = 0.0
        with suppress(DamagedFileError):
            for _, catalogue in self._catalogues():
                (row,) = _query(catalogue, "SELECT max(time) AS newest FROM trajectories", ())
                newest = max(newest, row["newest"] or 0.0)
        return newest

    def check(self) -> list[str]:
        """Verify every file and catalogue; a line for each that is damaged. The catalogue is made
        that of the files."""
        from stepwell.datapool.files.archive import parquet

        told: list[str] = []
        for shard in self.folder.shards():
            for kind in (TRAJECTORIES, FEEDBACK):
                for name in self.folder.names(kind, shard):
                    told += self._checked(kind, name, parquet)
            with self.folder.locked(shard):
                path = self.folder.catalogue(shard)
                if path.is_file() and (why := _damage(path)) is not None:
                    self.folder.remove_catalogue(shard)
                    told.append(f"{path} was damaged: {why}; it was made anew of the files")
                archive = _opened(self.folder.path, shard)
                try:
                    told += [line for line in archive.reconcile() if line not in told]
                finally:
                    archive.close()
        return told

    def _checked(self, kind: str, name: FileName, parquet: Any) -> list[str]:
        path = self.folder.file(kind, name)
        try:
            data = path.read_bytes()
            parquet.check_bytes(path, data)
            table = parquet.read_table(path)
        except FileNotFoundError:
            return []  # it was merged meanwhile
        except (DamagedFileError, OSError) as e:
            return [str(e)]
        told: list[str] = []
        for key in parquet.all_picture_keys(table) if kind == TRAJECTORIES else ():
            try:
                read_picture(self.folder.pictures(name) / key)
            except DamagedFileError as e:
                if path.exists():  # else it was merged meanwhile
                    told.append(str(e))
        return told


def _is_deleted(row: Mapping[str, Any], deletions: Deletions) -> bool:
    """Return whether a row of a catalogue is deleted. Of a user or a tag those are that had left by
    then: the archiver adds none that was deleted."""
    if row.get("uid") is None or not deletions:
        return False
    names = {"user": row.get("user"), "tags": json.loads(row.get("tags") or "[]")}
    at = datetime.fromtimestamp(row.get("time") or 0.0)
    return deletions.meets({"trajectory_uid": row["uid"], "opened_at": at} | names)


def _with_parts(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A trajectory's row, and those of what came late for it.

    Args:
        rows: all that are of its uid and channel, parts in order.
    """
    parts = [row for row in rows if row["part"]]
    if head["part"]:
        return parts
    # Those of another run's trajectory of this name came before this one was opened, or after the
    # next one was.
    begun = sorted(_begun(row) for row in rows if not row["part"])
    at = begun.index(_begun(head))
    first, end = (begun[at] if at else -math.inf), (*begun[at + 1 :], math.inf)[0]
    return [head, *(part for part in parts if first <= (part["time"] or 0.0) < end)]


def _begun(row: Mapping[str, Any]) -> float:
    """About when a trajectory was opened: later by as long as it waited to leave."""
    return float(row["time"] or 0.0) - float(row["seconds"] or 0.0)


def _query(catalogue: Catalogue, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    try:
        return catalogue.query(sql, values)
    except sqlite3.DatabaseError as e:
        raise _damaged(catalogue.path, e) from e


def _damaged(path: Path, error: sqlite3.DatabaseError) -> DamagedFileError:
    return DamagedFileError(f"{path}: {error}; `stepwell archive check` makes it anew of the files")


def _sorted(
    catalogue: Catalogue,
    where: Filter,
    search: str | None,
    order: str,
    descending: bool,
    after: tuple[float | str | None, int] | None,
    limit: int,
) -> list[dict[str, Any]]:
    """Rows of one catalogue that pass, after a row's value and id: first those that have a value,
    then the others, both out of its index."""
    place, value = "t.id", ORDERS[order]
    passes, values = f"({where.sql})", where.values
    few = _few(catalogue, where)
    if few is not None:
        passes = f"{passes} AND {few}"
    if search:  # all hits are sorted, however many; but the newest first
        source, place = "words JOIN trajectories t ON t.id = words.rowid", "words.rowid"
        passes, values = f"words MATCH ? AND {passes}", (_matched(search), *values)
        value = f"+({value})"
    else:
        is_indexed = order != "time" and few is None
        source = f"trajectories t{f' INDEXED BY by_{order}' if is_indexed else ''}"
    sign, way = ("<", "DESC") if descending else (">", "ASC")
    both = f"{value} {way}, {place} {way}"
    beyond: tuple[str, list[Any]] = (f"{place} {sign} ?", [after[1]]) if after else ("1", [])
    parts: list[tuple[str, list[Any], str]]
    if order == "time":
        value, parts = place, [(*beyond, f"{place} {way}")]
    elif after is None:
        parts = [(f"{value} NOT NULL", [], both), (f"{value} IS NULL", [], f"{place} {way}")]
    elif after[0] is None:
        parts = [(f"{value} IS NULL AND {beyond[0]}", beyond[1], f"{place} {way}")]
    else:
        parts = [
            (f"{value} = ? AND {beyond[0]}", [*after], f"{place} {way}"),
            (f"{value} {sign} ?", [after[0]], both),
            (f"{value} IS NULL", [], f"{place} {way}"),
        ]
    rows: list[dict[str, Any]] = []
    for bound, more, ordered in parts:
        # The rows that pass first, of an index; then what is shown of them.
        first = (
            f"SELECT {place} AS id, {value} AS sorted FROM {source} WHERE {passes} AND {bound} "
            f"ORDER BY {ordered} LIMIT {limit - len(rows)}"
        )
        sql = (
            f"SELECT t.*, sorted FROM ({first}) f JOIN trajectories t ON t.id = f.id "
            f"ORDER BY sorted {way}, f.id {way}"
        )
        rows += _query(catalogue, sql, (*values, *more)) if len(rows) < limit else []
    return rows


def _few(catalogue: Catalogue, where: Filter) -> str | None:
    """A condition that names the few trajectories that pass; None: they are many. One index has all
    that filters look at, so that a filter without hits reads that alone."""
    if where == ALL:
        return None
    names = set(re.findall(r'\bt\."?(\w+)', where.sql)) - {"id"}
    index = " INDEXED BY facts" if names and names <= set(FACTS) else ""
    sql = f"SELECT t.id FROM trajectories t{index} WHERE {where.sql} LIMIT {FEW + 1}"
    found = _query(catalogue, sql, where.values)
    return None if len(found) > FEW else f"t.id IN ({', '.join(str(row['id']) for row in found)})"


def _damage(path: Path) -> str | None:
    """The damage of a catalogue; None: there is none."""
    try:
        with closing(Catalogue(path)) as catalogue:
            return catalogue.is_sound()
    except sqlite3.DatabaseError as e:
        return str(e)


def _opened(path: Path, shard: int) -> Any:
    from stepwell.datapool.files.archive.archiver import Archive
    from stepwell.datapool.files.archive.launch import Settings

    return Archive(Settings(str(path), "", "", shard, float("inf"), 1 << 62))


def kind_of(row: dict[str, Any]) -> str:
    """A word for what a prompt's tries were rewarded: `unscored`, `never`, `always` or `mixed`."""
    if not row["scored"]:
        return "unscored"
    if not row["rewarded"]:
        return "never"
    return "always" if row["rewarded"] == row["scored"] else "mixed"


def _added(before: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return row
    total = {key: before[key] + row[key] for key in ("tries", "scored", "rewarded", "total")}

    def of(key: str, choose: Any) -> Any:
        known = [each[key] for each in (before, row) if each[key] is not None]
        return choose(known) if known else None

    bounds = {"best": max, "worst": min, "solved_at": min, "solved_version": min, "newest": max}
    return row | total | {key: of(key, choose) for key, choose in bounds.items()}


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The end of a page."""

    way: str
    """Order of the list."""
    after: dict[int, tuple[float | str | None, int]]
    """By shard, the value that its last row was sorted by, and its id."""


def _places(cursor: str | None, way: str) -> dict[int, tuple[float | str | None, int]]:
    """Ends of the page before, by shard.

    Raises:
        InvalidRequestError: it is not a cursor of a list in this order.
    """
    if cursor is None:
        return {}
    try:
        found = msgspec.json.decode(bytes.fromhex(cursor), type=_Cursor)
        if found.way != way or any(abs(last) >= MAX_INT for _, last in found.after.values()):
            raise ValueError(cursor)
    except ValueError as e:  # also msgspec's
        raise InvalidRequestError(f"cursor is {cursor!r:.80}; pass that of the page before") from e
    return found.after


class _PromptPlace(NamedTuple):
    """The place of a prompt in a list."""

    way: str
    """Order of the list."""
    value: float | str | None
    """Value that it is sorted by."""
    newest: float
    prompt: str


def _way(order: str, descending: bool) -> str:
    return f"{order}{' descending' if descending else ''}"


def _place_of(row: Mapping[str, Any], order: str, descending: bool) -> _PromptPlace:
    value = PROMPT_ORDERS[order][1](dict(row))
    return _PromptPlace(_way(order, descending), value, row["newest"] or 0.0, row["prompt"])


def prompt_cursor(row: Mapping[str, Any], *, order: str, descending: bool) -> str:
    """The cursor behind a prompt in a list of `ArchiveReader.prompts`. What comes or changes
    meanwhile moves no other prompt to another side of it."""
    return msgspec.json.encode(_place_of(row, order, descending)).hex()


def _prompt_place(cursor: str, way: str) -> _PromptPlace:
    """
    Raises:
        InvalidRequestError: it is not a cursor of a list in this order.
    """
    try:
        found = msgspec.json.decode(bytes.fromhex(cursor), type=_PromptPlace)
        if found.way != way:
            raise ValueError(cursor)
    except ValueError as e:  # also msgspec's
        raise InvalidRequestError(f"cursor is {cursor!r:.80}; pass that of the page before") from e
    return found


def fate(row: Mapping[str, Any]) -> str:
    """Describe the end of a trajectory: trained, dropped or aborted, and why."""
    if row["state"] == "late":
        return "came too late: its trajectory was closed"
    group = {"acked": "its group was taken by a trainer", "dropped": "its group was dropped"}
    group["live"] = "its group is in the pool"
    said = group.get(row["left"], str(row["left"]))
    if row["drop_reason"]:
        said += f" ({row['drop_reason']})"
    if row["state"] == "aborted":
        return f"aborted ({row['reason']}); {said}"
    return f"{row['state']}; {said}" if row["left"] == "live" else said


def waiting(found: Sequence[DepartedRows]) -> list[tuple[ExportedTrajectory, dict[str, Any]]]:
    """Trajectories that wait to be archived, of rows that `ReadDeparted` answered; with each its
    row, as lists have it."""
    from stepwell.datapool.files.archive import parquet

    parts: dict[tuple[str, str], list[Conversation]] = {}
    for each in found:
        rows = [Row(row, each.channel, kind, head, data) for row, kind, head, data in each.rows]
        for one in conversations(each.channel, rows):
            if isinstance(one, Conversation):
                parts.setdefault((one.channel, one.trajectory_uid), []).append(one)
    whole: list[tuple[ExportedTrajectory, dict[str, Any]]] = []
    for of_one in parts.values():
        table = parquet.trajectory_table(of_one)
        rows_of = table.drop_columns(["token_ids", "log_probs"]).to_pylist()
        for i, row in enumerate(rows_of):
            for name in ("token_ids", "log_probs"):
                row[name] = table[name].combine_chunks()[i].values.to_numpy(zero_copy_only=False)
        is_live = of_one[0].left == "live"
        exported = parquet.exported(rows_of)
        about = listed(rows_of[0])
        if is_live:  # neither it nor its group has left
            exported, about["time"] = replace(exported, group_state="live"), None
        whole.append((exported, about))
    return whole
