"""A run that is served, agents that nobody of ours started, and a trainer that is killed and
attached again: the agents notice nothing but better weights. And `stepwell try` at its gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepwell import connect
from stepwell.backends.engines.client import EngineClient
from stepwell.cli.main import main
from stepwell.datapool.types import TRAIN, VAL
from stepwell.run.folder import live_run
from stepwell.trainer.ledger import LEDGER, audit
from stepwell.trainer.metrics import read_metrics
from stepwell.trainer.validation import ENOUGH
from tests.builders import until
from tests.e2e.commands import start
from tests.e2e.test_try import harness

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AGENTS = 3
REST_S = 0.2
"""Between two groups of an agent, until enough is held out."""
LONG_REST_S = 1.0
"""The same from then on: a trainer that starts takes longer than two groups need."""
LIMIT_S = 240.0
SMALL = (
    "logging.wandb=disabled",
    "logging.console=plain",
    "gateway.port=0",
    "trainer.train_batch_size=2",
    "trainer.checkpoint_every=1",
    "rollout.max_tokens=8",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.max_queue_size=null",
    "gateway.holdout=0.3",
)


@asynccontextmanager
async def command(*arguments: str, log: Path) -> AsyncIterator[ForkServerProcess]:
    process = start(*arguments, log=log)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def said(log: Path) -> str:
    return log.read_text()


async def while_it_runs(
    process: ForkServerProcess, log: Path, happened: Callable[[], bool]
) -> None:
    """Wait for what happens before the process ends, or as it ends."""

    def has_happened() -> bool:
        if happened():
            return True
        assert process.is_alive(), said(log)
        return False

    await until(has_happened, LIMIT_S)


@dataclass
class Service:
    """Agents of somebody else's: two answers to each question, the second one is the better."""

    gateway: str
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rest_s: float = REST_S

    async def serve(self, stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as http:
            while not stop.is_set():
                group = await self._post(http, f"{self.gateway}/v1/groups", {"n": 2})
                for reward, opened in enumerate(group.get("trajectories", ())):
                    await self._answer(http, opened["base_url"], reward)
                await asyncio.sleep(self.rest_s)

    async def _answer(self, http: aiohttp.ClientSession, url: str, reward: float) -> None:
        messages = [{"role": "user", "content": f"What is {self.answers} + 2?"}]
        await self._post(http, f"{url}/v1/chat/completions", {"model": "m", "messages": messages})
        await self._post(http, f"{url}/v1/complete_trajectory", {"reward": reward})
        self.answers += 1

    async def _post(
        self, http: aiohttp.ClientSession, url: str, body: dict[str, object]
    ) -> dict[str, Any]:
        async with http.post(url, json=body) as response:
            if response.status != 200:
                self.failures.append(f"{url}: {response.status} {await response.text()}")
                return {}
            if (version := response.headers.get("x-stepwell-version")) is not None:
                self.versions.append(int(version))
            answer: dict[str, Any] = await response.json()
            return answer


def steps_of(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [record["step"] for record in read_metrics(path)] if path.exists() else []


@dataclass(frozen=True)
class Served:
    """A run that `stepwell serve` serves."""

    process: ForkServerProcess
    folder: Path
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One run for all tests of this file; SIGINT ends it."""
    path = tmp_path_factory.mktemp("served")
    folder, log = path / "live", path / "serve.txt"
    run = ("--config", "live", f"run.dir={folder}", "run.name=e2e", *SMALL)
    process = start("serve", *run, log=log)
    try:
        asyncio.run(while_it_runs(process, log, lambda: "Ctrl-C" in said(log)))
        yield Served(process, folder, log)
        os.kill(process.pid, signal.SIGINT)
        process.join(LIMIT_S)
        assert process.exitcode == 130, said(log)
    finally:
        process.kill()
        process.join()


async def test_a_trainer_is_killed_and_attached_again_and_no_agent_notices(
    served: Served, tmp_path: Path
) -> None:
    folder = served.folder
    told = said(served.log)
    assert f"stepwell train --attach {folder}" in told
    found = re.search(r"OPENAI_BASE_URL=(\S+)/v1", told)
    assert found is not None
    service, stop = Service(found[1]), asyncio.Event()
    agents = [asyncio.create_task(service.serve(stop)) for _ in range(AGENTS)]
    async with connect(folder) as pool:

        async def is_comparable() -> bool:
            """Enough of what is held out is of version 0; each group has two answers."""
            return (await pool.get_statistics(VAL))["groups"]["ready"] >= ENOUGH / 2  # type: ignore[no-any-return]

        await until(is_comparable, LIMIT_S)
    service.rest_s = LONG_REST_S

    log = tmp_path / "first.txt"
    async with command("train", "--attach", str(folder), log=log) as trainer:
        await while_it_runs(trainer, log, lambda: len(steps_of(folder)) >= 3)
        urls = live_run(folder).engines.urls  # type: ignore[union-attr]  # it is up
        async with EngineClient(urls[0]) as engine:
            await engine.pause("retract")  # as if it had begun to publish
        trainer.kill()
    killed_after, answers = max(steps_of(folder)), service.answers
    await while_it_runs(served.process, served.log, lambda: service.answers > answers + 2 * AGENTS)

    log = tmp_path / "second.txt"
    total = killed_after + 3
    again = ("train", "--attach", str(folder), f"trainer.total_steps={total}")
    async with command(*again, log=log) as trainer:
        await while_it_runs(served.process, served.log, lambda: not trainer.is_alive())
        assert trainer.exitcode == 0, log.read_text()
    assert "resumed at optimizer step" in log.read_text()

    answers = service.answers
    # it goes on without the trainer
    await while_it_runs(served.process, served.log, lambda: service.answers > answers)
    stop.set()
    await asyncio.gather(*agents)
    async with connect(folder) as pool:
        groups = (await pool.get_statistics(TRAIN))["groups"]

    assert service.failures == []
    assert steps_of(folder)[-1] == total
    ledger = audit(folder / "checkpoints" / LEDGER)
    assert ledger.doubled == ()
    assert ledger.trained == 2 * total
    assert ledger.trained == groups["acked"]
    assert groups["dropped"] == 0
    summary = json.loads(said(folder / "summary.json"))
    assert None not in (summary["eval_before"], summary["eval_after"])  # of what is held out
    assert service.versions[-1] > killed_after
    assert service.versions[0] == 0


def test_a_rollout_that_is_tried_at_its_gateway_and_fails_is_shown_with_its_reason(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["try", harness(tmp_path, 3), shlex.quote("What?"), "--run", str(served.folder)]
    assert main(argv) == 1
    shown = capsys.readouterr().out
    assert "failed: HarnessError: exit status 3: asked twice" in shown


def test_a_rollout_that_is_tried_on_a_task_of_the_data_is_graded_as_it_says(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = harness(tmp_path, 0)
    rows = [
        {"question": "?", "answer": "", "instance_id": word, "metadata": {"echo": word}}
        for word in ("0.75", "0.25")
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grade = {"command": ["sh", "-c", "echo {task.metadata.echo} > r"], "file": "r"}
    keys = ["data=tasks.jsonl", f"rollout.harness.grade={json.dumps(grade)}"]
    where = ["--run", str(served.folder)]
    assert main(["try", mine, "--json", "--task", "1", *where, *keys]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ended"] == "complete"
    (branch,) = told["branches"]
    assert branch["reward"] == 0.25
    assert branch["prompt_uid"].startswith("0.25-")
