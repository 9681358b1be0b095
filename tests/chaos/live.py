"""`python -m tests.chaos live [--minutes M] [--seed S]`: the traffic of a service trains its model.

    stepwell serve          ├──────────────────────────────────────────────────────────────┤
    the service, 20 agents      ├──────────────────────────────────────────────────────────┤
    clients who remember        ├──────────────────────────────────────────────────────────┤
    stepwell train --attach          ├──────────✗ kill -9    ├───────────────────┤ ├ the end ┤
    the archiver                ├────────✗─┼────────✗─┼───── …  kill -9, again and again ────┤
                                ├ ① ┤                                        ├ ② ┤

① and ② are the first and the last tenth of the minutes; the trainer is attached after the first
tenth, killed in the middle and attached again a twentieth later. At the end it is interrupted and
attached once more for two optimizer steps, so that the books are closed by a checkpoint. Then the
books are compared: the service's own log (`examples/live/service.py` repeats no call), the
trainer's ledger, the pool's sums and the gateway's statistics. And every conversation that a client
saw is looked for by its uid: with its text, its state and its reason, in the archive or in what is
left of the pool (`talkers.py`); of the user who is deleted no file has a byte.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson

from benchmarks.checks import BenchResult
from benchmarks.processes import python
from stepwell import connect
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.copies import OLD, ROLLOUTS, VALIDATION
from stepwell.datapool.files.trained import TRAINED
from stepwell.datapool.ops import Delete
from stepwell.datapool.remote.stopped import StoppedShard, stopped_pool
from stepwell.datapool.types import TRAIN
from stepwell.run.deletion import delete
from stepwell.run.folder import archive_folder, journal_folder, read_run
from stepwell.show.archive import archive_rest
from stepwell.show.run import limits_of
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.ledger import LEDGER, NOT_TRAINED, audit
from stepwell.trainer.metrics import read_metrics
from tests.chaos.talkers import FORGOTTEN, Talk, Talkers, as_lines, bytes_of, missing

WINDOW, KILL, AGAIN = 0.1, 0.5, 0.55
"""Shares of the minutes: the first and last part to compare; the kill; the second attach."""
ROWS = 10
PATIENCE_S = 300.0
"""For a process to come up, or to end."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended as it should."""
GAIN = 0.2
"""By so much the share of right answers rises at the least."""
OPTIONS = (
    "logging.wandb=disabled",
    "logging.console=plain",
    "gateway.port=0",
    # Served unrecorded, a conversation would be nowhere, as its client was told.
    "gateway.on_pool_failure=refuse",
)
ARCHIVER_LIVES_S = (5.0, 40.0)
"""Seconds after which the archiver is killed, at least and at most."""


async def _end(process: asyncio.subprocess.Process, how: signal.Signals) -> bool:
    """End the process; True if it was still there to be ended."""
    if process.returncode is not None:
        return False
    process.send_signal(how)
    async with asyncio.timeout(PATIENCE_S):
        await process.wait()
    return True


async def _until(
    happened: Callable[[], bool], process: asyncio.subprocess.Process, log: Path
) -> None:
    """
    Raises:
        RuntimeError: the process ended before.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            if process.returncode is not None:
                raise RuntimeError(f"a process ended with {process.returncode}; see {log}")
            await asyncio.sleep(0.2)


async def run(
    *,
    minutes: Annotated[float, "from the first call to the last comparison"] = 10.0,
    seed: Annotated[int, "of the service's questions and of the trainer"] = 0,
    folder: Annotated[Path | None, "kept, with the logs; none: a temporary one"] = None,
) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="stepwell-live-") as temporary:
        base = Path(temporary) if folder is None else folder
        base.mkdir(parents=True, exist_ok=True)
        return await _journey(base, minutes * 60, seed)


async def _journey(base: Path, seconds: float, seed: int) -> BenchResult:
    live, calls, log = base / "live", base / "service.jsonl", base / "trainer.txt"
    attach = ("-m", "stepwell", "train", "--attach", str(live))
    async with AsyncExitStack() as stack:
        start = (
            "-m",
            "stepwell",
            "serve",
            "--config",
            "live",
            f"run.dir={live}",
            *OPTIONS,
        )
        served = await stack.enter_async_context(
            python(*start, f"run.seed={seed}", output=base / "serve.txt")
        )
        told = base / "serve.txt"
        await _until(lambda: "Ctrl-C" in told.read_text(), served, told)
        found = re.search(r"OPENAI_BASE_URL=(\S+)/v1", told.read_text())
        if found is None:
            raise RuntimeError(f"serve does not say where it is: {told.read_text()}")
        url = found[1]
        service = await stack.enter_async_context(
            python(
                "-m",
                "examples.live.service",
                str(seed),
                output=calls,
                OPENAI_BASE_URL=f"{url}/v1",
                OPENAI_API_KEY="any",
            )
        )
        await _until(lambda: bool(_rows(calls)), service, calls)
        began = time.time()
        talkers = Talkers(url, seed)
        background = [
            asyncio.create_task(talkers.run()),
            asyncio.create_task(_kill_archivers(live, seed, archivers := list[int]())),
        ]
        stack.push_async_callback(_stop, background)

        async def at(share: float) -> None:
            await asyncio.sleep(max(0.0, began + share * seconds - time.time()))

        await at(WINDOW)
        async with python(*attach, output=log) as trainer:
            await at(KILL)
            lived = [await _end(trainer, signal.SIGKILL)]
        at_the_kill = _rows(calls)[-1].get("version", 0)
        steps_at_the_kill = _optimizer_steps(live)
        await at(AGAIN)
        async with python(*attach, output=log) as trainer:
            await at(1.0)
            ended = time.time()
            lived.append(await _end(trainer, signal.SIGINT))
            codes = [trainer.returncode]
        total = CheckpointStore(live / "checkpoints").steps()[-1] + 2
        async with (
            python(*attach, f"trainer.total_steps={total}", output=log) as trainer,
            asyncio.timeout(PATIENCE_S),
        ):
            await trainer.wait()
        lived += [trainer.returncode == 0, await _end(service, signal.SIGTERM)]
        await _stop(background)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/statistics") as answer:
            gateway = await answer.json()
        async with connect(live) as pool:
            groups = (await pool.get_statistics(TRAIN))["groups"]
        lived.append(await _end(served, signal.SIGINT))
        codes.append(served.returncode)
    conversations = [row for row in _rows(calls) if row["at"] <= ended]
    result = _compare(conversations, began, ended, at_the_kill)
    _compare_books(result, live, groups)
    talked = [*talkers.talks, *_talks_of(_rows(calls))]
    (base / "talks.jsonl").write_text(as_lines(talked))
    await _search(result, live, talked)
    result.figures["archivers_killed"] = len(archivers)
    result.zero(clients_failures=len(talkers.failures))
    if talkers.failures:
        result.figures["failures"] = [{"what": line} for line in talkers.failures[:5]]
    result.figures.update(
        optimizer_steps=total,
        optimizer_steps_at_the_kill=steps_at_the_kill,
        latency_added_p50_ms=gateway["added_latency"]["p50_ms"],
        latency_added_p99_ms=gateway["added_latency"]["p99_ms"],
        calls_stored=gateway["calls"]["stored"],
    )
    result.zero(
        share_of_calls_unrecorded=gateway["recording"]["unrecorded_share"],
        processes_that_ended_by_themselves=lived.count(False),
        interrupted_that_ended_otherwise=sum(code != INTERRUPTED for code in codes),
    )
    return result


async def _kill_archivers(live: Path, seed: int, killed: list[int]) -> None:
    """Kill the pool's archiver again and again; the pool starts another one."""
    dice = random.Random(seed)
    async with connect(live) as pool:
        while True:
            await asyncio.sleep(dice.uniform(*ARCHIVER_LIVES_S))
            described = await pool.describe()
            for shard in described.get("shards", [described]):
                if (pid := shard["archive"]["pid"]) is not None and pid not in killed:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    killed.append(pid)


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure


def _talks_of(rows: Sequence[dict[str, Any]]) -> list[Talk]:
    """The conversations of the service, each by its question and its last reply."""
    return [
        Talk(row["uid"], "", [row["question"]], [row["reply"]], "complete", row["score"])
        for row in rows
        if "score" in row
    ]


async def _search(result: BenchResult, live: Path, talks: Sequence[Talk]) -> None:
    """Look for what clients saw in what the run left; delete a user, and look for their words."""
    run = read_run(live)
    await archive_rest(live, run)
    archive = ArchiveReader(archive_folder(live))
    pool = stopped_pool(journal_folder(live), limits_of(run))
    unarchived = sum(
        port.backlog["unarchived"] for port in pool.shards if isinstance(port, StoppedShard)
    )
    lost, places = await missing(talks, pool, archive)
    forgotten = [talk for talk in talks if talk.user == FORGOTTEN]
    early = [word for talk in forgotten if talk.has_gone for word in talk.words]
    # Before the other half is deleted, which would mend it; the journal erases by itself.
    found = bytes_of(early, archive_folder(live), *copies_in(live))
    await delete(live, Delete(user=FORGOTTEN))
    words = [word for talk in forgotten for word in talk.words]
    found += bytes_of(words, live, archive_folder(live), journal_folder(live))
    known = [talk.uid for talk in forgotten if talk.words and archive.find(talk.uid)]
    result.zero(
        conversations_missing=len(lost),
        files_with_words_of_the_deleted_user=len(found),
        conversations_of_the_deleted_user_found=len(known),
        files_damaged=len(archive.check()),
        left_unarchived=unarchived,
    )
    result.at_least("conversations_of_the_deleted_user", len(forgotten), 1)
    result.figures["conversations_found"] = [places]
    if lost or found:
        result.figures["missing"] = [{"what": line} for line in [*lost, *found][:20]]


def copies_in(live: Path) -> list[Path]:
    """The trainer's copies of trajectories."""
    return [live / name for name in (TRAINED, VALIDATION, ROLLOUTS, OLD)]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows that the service logged. It may be writing its last line."""
    lines = path.read_bytes().splitlines()
    return [orjson.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


def _optimizer_steps(live: Path) -> int:
    return len(read_metrics(live / "metrics.jsonl"))


def _compare(
    rows: Sequence[dict[str, Any]], began: float, ended: float, at_the_kill: int
) -> BenchResult:
    """By the service's log: failures, and the score as it went."""
    scored = [row for row in rows if "score" in row]
    window = (ended - began) * WINDOW
    parts = [[row for row in scored if int((row["at"] - began) / window) == i] for i in range(ROWS)]
    before, after = (statistics.fmean(r["score"] for r in part) for part in (parts[0], parts[-1]))
    last = max(row["version"] for row in scored)
    result = BenchResult()
    result.zero(calls_failed=len(rows) - len(scored))
    result.at_least("score_gained", after - before, GAIN)
    result.at_least("versions_served_after_the_kill", last - at_the_kill, 1)
    result.figures.update(conversations=len(scored), score_before=before, score_after=after)
    result.figures["score"] = [
        {
            "until_s": round((i + 1) * window),
            "conversations": len(part),
            "score": statistics.fmean(r["score"] for r in part),
            "version": max(r["version"] for r in part),
            "conversation_p50_s": statistics.median(r["seconds"] for r in part),
        }
        for i, part in enumerate(parts)
        if part
    ]
    return result


def _compare_books(result: BenchResult, live: Path, groups: dict[str, Any]) -> None:
    """By the ledger and the pool: every group is somewhere, and none was trained twice."""
    found = audit(live / "checkpoints" / LEDGER)
    states = ("open", "ready", "leased", "acked", "dropped")
    settled = found.trained + found.dropped[NOT_TRAINED]
    result.zero(
        groups_trained_twice=len(found.doubled),
        groups_unaccounted=abs(groups["submitted"] - sum(groups[state] for state in states)),
        groups_acked_but_not_in_the_ledger=abs(groups["acked"] - settled),
    )
    result.figures["groups"] = [{state: groups[state] for state in ("submitted", *states)}]
    dropped = ", ".join(f"{reason}: {n}" for reason, n in groups["drop_reasons"].items())
    result.figures["groups_dropped"] = dropped or "none"
    result.figures["groups_trained"] = found.trained
