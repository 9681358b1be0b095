"""The catalogue of a shard's files: a SQLite database that is made of them, and can be made again.

    trajectories   a row each: where it is, and what it is listed and filtered by
    words          FTS5 over `texts`: what was said in it
    prompts        a row per prompt over all its tries, kept up to date
    feedback       rewards that came late
    files          what is in here, with the digest of each file

In Chinese, Japanese, Korean and Thai each character is a word, since running text has no spaces:
they are stored with zero-width spaces between them, so that 東京 is found as a phrase. The newest
have the highest ids: what is newest is read first, backwards. One process writes (`archiver.py`, or
who deletes, with the lock); others read.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
import pyarrow.compute as pc  # type: ignore[import-untyped,unused-ignore]

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.files.archive.conversations import preview
from stepwell.datapool.files.archive.folder import IMPORTED, FileName
from stepwell.datapool.files.archive.parquet import said_in

VERSION: Final = 2
TEXT_CHARACTERS: Final = 200_000
"""Characters of a trajectory that are searched at most, from its beginning."""
WAL_PAGES: Final = 8192
"""Pages of SQLite's log, 32 MiB: what an index is changed in again meanwhile is copied once."""
INDEX_BYTES: Final = 16 << 20
"""Bytes of words in memory before they are a part of the index on disk; 8 parts become one, bit by
bit. By default parts are smaller and 4 become one: words are written anew twice as often."""
CHECKPOINTS: Final = 6
"""Tries to empty SQLite's log, which a reader may still read."""
ALONE: Final = re.compile(
    "([\u0e00-\u0eff\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff])"
)
"""Characters that are words of their own."""
_READ: Final = (
    *("trajectory_uid", "channel", "attempt", "part", "prompt_uid", "state", "reason", "left"),
    *("drop_reason", "reward", "oldest_version", "newest_version", "n_steps", "n_tokens"),
    *("n_response_tokens", "opened_at", "closed_at", "left_at", "data_source", "instance_id"),
    *("user", "tags", "first_user", "last_reply"),
)
"""Columns of a file that the catalogue has."""
_KEY: Final = ("trajectory_uid", "channel", "attempt", "part")
"""Columns of a file that name a row."""
BREAK: Final = "\u200b"
"""Between these words: seen by nobody, and a separator for the tokenizer."""
FACTS: Final = (
    "time",
    "reward",
    "version",
    "oldest_version",
    "turns",
    "tokens",
    "response_tokens",
    "attempt",
    "state",
    "reason",
    "left",
    "drop_reason",
    "data_source",
    "user",
    "channel",
    "seconds",
)
"""Columns that a filter may look at. One index has them all, so that a filter without hits reads
that alone; it grows at its end, as time does."""
ORDERS: Final = {
    "time": "id",
    "uid": "uid",
    "reward": "reward",
    "turns": "turns",
    "tokens": "tokens",
    "version": "version",
    "state": (
        "CASE state WHEN 'complete' THEN \"left\" ELSE state END"
        " || ' ' || coalesce(drop_reason, reason, '')"
    ),
    "first": "lower(substr(first, 1, 24)) || prompt",
    "last": "lower(substr(last, 1, 24))",
}
"""Values that lists are sorted by, each with an index; ties by id. Of a text the beginning counts,
since an index holds a copy; tries of one prompt stand together."""

_SORTED: Final = "\n".join(
    f"CREATE INDEX by_{name} ON trajectories({value}, id);"
    for name, value in ORDERS.items()
    if name not in ("time", "uid")
)
_TABLES: Final = f"""
CREATE TABLE files (
  kind TEXT, name TEXT, digest TEXT, n_bytes INTEGER, n_rows INTEGER, newest REAL,
  PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE trajectories (
  id INTEGER PRIMARY KEY, uid TEXT NOT NULL, channel TEXT NOT NULL, attempt INTEGER NOT NULL,
  part INTEGER NOT NULL, prompt_uid TEXT NOT NULL, file TEXT NOT NULL, row_group INTEGER NOT NULL,
  row INTEGER NOT NULL, state TEXT, reason TEXT, left TEXT, drop_reason TEXT, reward REAL,
  version INTEGER, oldest_version INTEGER, turns INTEGER, tokens INTEGER, response_tokens INTEGER,
  data_source TEXT, user TEXT, tags TEXT, time REAL, seconds REAL, prompt TEXT NOT NULL,
  first TEXT, last TEXT
);
CREATE UNIQUE INDEX by_uid ON trajectories(uid, channel, attempt, part);
CREATE INDEX by_group ON trajectories(prompt_uid);
CREATE INDEX by_prompt ON trajectories(prompt);
CREATE INDEX by_file ON trajectories(file);
{_SORTED}
CREATE INDEX facts ON trajectories({", ".join(f'"{name}"' for name in FACTS)});
CREATE TABLE tags (tag TEXT, id INTEGER, PRIMARY KEY (tag, id)) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, body TEXT);
CREATE VIRTUAL TABLE words USING fts5(
  body, content='texts', content_rowid='id', tokenize='unicode61 remove_diacritics 2'
);
INSERT INTO words(words, rank) VALUES ('automerge', 8), ('hashsize', {INDEX_BYTES});
CREATE TABLE prompts (
  prompt TEXT PRIMARY KEY, data_source TEXT, instance TEXT, first TEXT, tries INTEGER,
  scored INTEGER, rewarded INTEGER, total REAL, best REAL, worst REAL, solved_at REAL,
  solved_version INTEGER, newest REAL, channel TEXT
) WITHOUT ROWID;
CREATE INDEX never_rewarded ON prompts(newest) WHERE rewarded = 0 AND scored > 0;
CREATE TABLE feedback (
  uid TEXT, part INTEGER, channel TEXT, prompt_uid TEXT, file TEXT, time REAL, reward REAL,
  step_index INTEGER, why TEXT, PRIMARY KEY (uid, part, channel)
) WITHOUT ROWID;
"""


_COUNT_TRIES: Final = (
    "INSERT INTO prompts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (prompt) DO UPDATE SET tries = tries + excluded.tries,"
    " scored = scored + excluded.scored,"
    " rewarded = rewarded + excluded.rewarded, total = total + excluded.total,"
    " best = CASE WHEN best IS NULL OR excluded.best > best THEN excluded.best"
    " ELSE best END,"
    " worst = CASE WHEN worst IS NULL OR excluded.worst < worst THEN excluded.worst"
    " ELSE worst END,"
    " solved_at = CASE WHEN solved_at IS NULL OR excluded.solved_at < solved_at"
    " THEN excluded.solved_at ELSE solved_at END,"
    " solved_version = CASE WHEN solved_version IS NULL THEN excluded.solved_version"
    " ELSE min(solved_version, coalesce(excluded.solved_version, solved_version)) END,"
    " newest = max(newest, excluded.newest)"
)


def segmented(text: str) -> str:
    """Text in which each character that is a word stands alone."""
    if text.isascii() or not ALONE.search(text):
        return text
    return ALONE.sub(f"{BREAK}\\1{BREAK}", text)


def plain(text: str | None) -> str | None:
    """The text that `segmented` was given."""
    return None if text is None else text.replace(BREAK, "")


def match_of(search: str) -> str:
    """The FTS5 query of what somebody typed: all words, those in quotes as they follow each other;
    a * at the end of a word stands for any end."""
    found = []
    for quoted, word in re.findall(r'"([^"]*)"|(\S+)', search):
        text = segmented(quoted or word.rstrip("*")).replace('"', '""')
        if re.search(r"\w", text):
            found.append(f'"{text}"' + "*" * (not quoted and word.endswith("*")))
    return " ".join(found)


class Catalogue:
    """The catalogue in a file.

    Args:
        writes: makes it if there is none; else it is only read.
    """

    def __init__(self, path: Path, *, writes: bool = False) -> None:
        self.path = path
        if writes:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.execute("PRAGMA synchronous = NORMAL")  # it can be made again
            self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            if self._db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                self._make()
        else:
            uri = f"{path.absolute().as_uri()}?mode=ro"
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA cache_size = -65536")

    def _make(self) -> None:
        names = "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL AND type = 'table'"
        for _, name in self._db.execute(names).fetchall():
            if not name.startswith(("sqlite_", "words_")):
                self._db.execute(f'DROP TABLE IF EXISTS "{name}"')
        self._db.executescript(_TABLES)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:  # also a cancellation: nothing of the change stays
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def bulk(self) -> Iterator[sqlite3.Connection]:
        """One change of the tables as they are."""
        with self._change():
            yield self._db

    # -- writing -----------------------------------------------------------------------------

    def files(self) -> dict[tuple[str, str], sqlite3.Row]:
        """Rows of all files, by kind and name."""
        rows = self._db.execute("SELECT * FROM files")
        return {(row["kind"], row["name"]): row for row in rows}

    def add(self, name: str, table: Any, groups: Sequence[int], digest: str, n_bytes: int) -> None:
        """Add the rows of a file of trajectories; those that are here already stay, and are read
        from this file from now on. Rows that the file had before, and has no longer, go. Of two
        trajectories with one name, as agents give them again in a run that starts over, the one
        that left later is listed.

        Args:
            groups: numbers of rows of its row groups.
        """
        places = [(g, r) for g, n in enumerate(groups) for r in range(n)]
        keys = [_key(row) for row in table.select(_KEY).to_pylist()]
        found = FileName.of(name)
        is_older = found is not None and found.journal == IMPORTED
        newest = pc.max(table["left_at"].cast(pa.int64())).as_py() or 0
        with self._change():
            before = self._db.execute("SELECT id FROM trajectories WHERE file = ?", (name,))
            gone = {row[0] for row in before.fetchall()}
            here = self._here([uid for uid, *_ in keys])
            left = _plain_times(table.select(["left_at"]))[0].to_pylist()
            moved, added, replaced = [], [], []
            for key, number in _last_to_leave(keys, left).items():
                rowid, time = here.get(key, (None, None))
                if rowid is None:
                    added.append(number)
                elif time == left[number]:
                    gone.discard(rowid)
                    moved.append((name, *places[number], rowid))
                elif (time or 0.0) < left[number]:
                    replaced.append(rowid)
                    added.append(number)
            self._forget(replaced)
            self._db.executemany(
                "UPDATE trajectories SET file = ?, row_group = ?, row = ? WHERE id = ?", moved
            )
            self._insert(name, [places[number] for number in added], table, added, is_older)
            self._forget(sorted(gone))
            self._note("trajectories", name, digest, n_bytes, len(keys), newest / 1e6)

    def _here(self, uids: Sequence[str]) -> dict[tuple[Any, ...], tuple[int, float | None]]:
        """Ids of the rows of these trajectories that are here, and when they left, by what names
        them (`_key`)."""
        sql = "SELECT uid, channel, attempt, part, id, time FROM trajectories WHERE uid IN "
        rows = self._db.execute(
            f"{sql} (SELECT value FROM json_each(?))", (orjson.dumps(uids).decode(),)
        )
        return {tuple(key): (rowid, time) for *key, rowid, time in rows}

    def _note(self, *values: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)

    def _insert(
        self,
        name: str,
        places: Sequence[tuple[int, int]],
        table: Any,
        numbers: Sequence[int],
        is_older: bool,
    ) -> None:
        """Insert rows of a file's table.

        Args:
            places: row group and row in it, of each.
            numbers: of the rows in the table.
            is_older: than all that is here: an import.
        """
        if not numbers:
            return
        rows = _plain_times(table.select(_READ).take(numbers)).to_pylist()
        ids = "SELECT {}(id) FROM trajectories"  # one at a time, which reads no table
        sql = f"SELECT ({ids.format('min')}), ({ids.format('max')})"
        oldest, newest = self._db.execute(sql).fetchone()
        first = min(0, oldest or 0) - len(rows) if is_older else max(0, newest or 0) + 1
        tags: list[tuple[str, int]] = []
        values: list[dict[str, Any]] = []
        tries: dict[str, list[Mapping[str, Any]]] = {}
        for rowid, (place, row) in enumerate(zip(places, rows, strict=True), first):
            prompt = prompt_key(row)
            where = {"id": rowid, "file": name, "row_group": place[0], "row": place[1]}
            values.append(where | {"prompt": prompt} | listed(row))
            tags += [(tag, rowid) for tag in row["tags"] or ()]
            if row["state"] == "complete":
                tries.setdefault(prompt, []).append(row)
        names, marks = ", ".join(f'"{key}"' for key in values[0]), ", ".join("?" * len(values[0]))
        self._db.executemany(
            f"INSERT INTO trajectories ({names}) VALUES ({marks})",
            (tuple(each.values()) for each in values),
        )
        self._db.executemany("INSERT INTO tags VALUES (?, ?)", tags)
        texts = [
            (rowid, segmented(text[:TEXT_CHARACTERS]))
            for rowid, text in enumerate(said_in(table, numbers), first)
            if text
        ]
        self._db.executemany("INSERT INTO texts VALUES (?, ?)", texts)
        self._db.executemany("INSERT INTO words(rowid, body) VALUES (?, ?)", texts)
        self._db.executemany(_COUNT_TRIES, (_counted(*each) for each in tries.items()))

    def add_feedback(self, name: str, table: Any, digest: str, n_bytes: int) -> None:
        """Add the rows of a file of feedback."""
        rows = table.to_pylist()
        with self._change():
            self._db.execute("DELETE FROM feedback WHERE file = ?", (name,))
            for row in rows:
                self._db.execute(
                    "INSERT OR REPLACE INTO feedback VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        row["trajectory_uid"],
                        row["part"],
                        row["channel"],
                        row["prompt_uid"],
                        name,
                        _seconds(row["at"]),
                        row["reward"],
                        row["step_index"],
                        row["why"],
                    ),
                )
            newest = max((_seconds(row["at"]) or 0.0 for row in rows), default=0.0)
            self._note("feedback", name, digest, n_bytes, len(rows), newest)

    def forget_file(self, kind: str, name: str) -> None:
        """Take out a file and all that is read from it."""
        with self._change():
            if kind == "trajectories":
                ids = self._db.execute("SELECT id FROM trajectories WHERE file = ?", (name,))
                self._forget([row[0] for row in ids.fetchall()])
            else:
                self._db.execute("DELETE FROM feedback WHERE file = ?", (name,))
            self._db.execute("DELETE FROM files WHERE kind = ? AND name = ?", (kind, name))

    def replace_file(self, kind: str, name: str, by: str) -> None:
        """Forget a file whose rows were added from another one."""
        with self._change():
            self._db.execute("DELETE FROM files WHERE kind = ? AND name = ?", (kind, name))
            if kind == "feedback":
                self._db.execute("UPDATE feedback SET file = ? WHERE file = ?", (by, name))

    def remove(self, uids: Iterable[str]) -> None:
        """Take out trajectories: nobody finds them from now on; their words may still be in the
        database's files."""
        with self._change():
            for uid in uids:
                ids = self._db.execute("SELECT id FROM trajectories WHERE uid = ?", (uid,))
                self._forget([row[0] for row in ids.fetchall()])
                self._db.execute("DELETE FROM feedback WHERE uid = ?", (uid,))

    def forget(self, uids: Iterable[str]) -> None:
        """Take out trajectories; afterwards the database's files have no byte of their text.

        Raises:
            DataPoolError: somebody reads it all the time, so that its log could not be emptied.
        """
        self.remove(uids)
        # Segments of the index that were written before still have its words: merge them into one.
        self._db.execute("INSERT INTO words(words) VALUES ('optimize')")
        for _ in range(CHECKPOINTS):  # each waits 5 s for readers, SQLite's default
            if not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                return
        raise DataPoolError(
            f"{self.path}-wal still has what is deleted, because somebody has read {self.path} all "
            "the time; end what reads it and delete again"
        )

    def _forget(self, ids: Sequence[int]) -> None:
        prompts = set()
        for each in ids:
            one = (each,)
            body = self._db.execute("SELECT body FROM texts WHERE id = ?", one).fetchone()
            if body is not None:
                delete = "INSERT INTO words(words, rowid, body) VALUES ('delete', ?, ?)"
                self._db.execute(delete, (each, body[0]))
                self._db.execute("DELETE FROM texts WHERE id = ?", one)
            found = self._db.execute("SELECT prompt, tags FROM trajectories WHERE id = ?", one)
            for prompt, tags in found.fetchall():
                prompts.add(prompt)
                for tag in orjson.loads(tags):
                    self._db.execute("DELETE FROM tags WHERE tag = ? AND id = ?", (tag, each))
            self._db.execute("DELETE FROM trajectories WHERE id = ?", one)
        for prompt in prompts:
            self._count_again(prompt)

    def _count_again(self, prompt: str) -> None:
        left = self._db.execute(
            "SELECT count(*), count(reward), coalesce(sum(reward > 0), 0), total(reward),"
            " max(reward), min(reward), min(CASE WHEN reward > 0 THEN time END),"
            " min(CASE WHEN reward > 0 THEN version END), max(time), min(first)"
            " FROM trajectories WHERE prompt = ? AND state = 'complete'",
            (prompt,),
        ).fetchone()
        if not left[0]:
            self._db.execute("DELETE FROM prompts WHERE prompt = ?", (prompt,))
            return
        self._db.execute(
            "UPDATE prompts SET tries = ?, scored = ?, rewarded = ?, total = ?, best = ?,"
            " worst = ?, solved_at = ?, solved_version = ?, newest = ?, first = ? WHERE prompt = ?",
            (*left, prompt),
        )

    def used_bytes(self) -> int:
        """Bytes of pages that hold something; others are used again."""
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def count(self) -> int:
        """Number of trajectories."""
        return int(self._db.execute("SELECT count(*) FROM trajectories").fetchone()[0])

    # -- reading -----------------------------------------------------------------------------

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows that a statement of ours selects."""
        with closing(self._db.cursor()) as cursor:
            return [dict(row) for row in cursor.execute(sql, values)]

    def is_sound(self) -> str | None:
        """None if SQLite finds no damage; else what it says."""
        try:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as e:
            return str(e)
        return None if found == "ok" else str(found)


def is_outdated(path: Path) -> bool:
    """Return whether another release made the catalogue in a file, if there is one."""
    if not path.is_file():
        return False
    with closing(Catalogue(path)) as catalogue:
        return catalogue.query("PRAGMA user_version") != [{"user_version": VERSION}]


def listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file as lists have it: what it is filtered and sorted by, and what was said first
    and last."""
    opened, closed = _seconds(row["opened_at"]), _seconds(row["closed_at"])
    return {
        "uid": row["trajectory_uid"],
        **{key: row[key] for key in ("channel", "attempt", "part", "prompt_uid")},
        **{key: row[key] for key in ("state", "reason", "left", "drop_reason", "reward")},
        "version": row["newest_version"],
        "oldest_version": row["oldest_version"],
        "turns": row["n_steps"],
        "tokens": row["n_tokens"],
        "response_tokens": row["n_response_tokens"],
        "data_source": row["data_source"],
        "user": row["user"],
        "tags": orjson.dumps(row["tags"] or []).decode(),
        "time": _seconds(row["left_at"]),
        "seconds": None if closed is None or opened is None else closed - opened,
        "first": preview(row["first_user"]),
        "last": preview(row["last_reply"]),
    }


def _counted(prompt: str, tries: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """A row of `prompts` for these tries of one."""
    one = tries[0]
    rewards = [row["reward"] for row in tries if row["reward"] is not None]
    solved = [row for row in tries if row["reward"] is not None and row["reward"] > 0]
    versions = [row["newest_version"] for row in solved if row["newest_version"] is not None]
    solved_at = [row["left_at"] for row in solved if row["left_at"] is not None]
    times = [row["left_at"] for row in tries if row["left_at"] is not None]
    return (
        prompt,
        one["data_source"],
        one["instance_id"],
        preview(one["first_user"]),
        len(tries),
        len(rewards),
        len(solved),
        sum(rewards),
        max(rewards, default=None),
        min(rewards, default=None),
        min(solved_at, default=None),
        min(versions, default=None),
        max(times, default=None),
        one["channel"],
    )


def prompt_key(row: Mapping[str, Any]) -> str:
    """The prompt that a trajectory is a try of: its task, where it names one, else its first
    message; else its group."""
    task = row["instance_id"]
    if task is not None:
        said = f"{row['data_source'] or ''}\0{task}"
    else:
        said = row["first_user"] or row["prompt_uid"]
    return blake2b(said.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values of a file's row that name it."""
    return row["trajectory_uid"], row["channel"], row["attempt"], row["part"]


def _last_to_leave(
    keys: Sequence[tuple[Any, ...]], left: Sequence[float]
) -> dict[tuple[Any, ...], int]:
    """Number of the row that left last, of each name: a pool forgets uids, and agents give them
    again.

    Args:
        left: time at which each row left the pool.
    """
    last: dict[tuple[Any, ...], int] = {}
    for number, key in enumerate(keys):
        if key not in last or left[last[key]] <= left[number]:
            last[key] = number
    return last


def _plain_times(table: Any) -> Any:
    """The table with its times as seconds: Arrow takes 2 µs to make a `datetime`."""
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            micros = table[i].cast(pa.int64()).cast(pa.float64())
            table = table.set_column(i, field.name, pc.divide(micros, 1e6))
    return table


def _seconds(time: datetime | float | None) -> float | None:
    return time.timestamp() if isinstance(time, datetime) else time
