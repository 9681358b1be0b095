"""A failure is counted against whoever failed: an agent's failure loses its rollout, an outage of
worker, gateway or engine costs time and no prompt. Real gateway, pool, workers and ledger; the
engine answers from a script and can be taken away."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import ray
import uvicorn

from stepwell.datapool import DataPoolClient, PoolConfig
from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.types import TRAIN
from stepwell.gateway.address import bind
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from stepwell.gateway.server import http_protocol
from stepwell.gateway.services import Services
from stepwell.trainer.config import JsonlSource, RolloutConfig
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.ledger import Ledger, audit
from stepwell.trainer.rollout.producer import LOSSES, LOST_IN_A_ROW, Producer
from stepwell.trainer.rollout.worker import INFRASTRUCTURE, RolloutWorker, start_workers
from tests.builders import until
from tests.gateway.conftest import ScriptedEngine, make_tokenizer
from tests.gateway.conftest import stop as stop_server
from tests.helpers import actor_processes, reserved_port

FAST = Tuning(retry_backoff_s=0.05, engine_health_interval_s=0.1, engine_circuit_open_s=0.05)


async def asks_once(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """One chat call, by plain HTTP; fails as the answer does."""
    body = {"messages": [{"role": "user", "content": task["question"]}], "max_tokens": 8}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        return 1.0


async def asks_slowly(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    await asyncio.sleep(0.5)
    return await asks_once(task, base_url, api_key)


async def raises(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise ValueError("no such tool")


async def is_out(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Its own server cannot be reached: that is the agent's failure."""
    raise ConnectionError("my search engine refuses")


@dataclass
class Gateway:
    """A gateway that can be killed and started again at its address."""

    pool: DataPoolClient
    engine: ScriptedEngine
    held: socket.socket = field(default_factory=reserved_port)
    """Its port, also while it is stopped."""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    services: Services = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.held.getsockname()[1]}"

    async def start(self, **options: Any) -> None:
        config = GatewayConfig(**{"engine_retries": 1, "context_length": 4096, **options})
        wiring = Wiring((self.engine.url,), tuning=FAST)
        app = create_app(config, wiring, self.pool, make_tokenizer("chatml"))
        listening = bind(*self.held.getsockname())
        settings = uvicorn.Config(
            app, http=http_protocol(config), log_level="critical", timeout_graceful_shutdown=0
        )
        settings.load()
        server = uvicorn.Server(settings)
        server.lifespan = settings.lifespan_class(settings)
        await server.startup(sockets=[listening])
        self.services = app.state.services

        async def stop() -> None:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await stop_server(server, listening)

        self.stack.push_async_callback(stop)

    async def stop(self) -> None:
        await self.stack.aclose()


@dataclass
class Rig:
    pool: DataPoolClient
    engine: ScriptedEngine
    gateway: Gateway
    folder: Path

    def producer(
        self,
        n_prompts: int,
        workers: list[Any],
        notify: Callable[[str], None] = print,
        epochs: int = 1,
        **rollout: Any,
    ) -> Producer:
        path = self.folder / "prompts.jsonl"
        lines = [
            {"question": f"{i}?", "answer": "1", "instance_id": f"p{i}"} for i in range(n_prompts)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = PromptSource(JsonlSource(kind="jsonl", path=path, epochs=epochs, shuffle=False))
        config = self.config(**rollout)
        ledger = Ledger(self.folder / "ledger.jsonl")
        return Producer(config, source, self.pool, workers, ledger, notify=notify)

    def config(self, **rollout: Any) -> RolloutConfig:
        return RolloutConfig(**{"agent": f"{__name__}:asks_once", "n": 2, "min_n": 2, **rollout})

    async def groups(self) -> dict[str, Any]:
        statistics = await self.pool.get_statistics(TRAIN)
        return cast(dict[str, Any], statistics["groups"])

    async def dropped(self) -> int:
        return cast(int, (await self.groups())["dropped"])

    async def abort_reasons(self) -> dict[str, int]:
        statistics = await self.pool.get_statistics(TRAIN)
        return cast(dict[str, int], statistics["trajectories"]["abort_reasons"])

    async def generate(self, producer: Producer) -> None:
        """Until the source is used up."""
        async with asyncio.timeout(120), producer.running():  # a busy machine takes its time
            await producer.wait_ended()
            await producer._pool.get_statistics(TRAIN)


@asynccontextmanager
async def rig_in(folder: Path, outstanding: int = 16) -> AsyncIterator[Rig]:
    channel = ChannelConfig(max_outstanding_groups=outstanding)
    config = PoolConfig(channels={TRAIN: channel})
    async with DataPoolClient.local(config, folder / "pool") as pool:
        engine = ScriptedEngine(version="1")
        await engine.start()
        gateway = Gateway(pool, engine)
        await gateway.start()
        # Else a rollout that began sooner after the start than an answer takes was disturbed by it.
        gateway.services.started_at -= 60.0
        try:
            yield Rig(pool, engine, gateway, folder)
        finally:
            await gateway.stop()
            await engine.stop()
            gateway.held.close()
            engine.held.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_in(tmp_path) as made:
        yield made


@asynccontextmanager
async def worker_of(rig: Rig, **rollout: Any) -> AsyncIterator[RolloutWorker]:
    worker = RolloutWorker(rig.config(**rollout), [rig.gateway.url])
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def producer_of(
    rig: Rig, n_prompts: int, notify: Callable[[str], None] = print, **rollout: Any
) -> AsyncIterator[Producer]:
    async with worker_of(rig, **rollout) as worker:
        yield rig.producer(n_prompts, [worker], notify=notify, **rollout)


async def drawn(producer: Producer, n: int) -> None:
    async def are_drawn() -> bool:
        return len(producer.in_flight) == n

    await until(are_drawn)


async def test_prompts_outlast_an_outage_of_the_engine(rig: Rig) -> None:
    await rig.engine.stop()
    async with producer_of(rig, 6, max_attempts=1) as producer:

        async def comes_back() -> None:
            await drawn(producer, 6)
            await asyncio.sleep(1)
            await rig.engine.start()

        await asyncio.gather(rig.generate(producer), comes_back())
    assert (await rig.groups())["ready"] == 6
    told = audit(rig.folder / "ledger.jsonl")
    assert told.draws == tuple(f"p{i}" for i in range(6))
    assert told.dropped.total() == told.returned


async def test_prompts_outlast_a_restart_of_the_gateway(rig: Rig) -> None:
    async with producer_of(rig, 4, max_attempts=1, agent=f"{__name__}:asks_slowly") as producer:

        async def restarts() -> None:
            await drawn(producer, 4)
            await asyncio.sleep(0.3)
            await rig.gateway.stop()
            await asyncio.sleep(0.5)
            await rig.gateway.start()

        await asyncio.gather(rig.generate(producer), restarts())
    assert (await rig.groups())["ready"] == 4
    assert audit(rig.folder / "ledger.jsonl").dropped.total() == 0


async def test_a_group_whose_deadline_passed_during_an_outage_is_issued_again(rig: Rig) -> None:
    await rig.engine.stop()
    async with producer_of(rig, 2, max_attempts=1, timeout_s=0.5, group_deadline_s=0.5) as producer:

        async def comes_back() -> None:
            await until(rig.dropped)
            await rig.engine.start()

        await asyncio.gather(rig.generate(producer), comes_back())
    assert (await rig.groups())["ready"] == 2
    told = audit(rig.folder / "ledger.jsonl")
    assert told.draws == ("p0", "p1")
    assert told.dropped.total() == told.returned > 0
    assert set(told.dropped) == {INFRASTRUCTURE}


async def test_no_prompt_is_drawn_while_there_is_no_engine(tmp_path: Path) -> None:
    async with rig_in(tmp_path, outstanding=2) as rig:
        await rig.engine.stop()
        async with (
            producer_of(rig, 50, max_attempts=1, timeout_s=0.3, group_deadline_s=0.3) as producer,
            producer.running(),
        ):
            await asyncio.sleep(3)
            issued = (await rig.groups())["dropped"] + len(producer.in_flight)
    assert issued <= 10, "a few until the engine is known to be away"


async def test_a_group_that_closes_before_a_rollout_begins_does_not_end_the_run(rig: Rig) -> None:
    async with producer_of(
        rig,
        3,
        agent=f"{__name__}:asks_slowly",
        concurrency=1,
        max_attempts=1,
        timeout_s=0.7,
        group_deadline_s=0.7,
    ) as producer:
        await rig.generate(producer)
    assert producer.ends["closed"] > 0, producer.ends
    told = audit(rig.folder / "ledger.jsonl")
    assert len(told.draws) == 3
    assert not told.in_flight
    assert told.returned == 0  # that the deadline is too short for so few slots is nobody's outage


async def completes_by_itself(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """An agent that knows the address alone completes; its return value comes second."""
    await asks_once(task, base_url, api_key)
    async with aiohttp.ClientSession() as http:
        await http.post(f"{base_url}/v1/complete_trajectory", json={"reward": 0.5})
    if task["instance_id"] == "p2":
        raise ValueError("the browser does not close")
    return None if task["instance_id"] == "p0" else 0.25


async def test_a_rollout_that_its_agent_has_completed_over_http_is_complete(rig: Rig) -> None:
    """It counted as closed: the prompt was dropped, in the ledger and in checkpoints, and the group
    was trained all the same."""
    async with producer_of(rig, 3, agent=f"{__name__}:completes_by_itself") as producer:
        await rig.generate(producer)
        assert producer.ends == {"complete": 6}
        lease = await rig.pool.lease_batch(batch_size=3)
        assert lease is not None
        assert {g.prompt_uid for g in lease.groups} == producer.in_flight.keys()
    assert {t.reward for g in lease.groups for t in g.trajectories} == {0.5}
    assert audit(rig.folder / "ledger.jsonl").dropped == {}


async def test_the_first_prompt_that_its_deadline_loses_is_a_line_for_the_user(rig: Rig) -> None:
    """All prompts of groups that are as good as never begun in time were lost in silence."""

    class FullWorker:
        async def run_group(self, task: Any, prompt_uid: str, n: int, *args: Any) -> dict[str, int]:
            async def is_told() -> bool:
                return prompt_uid in producer._drop_reasons

            await until(is_told)
            return {"closed": n}

        async def ready(self) -> None: ...

    told: list[str] = []
    limits = {"timeout_s": 0.05, "group_deadline_s": 0.05, "max_attempts": 1}
    producer = rig.producer(3, [FullWorker()], notify=told.append, **limits)
    await rig.generate(producer)
    assert (await rig.groups())["drop_reasons"] == {"deadline": 3}
    assert len(told) == 1
    assert told[0].startswith("closed (rollout.group_deadline_s is 0.05): 2 of 2 rollouts of p")
    assert "raise it, or rollout.concurrency, or " in told[0]


@pytest.mark.parametrize("agent", ["raises", "is_out"])
async def test_an_agent_that_always_fails_is_counted_and_its_prompts_are_not_issued_again(
    rig: Rig, agent: str
) -> None:
    async with producer_of(rig, 5, agent=f"{__name__}:{agent}") as producer:
        await rig.generate(producer)
    [(failure, n)] = producer.ends.items()
    assert (failure, n) == ("ValueError" if agent == "raises" else "ConnectionError", 10)
    told = audit(rig.folder / "ledger.jsonl")
    assert (len(told.draws), told.dropped.total(), told.returned) == (5, 5, 0)


async def raises_half_a_character(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """A model may write such a one in JSON."""
    raise ValueError(json.loads(r'"no tool \ud83d"'))


async def test_an_agents_error_that_is_no_text_ends_its_rollout(rig: Rig) -> None:
    async with producer_of(rig, 2, agent=f"{__name__}:raises_half_a_character") as producer:
        await rig.generate(producer)
    assert (await rig.groups())["dropped"] == 2
    reasons = await rig.abort_reasons()
    assert set(reasons) == {"ValueError: no tool ?"}


async def hangs(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    await asyncio.sleep(60)
    return 0.0


async def never_calls(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raises", "32 × ValueError: no such tool"),
        ("never_calls", "32 × no_steps (the agent never called the model at its base_url)"),
    ],
)
async def test_an_agent_that_never_works_is_named_at_once_and_ends_the_run(
    rig: Rig, agent: str, cause: str
) -> None:
    told: list[str] = []
    # One group at a time: the order of their ending is that of their prompts.
    options = {"agent": f"{__name__}:{agent}", "n": 4, "concurrency": 1, "max_attempts": 1}
    async with producer_of(rig, 40, notify=told.append, **options) as producer:
        with pytest.RaisesGroup(pytest.RaisesExc(RolloutError, match=re.escape(cause))):
            await rig.generate(producer)
    assert len(told) == 1
    assert told[0].startswith(cause.replace("32 ×", "4 ×")), told[0]
    assert "p0-" in told[0]
    drawn = len(audit(rig.folder / "ledger.jsonl").draws)
    # The lost ones, those that the pool had admitted, and one that waits for admission.
    assert drawn <= LOST_IN_A_ROW + 16 + 1


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raises", "8 × ValueError: no such tool"),
        ("never_calls", "8 × no_steps (the agent never called the model at its base_url)"),
    ],
)
async def test_an_evaluation_of_an_agent_that_never_works_names_the_cause(
    rig: Rig, agent: str, cause: str
) -> None:
    """It is no `StarvedError`, after which an evaluation is tried again: a part was down."""
    options = {"agent": f"{__name__}:{agent}", "n": 4, "max_attempts": 1}
    async with producer_of(rig, 1, **options) as producer:
        tasks = [{"question": "?", "instance_id": f"v{i}"} for i in range(2)]
        with pytest.raises(RolloutError, match="finished none of 8 evaluation rollouts") as e:
            await producer.evaluate(tasks, 4, "val")
    assert str(e.value).startswith(cause)


async def test_a_harness_that_fails_is_named_by_its_key_and_its_own_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    harness = {"command": ["sh", "-c", "exit 4"], "grade": {"command": ["true"]}}
    options = {"agent": None, "harness": harness, "n": 2, "max_attempts": 1}
    async with producer_of(rig, 1, notify=told.append, **options) as producer:
        with pytest.raises(RolloutError, match=r": rollout\.harness finished none of 2"):
            await producer.evaluate([{"question": "?", "instance_id": "v"}], 2, "val")
        await rig.generate(producer)
    assert told
    for line in told:
        assert "HarnessError: exit status 4" in line
        assert "rollout.harness" in line
        assert "logs/harness has what it printed" in line
    assert "Traceback" not in caplog.text, "it is of our own lines"


async def test_rollouts_that_take_too_long_name_the_limit_and_its_remedy(rig: Rig) -> None:
    told: list[str] = []
    options = {"agent": f"{__name__}:hangs", "n": 4, "concurrency": 1, "max_attempts": 1}
    cause = "timeout (rollout.timeout_s is 0.05)"
    async with producer_of(rig, 40, notify=told.append, timeout_s=0.05, **options) as producer:
        with pytest.raises(RolloutError, match="raise it, or make the agent faster") as e:
            await producer.evaluate([{"question": "?", "instance_id": "v"}], 4, "val")
        assert str(e.value).startswith(f"4 × {cause}: ")
        with pytest.RaisesGroup(pytest.RaisesExc(RolloutError, match=re.escape(f"32 × {cause}"))):
            await rig.generate(producer)
    assert [line.startswith(cause) for line in told] == [True, False]
    assert all("raise it, or make the agent faster; " in line for line in told)
    assert not any("traceback" in line for line in told)


TURNS = count()


async def fails_in_two_ways(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    reward, number = await asks_once(task, base_url, api_key), next(TURNS)
    if number % 4 == 0:
        raise ValueError(f"bad tool at {base_url}")
    if number % 4 == 1:
        raise KeyError(task["instance_id"])
    return reward


async def test_the_first_failure_of_each_kind_is_a_line_for_the_user(rig: Rig) -> None:
    told: list[str] = []
    options = {"agent": f"{__name__}:fails_in_two_ways", "n": 8, "min_n": 1, "max_attempts": 1}
    async with producer_of(rig, 4, notify=told.append, **options) as producer:
        tasks = [{"question": "?", "instance_id": f"v{i}"} for i in range(2)]
        await producer.evaluate(tasks, 8, "val")
        await rig.generate(producer)
    of_key, of_value = sorted(told)
    assert of_value.startswith("ValueError: bad tool at {base_url}: "), of_value
    assert of_key.startswith("KeyError: 'v"), of_key
    assert "the worker's log has the traceback" in of_key
    assert producer.ends["ValueError"] == producer.ends["KeyError"] == 12


class DyingWorker:
    """A worker whose process ends under each group."""

    async def run_group(self, *args: Any) -> dict[str, int]:
        raise ray.exceptions.RayActorError

    async def ready(self) -> None: ...


async def test_a_worker_that_dies_is_one_line_however_often_it_does(rig: Rig) -> None:
    told: list[str] = []
    producer = rig.producer(1, [DyingWorker()], notify=told.append, n=1, min_n=1)
    await producer.evaluate([{"question": "?", "instance_id": "v0"}], 1, "val")
    assert len(told) == 1
    assert told[0].startswith("rollout worker 0 died while it ran v0-"), told[0]


class LostWorker(DyingWorker):
    """One that does not come back."""

    async def ready(self) -> None:
        raise RolloutError("a rollout worker cannot start")


class BusyWorker:
    """One that runs a group until it is told to stop."""

    is_stopped = False

    async def run_group(self, *args: Any) -> dict[str, int]:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_stopped = True
        return {}

    async def ready(self) -> None: ...


@pytest.mark.parametrize(("n_tasks", "turns"), [(1, 1), (4, 1), (5, 2), (21, 6)])
async def test_prompts_of_an_evaluation_that_wait_for_a_slot_have_their_time_after_it(
    rig: Rig, n_tasks: int, turns: int
) -> None:
    """They are begun together, and those that came last were closed before they had begun."""
    options = {"n": 1, "min_n": 1, "concurrency": 4, "timeout_s": 1, "group_deadline_s": 10}
    producer = rig.producer(1, [BusyWorker(), BusyWorker()], **options)
    tasks = [{"question": "?", "instance_id": f"v{i}"} for i in range(n_tasks)]
    evaluation = asyncio.create_task(producer.evaluate(tasks, 2, "val"))

    async def begun() -> list[float | None]:
        groups = (await rig.pool.list_groups("val")).items
        return [g.deadline and g.deadline - g.opened_at for g in groups][n_tasks - 1 :]

    assert (await until(begun))[0] == pytest.approx(10 * turns)
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)


async def test_an_evaluation_that_fails_leaves_none_of_its_rollouts_running(rig: Rig) -> None:
    """They went on into the end of the run, asked a Ray that had been left for their workers, and
    started another one for it."""
    busy = BusyWorker()
    producer = rig.producer(1, [busy, LostWorker()], n=1, min_n=1)
    tasks = [{"question": "?", "instance_id": f"v{i}"} for i in range(2)]
    with pytest.raises(RolloutError, match="cannot start"):
        await producer.evaluate(tasks, 1, "val")
    assert busy.is_stopped


async def works_at_every_seventh(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    if task["instance_id"] in ("p6", "p13", "p20"):
        return await asks_once(task, base_url, api_key)
    raise ValueError("no such tool")


async def test_a_rollout_that_finishes_starts_the_count_of_lost_groups_anew(
    tmp_path: Path,
) -> None:
    async with rig_in(tmp_path, outstanding=1) as one:
        options = {"n": 5, "min_n": 1, "max_attempts": 1}
        agent = f"{__name__}:works_at_every_seventh"
        async with (
            producer_of(one, 21, agent=agent, **options) as producer,
            asyncio.timeout(120),
            producer.running() as generation,
        ):
            for _ in range(3):  # what is ready holds the one place until it is taken
                lease = await one.pool.lease_batch(timeout_s=60)
                assert lease is not None
                producer.leased(group.prompt_uid for group in lease.groups)
                await one.pool.ack(lease.lease_id)
            await producer.wait_ended()
            assert not generation.done()
    assert producer.ends == {"ValueError": 90, "complete": 15}


async def test_an_attempt_during_an_outage_does_not_count_against_the_agent(rig: Rig) -> None:
    await rig.engine.stop()
    async with worker_of(rig, max_attempts=1) as worker:
        await rig.pool.open_group("p", 1)
        running = asyncio.create_task(worker.run_group({"question": "?"}, "p", 1))
        reasons = await until(rig.abort_reasons)
        assert {reason.partition(":")[0] for reason in reasons} == {INFRASTRUCTURE}
        await rig.engine.start()
        assert await running == {"complete": 1}


async def test_an_evaluation_outlasts_an_outage_of_the_engine(rig: Rig) -> None:
    await rig.engine.stop()
    async with producer_of(rig, 1, timeout_s=0.3, group_deadline_s=0.6) as producer:
        tasks = [{"question": "?", "instance_id": f"v{i}"} for i in range(3)]
        evaluation = asyncio.create_task(producer.evaluate(tasks, 2, "val"))
        await asyncio.sleep(1.5)
        await rig.engine.start()
        async with asyncio.timeout(30):
            uids = await evaluation
        lease = await rig.pool.lease_batch(channel="val", batch_size=3)
    assert {g.prompt_uid for g in lease.groups} == set(uids)
    assert [len(g.trajectories) for g in lease.groups] == [2, 2, 2]


@pytest.mark.usefixtures("cluster")
async def test_prompts_outlast_the_death_of_a_rollout_worker(rig: Rig) -> None:
    config = rig.config(agent=f"{__name__}:asks_slowly", max_attempts=1)
    workers = start_workers(config, [rig.gateway.url])
    await workers[0].ready()
    producer = rig.producer(4, list(workers), agent=f"{__name__}:asks_slowly", max_attempts=1)

    async def dies() -> None:
        await drawn(producer, 4)
        [worker] = actor_processes("RolloutWorker")
        worker.kill()

    await asyncio.gather(rig.generate(producer), dies())
    assert (await rig.groups())["ready"] == 4
    told = audit(rig.folder / "ledger.jsonl")
    assert told.draws == tuple(f"p{i}" for i in range(4))
    assert told.dropped == {INFRASTRUCTURE: 4}
    assert told.returned == 4


async def test_a_prompt_that_kills_its_worker_every_time_is_given_up(rig: Rig) -> None:
    class DiesOfOne(RolloutWorker):
        async def run_group(self, task: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
            if task["instance_id"] == "p1":
                raise ray.exceptions.RayActorError
            return await super().run_group(task, *args, **kwargs)

    worker = DiesOfOne(rig.config(), [rig.gateway.url])
    producer = rig.producer(4, [worker])
    await rig.generate(producer)
    await worker.close()
    assert (await rig.groups())["ready"] == 3
    told = audit(rig.folder / "ledger.jsonl")
    assert told.draws == tuple(f"p{i}" for i in range(4))
    assert told.dropped == {INFRASTRUCTURE: LOSSES}
    assert told.waiting == ()


async def test_a_prompt_that_kills_its_worker_every_time_is_given_up_in_each_epoch(
    rig: Rig,
) -> None:
    class Dies(RolloutWorker):
        async def run_group(self, task: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
            raise ray.exceptions.RayActorError

    worker = Dies(rig.config(), [rig.gateway.url])
    producer = rig.producer(1, [worker], epochs=2)
    await rig.generate(producer)
    await worker.close()
    told = audit(rig.folder / "ledger.jsonl")
    assert told.draws == ("p0", "p0")
    assert told.dropped == {INFRASTRUCTURE: 2 * LOSSES}
    assert told.waiting == ()


async def test_groups_that_a_prompt_loses_now_and_then_do_not_add_up(rig: Rig) -> None:
    class DiesFirst(RolloutWorker):
        times = 0
        in_turn = asyncio.Lock()

        async def run_group(self, task: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
            async with self.in_turn:
                self.times += 1
                if self.times % 6:
                    raise ray.exceptions.RayActorError
                return await super().run_group(task, *args, **kwargs)

    worker = DiesFirst(rig.config(), [rig.gateway.url])
    producer = rig.producer(1, [worker], epochs=3)
    await rig.generate(producer)
    await worker.close()
    assert (await rig.groups())["ready"] == 3
