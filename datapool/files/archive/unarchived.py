"""Trajectories that the files of an archive do not have yet, as its lists have them: those of live
groups, and those that wait for the archiver.

    the beginning of a uid ──FindUids──► live:    ListTrajectories, ReadEnds
                                   └───► waiting: ReadDeparted

Owns no state. Does not own what is in the files (`reader.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.datapool.files.archive.conversations import ends_texts
from stepwell.datapool.files.archive.reader import waiting
from stepwell.datapool.inspect.pages import TrajectoryRow
from stepwell.datapool.questions import FOUND, FindUids, FoundUid, ReadDeparted, ReadEnds
from stepwell.datapool.remote.client import DataPoolClient

LISTED = 1000
"""Trajectories of a group that are listed."""
TEXTS = 100
"""Trajectories of which one answer has the first and the last step."""


async def begun(pool: DataPoolClient, start: str, limit: int = FOUND) -> list[dict[str, Any]]:
    """Rows of live and waiting trajectories whose uids begin so; if there are none, of those whose
    groups' do."""
    found: list[FoundUid] = await pool.call(FindUids(start, limit)) if start else []
    own = {each.trajectory_uid for each in found if each.trajectory_uid is not None}
    rows: dict[str, dict[str, Any]] = {}
    for prompt_uid in dict.fromkeys(e.prompt_uid for e in found if e.trajectory_uid or not own):
        for row in await of_group(pool, prompt_uid):
            if not own or row["uid"] in own:
                rows.setdefault(row["uid"], row)
    return list(rows.values())


async def of_group(pool: DataPoolClient, prompt_uid: str) -> list[dict[str, Any]]:
    """Rows of the trajectories of a group that is live or waits."""
    for channel in await pool.get_statistics():
        page = await pool.list_trajectories(channel, limit=LISTED, prompt_uid=prompt_uid)
        if page.items:
            uids = [row.trajectory_uid for row in page.items]
            texts: dict[str, dict[str, str | None]] = {}
            for i in range(0, len(uids), TEXTS):
                ends = await pool.call(ReadEnds(tuple(uids[i : i + TEXTS]), channel))
                texts |= ends_texts(ends)
            return [_live(row, channel, texts.get(row.trajectory_uid, {})) for row in page.items]
    left = await pool.call(ReadDeparted(prompt_uid))
    return [row for _, row in waiting(left) if row["prompt_uid"] == prompt_uid and not row["part"]]


def _live(row: TrajectoryRow, channel: str, texts: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "uid": row.trajectory_uid,
        "prompt_uid": row.prompt_uid,
        "channel": channel,
        "attempt": row.attempt,
        "part": 0,
        "state": row.state,
        "reason": row.reason,
        "left": "live",
        "drop_reason": None,
        "reward": row.reward,
        "version": row.newest_version,
        "oldest_version": row.oldest_version,
        "turns": row.n_steps,
        "tokens": row.n_unique_tokens,
        "time": None,
        "first": texts.get("first"),
        "last": texts.get("last"),
    }
