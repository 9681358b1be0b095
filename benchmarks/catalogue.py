"""`python -m benchmarks catalogue [--trajectories N] [--folder F]`: what a page of the archive's
catalogue costs at a million trajectories.

The rows are written straight into a catalogue's tables: prompts that are tried 16 times each, texts
of some 640 characters whose words are as frequent as those of a language (Zipf). Then lists are
asked for as the dashboard and `stepwell data query` ask. The figures are milliseconds of processor,
the least of three: the file is in the page cache, as after the first page.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.checks import BenchResult
from stepwell.datapool.files.archive.catalogue import ORDERS, Catalogue
from stepwell.datapool.files.archive.folder import ArchiveFolder
from stepwell.datapool.files.archive.reader import ArchiveReader, parse
from stepwell.trainer.errors import ConfigError

TRIES = 16
WORDS = 110
"""Words of a text: about 640 characters."""
VOCABULARY = 200_000
BATCH = 20_000
WITHOUT_HITS = (
    "reward > 1000",
    "version < 0",
    "tokens == 1 and reward < 0.2",
    "reward < -1 and version >= 10 and turns > 3",
    "user == 'nobody'",
    "data_source == 'none'",
    "state == 'none' and channel == 'train'",
    "reason == 'none'",
    "seconds > 1000000 and attempt > 0",
    "not (reward >= 0)",
    "time > '2100-01-01' or time < '1990-01-01'",
    "tag == 'none'",
    "'nobodysaidthis' in text",
)


async def run(
    *,
    trajectories: Annotated[int, "rows"] = 1_000_000,
    folder: Annotated[Path | None, "kept, with the catalogue; none: a temporary one"] = None,
) -> BenchResult:
    """
    Raises:
        ConfigError: the folder's catalogue is of another number, such as one that was not filled.
    """
    with tempfile.TemporaryDirectory(prefix="stepwell-catalogue-") as temporary:
        base = Path(temporary) if folder is None else folder
        return _measured(base, trajectories)


def _measured(base: Path, n: int) -> BenchResult:
    archive = ArchiveFolder(base)
    archive.make()
    path = archive.catalogue(0)
    result = BenchResult()
    if not path.is_file():
        began = time.process_time()
        fill(path, n)
        result.figures["us_a_row"] = (time.process_time() - began) / n * 1e6
    reader = ArchiveReader(base)
    result.figures["trajectories"] = found = reader.counts()["trajectories"]
    if found != n:
        raise ConfigError(
            f"folder is {base}, whose catalogue has {found:,} trajectories, not {n:,}; name a new "
            "one, or remove it"
        )
    result.figures["bytes_a_row"] = path.stat().st_size / n

    def page(query: str = "", search: str | None = None, **how: Any) -> Callable[[], Any]:
        return lambda: reader.rows(parse(query), search, limit=100, **how)

    orders = {order: least(page(order=order)) for order in ORDERS}
    result.at_most("ms_indexed_page", max(orders.values()), 100)
    result.figures["indexed_pages"] = [{"order": o, "ms": ms} for o, ms in orders.items()]
    some = ("reward < 0.2 and version >= 10", "left == 'dropped'", "user == 'user7'")
    result.at_most("ms_filtered_page", max(least(page(query)) for query in some), 500)
    none = {query: least(page(query)) for query in WITHOUT_HITS}
    result.at_most("ms_filter_without_hits", max(none.values()), 500)
    result.figures["filters_without_hits"] = [{"query": q, "ms": ms} for q, ms in none.items()]
    frequent, rare = "w3", f"w{VOCABULARY - 7}"
    newest = {word: least(page(search=word)) for word in (frequent, rare, '"w1 w2"')}
    result.at_most("ms_text_newest_first", max(newest.values()), 100)
    result.figures["text_newest_first"] = [{"search": s, "ms": ms} for s, ms in newest.items()]
    found = {word: least(page(search=word, order="relevance")) for word in (frequent, "w3 w50")}
    result.at_most("ms_text_by_relevance", max(found.values()), 500)
    never = least(lambda: reader.prompts(never_rewarded=True))
    result.at_most("ms_never_rewarded", never, 100)
    return result


def least(ask: Callable[[], Any]) -> float:
    """Milliseconds of processor, of the best of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        ask()
        taken.append(time.process_time() - began)
    return min(taken) * 1e3


def fill(path: Path, n: int) -> None:
    """Make a catalogue of so many trajectories."""
    catalogue = Catalogue(path, writes=True)
    with catalogue.bulk() as db:
        for rows, texts in _rows(n):
            names = ", ".join(f'"{name}"' for name in rows[0])
            marks = ", ".join("?" * len(rows[0]))
            insert = f"INSERT INTO trajectories ({names}) VALUES ({marks})"
            db.executemany(insert, [tuple(row.values()) for row in rows])
            db.executemany("INSERT INTO texts VALUES (?, ?)", texts)
            db.executemany("INSERT INTO words(rowid, body) VALUES (?, ?)", texts)
            tags = [("looked at", row["id"]) for row in rows if row["id"] % 1000 == 0]
            db.executemany("INSERT INTO tags VALUES (?, ?)", tags)
        db.execute(
            "INSERT INTO prompts SELECT prompt, min(data_source), NULL, min(first), count(*),"
            " count(reward), sum(reward > 0), total(reward), max(reward), min(reward),"
            " min(CASE WHEN reward > 0 THEN time END), NULL, max(time), 'train'"
            " FROM trajectories GROUP BY prompt"
        )
    catalogue.close()


def _rows(n: int) -> Iterator[tuple[list[dict[str, Any]], list[tuple[int, str]]]]:
    dice = np.random.default_rng(0)
    names = np.array([f"w{i}" for i in range(VOCABULARY)])
    for first in range(1, n + 1, BATCH):
        ids = range(first, min(first + BATCH, n + 1))
        words = names[np.minimum(dice.zipf(1.2, (len(ids), WORDS)), VOCABULARY - 1)]
        texts = [(i, " ".join(of)) for i, of in zip(ids, words.tolist(), strict=True)]
        rewards = (dice.random(len(ids)) < dice.random(len(ids)) ** 2).astype(float).tolist()
        tokens = dice.integers(200, 20_000, len(ids)).tolist()
        yield [_row(i, rewards[k], tokens[k], texts[k][1]) for k, i in enumerate(ids)], texts


def _row(i: int, reward: float, tokens: int, text: str) -> dict[str, Any]:
    at = 1.79e9 + i
    return {
        "id": i,
        "uid": f"{i:032x}",
        "channel": "train",
        "attempt": 0,
        "part": 0,
        "prompt_uid": f"prompt-{i // TRIES:028x}",
        "file": "0-00000000-000000000001-000000000002.parquet",
        "row_group": 0,
        "row": i,
        "state": "aborted" if i % 50 == 0 else "complete",
        "reason": "timeout" if i % 50 == 0 else None,
        "left": "dropped" if i % 10 == 0 else "acked",
        "drop_reason": "zero_variance" if i % 10 == 0 else None,
        "reward": None if i % 50 == 0 else reward,
        "version": i // 1000,
        "oldest_version": i // 1000,
        "turns": 1 + i % 7,
        "tokens": tokens,
        "response_tokens": tokens // 4,
        "data_source": f"source{i % 5}",
        "user": f"user{i % 997}",
        "tags": json.dumps(["looked at"] if i % 1000 == 0 else []),
        "time": at,
        "seconds": float(i % 60),
        "prompt": f"{i // TRIES:016x}",
        "first": text[:240],
        "last": text[-240:],
    }
