"""Clients of a live service who remember what they saw, and the search for it afterwards.

    a declared group of two ──► a conversation each: 1 to 3 turns, then
        completed, with a reward    aborted    aborted, and tried again    left open
        aborted while its last call is under way    rewarded once more after it was trained

Each turn has a word of its own, so that a conversation is known by its text wherever it is. A user
named `FORGOTTEN` has groups of their own; half of them are deleted by `DELETE` while the run is
alive, the others from what is left of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stepwell.datapool.files.archive.conversations import text_of
from stepwell.datapool.files.archive.reader import ArchiveReader, fate, waiting
from stepwell.datapool.questions import ReadDeparted
from stepwell.datapool.remote.client import DataPoolClient

FORGOTTEN = "eve"
SHARE_FORGOTTEN = 0.15
GAVE_UP = "the client gave up"
AT_ONCE = 3
"""Groups that talk at the same time."""


@dataclass
class Talk:
    """A conversation as its client saw it."""

    uid: str
    user: str
    words: list[str] = field(default_factory=list)
    """Word of each turn that was answered and stored."""
    replies: list[str] = field(default_factory=list)
    ended: str = "open"
    """`open`, `complete`, `aborted`, or `late`: a reward more came after it was complete."""
    reward: float | None = None
    """None: it has none, or the client does not know which counts."""
    is_deleted: bool = False


class Talkers:
    """Clients of the gateway at `url`.

    Args:
        seed: of what they do.
        key: the gateway's admin key, if it has one.
    """

    def __init__(self, url: str, seed: int, key: str | None = None) -> None:
        self.talks: list[Talk] = []
        self.failures: list[str] = []
        self._url, self._dice = url, random.Random(seed)
        self._numbers = itertools.count()
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def run(self) -> None:
        """Talk until cancelled."""
        patience = aiohttp.ClientTimeout(60)
        session = aiohttp.ClientSession(timeout=patience, headers=self._headers)
        async with session as http, asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._groups(http))

    async def _groups(self, http: aiohttp.ClientSession) -> None:
        while True:
            try:
                await self._group(http)
            except (aiohttp.ClientError, TimeoutError, LookupError) as e:
                self.failures.append(repr(e)[:300])
            await asyncio.sleep(self._dice.uniform(0.1, 0.6))

    async def _post(self, http: Any, path: str, body: Mapping[str, Any]) -> Any:
        async with http.post(f"{self._url}{path}", json=body) as answer:
            if answer.status != 200:
                raise LookupError(f"{path}: {answer.status} {(await answer.text())[:200]}")
            return await answer.json()

    async def _group(self, http: aiohttp.ClientSession) -> None:
        user = FORGOTTEN if self._dice.random() < SHARE_FORGOTTEN else f"user{next(self._numbers)}"
        tags = [FORGOTTEN] if user == FORGOTTEN else []
        opening = {"n": 2, "metadata": {"user": user}, "tags": tags}
        declared = await self._post(http, "/v1/groups", opening)
        both = [self._talk(http, each, user) for each in declared["trajectories"]]
        await asyncio.gather(*both)
        if user == FORGOTTEN and self._dice.random() < 0.5:
            uid = declared["trajectories"][0]["trajectory_uid"]
            await asyncio.sleep(self._dice.uniform(0, 5))
            gone = {each["trajectory_uid"] for each in declared["trajectories"]}
            for talk in self.talks:
                talk.is_deleted |= talk.uid.removesuffix("-again") in gone
            async with http.delete(f"{self._url}/v1/trajectories/{uid}") as answer:
                if answer.status != 200:
                    raise LookupError(f"DELETE {uid}: {answer.status} {await answer.text()}")

    async def _talk(self, http: Any, address: Mapping[str, str], user: str) -> None:
        talk = Talk(address["trajectory_uid"], user)
        self.talks.append(talk)
        base = urlsplit(address["base_url"]).path  # any replica has it
        messages: list[dict[str, Any]] = []
        for _ in range(self._dice.randint(1, 3)):
            await self._turn(http, talk, base, messages)
            await asyncio.sleep(self._dice.uniform(0, 0.3))
        how = self._dice.choices(
            ("complete", "aborted", "again", "open", "cut", "late"), (8, 2, 1, 1, 1, 2)
        )[0]
        if how in ("complete", "late"):
            talk.reward = float(self._dice.random() < 0.5)
            body = {"reward": talk.reward}
            done = await self._post(http, f"{base}/v1/complete_trajectory", body)
            talk.ended = "complete" if done["outcome"] == "complete" else "aborted"
            if how == "late":
                await asyncio.sleep(self._dice.uniform(0, 10))
                body = {"trajectory_uid": talk.uid, "reward": 0.5}
                given, talk.reward = talk.reward, None  # until it is known
                told = await self._post(http, "/v1/rewards", body)
                talk.reward = 0.5 if told["outcome"] == "accepted" else given
                if told["outcome"] == "late":
                    talk.ended = "late"
        elif how == "again" and talk.uid.endswith("-again"):
            pass  # once is enough
        elif how in ("aborted", "again"):
            body = {"reason": GAVE_UP, "will_retry": how == "again"}
            await self._post(http, f"{base}/v1/abort_trajectory", body)
            talk.ended = "aborted"
            if how == "again":
                own = address["trajectory_uid"]
                again = f"{own.removesuffix('-again')}-again"
                await self._talk(
                    http,
                    {"trajectory_uid": again, "base_url": address["base_url"].replace(own, again)},
                    user,
                )
        elif how == "cut":
            turn = asyncio.create_task(self._cut_turn(http, talk, base, messages))
            try:
                await asyncio.sleep(self._dice.uniform(0, 0.05))
                await self._post(http, f"{base}/v1/abort_trajectory", {"reason": GAVE_UP})
                talk.ended = "aborted"
                await turn
            finally:
                turn.cancel()

    async def _cut_turn(self, *turn: Any) -> None:
        with suppress(LookupError):  # its conversation may be over
            await self._turn(*turn)

    async def _turn(self, http: Any, talk: Talk, base: str, messages: list[dict[str, Any]]) -> None:
        word = f"{talk.user}says{next(self._numbers)}x{self._dice.randrange(1 << 40):010x}"
        asked = {"role": "user", "content": f"What is {word}?"}
        body = {"model": "policy", "messages": [*messages, asked], "max_tokens": 12}
        async with http.post(f"{self._url}{base}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise LookupError(f"{talk.uid}: {answer.status} {(await answer.text())[:200]}")
            message = (await answer.json())["choices"][0]["message"]
            is_stored = answer.headers.get("x-stepwell-recorded") != "false"
        messages += [asked, {k: v for k, v in message.items() if v is not None}]
        if is_stored:
            talk.words.append(word)
            talk.replies.append(text_of(message))


async def missing(
    talks: Sequence[Talk], pool: DataPoolClient, archive: ArchiveReader
) -> tuple[list[str], dict[str, int]]:
    """Return what cannot be found by its uid with its text, its state and its reason; and how many
    were found where.

    Args:
        pool: of the run that ended.
    """
    lines: list[str] = []
    places: dict[str, int] = {}
    for talk in talks:
        if not talk.words or talk.is_deleted:
            continue
        place, why = await _look(talk, pool, archive)
        places[place] = places.get(place, 0) + 1
        lines += [f"{talk.uid} ({talk.ended}): {line}" for line in why]
    return lines, places


async def _look(talk: Talk, pool: DataPoolClient, archive: ArchiveReader) -> tuple[str, list[str]]:
    rows, exported = archive.find(talk.uid), None
    if rows and rows[0]["uid"] == talk.uid:
        exported = archive.read(talk.uid)
    about = next((row for row in rows if row["part"] == 0 and row["uid"] == talk.uid), None)
    place = "archived" if about is not None else "late parts alone"
    steps = () if exported is None else exported.trajectory.steps
    if about is None:
        for channel in await pool.get_statistics():
            page = await pool.read_trajectories(channel, trajectory_uid=talk.uid)
            for each in page.unpack():
                if each.state != "aborted":
                    place, about = "in the pool", {"state": each.state, "left": "live"}
                    steps = (*steps, *each.trajectory.steps)
        for each, row in waiting(await pool.call(ReadDeparted(talk.uid))):
            if each.trajectory.trajectory_uid == talk.uid:
                place, about = "waiting", row if about is None else about
                steps = (*steps, *each.trajectory.steps)
    if about is None:
        return "nowhere", ["it is nowhere"]
    text = "\n".join(text_of(m) for s in steps for m in s.metadata.get("messages") or ())
    why = [f"lacks {word!r}" for word in talk.words if word not in text]
    why += [f"lacks the reply {reply!r}" for reply in talk.replies if reply and reply not in text]
    if talk.ended in ("complete", "late") and about["state"] != "complete":
        why.append(f"is {about['state']}")
    if talk.ended == "aborted" and about["state"] != "aborted":
        why.append(f"is {about['state']}")
    if about.get("left") != "live" or about["state"] == "aborted":
        row = {"reason": None, "drop_reason": None, "left": "live", **about}
        if not fate(row) or (about["state"] == "aborted" and not row["reason"]):
            why.append("has no reason")
        if talk.ended == "aborted" and row["reason"] != GAVE_UP:
            why.append(f"was aborted by {row['reason']!r}")
    has_reward = talk.reward is not None and "reward" in about
    if talk.ended in ("complete", "late") and has_reward and about["reward"] != talk.reward:
        why.append(f"has the reward {about['reward']}, not {talk.reward}")
    if talk.ended == "late" and place == "archived" and not archive.feedback(talk.uid):
        why.append("lacks the reward that came late")
    return place, why


def bytes_of(words: Sequence[str], *places: Path) -> list[str]:
    """Files that hold one of these words.

    Args:
        places: files and folders; what is not there holds none.
    """
    found = []
    inside = {p for place in places for p in (place, *place.rglob("*")) if p.is_file()}
    by_length: dict[int, set[bytes]] = {}
    for word in words:
        by_length.setdefault(len(word.encode()), set()).add(word.encode())
    least, most = min(words, default=""), max(words, default="")
    n_same = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), None)
    begin = re.compile(re.escape(least[:n_same].encode()))  # with which all of them begin
    for path in sorted(inside) if words else ():
        data = path.read_bytes()
        at = [match.start() for match in begin.finditer(data)]
        there = {data[i : i + n] for n in by_length for i in at}
        for known in by_length.values():
            found += [f"{path}: {word.decode()}" for word in sorted(known & there)]
    return found


def as_lines(talks: Sequence[Talk]) -> str:
    """The talks as JSON lines, for somebody who looks into a failure."""
    return "".join(json.dumps(vars(talk)) + "\n" for talk in talks)
