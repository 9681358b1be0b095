"""The gateway's bench as it is run, on little data: what it reports, and its own client and engine.

The quick run starts Ray, the engine, the client and every gateway that is installed; what each of
them stored is checked inside. Timings are asserted nowhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from benchmarks.checks import BenchResult
from benchmarks.gateway import FULL, QUICK, SECTIONS, Direct, run, systems
from benchmarks.gateway.client import CALL_ID, Conversations, Job
from benchmarks.gateway.measure import CONNECTIONS, Sample, paired, table
from benchmarks.gateway.memory import growth
from benchmarks.gateway.process import Client, Engine, running_client, running_engine
from benchmarks.gateway.shapes import WAVES, _arrivals
from benchmarks.gateway.workload import (
    ANSWER_TOKENS,
    ARGUMENTS,
    CALL,
    CALLING,
    LONG_TURNS,
    ROLLOUTS,
    SHORT_TOOLS,
    TURNS,
    Workload,
    make_workload,
)
from stepwell.trainer.errors import ConfigError


@pytest.fixture(scope="module")
def quick() -> BenchResult:
    return asyncio.run(run(quick=True))


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return make_workload(tmp_path_factory.mktemp("workload"))


@pytest.fixture(scope="module")
def conversations(workload: Workload) -> dict[str, Conversations]:
    return Conversations.read(workload.conversations_file)


@pytest.fixture
async def engine(workload: Workload) -> AsyncIterator[Engine]:
    async with running_engine(workload) as engine:
        yield engine


@pytest.fixture
async def client(workload: Workload) -> AsyncIterator[Client]:
    async with running_client(workload) as client:
        yield client


def _job(engine: Engine, **options: object) -> Job:
    fields: dict[str, object] = {
        "kind": "chat",
        "ports": (engine.port,),
        "path": Direct.path,
        "complete_path": None,
        "name": "job",
        "connections": 3,
        "prompts": 2,
        "rollouts": 4,
        "turns": 2,
    }
    return Job(**{**fields, **options})  # type: ignore[arg-type]


# -- the whole -------------------------------------------------------------------------------


def _installed() -> list[str]:
    others = [systems.Rllm.name] if systems.is_installed() else []
    return [Direct.name, systems.Stepwell.name, systems.StepwellReplicas.name, *others]


@pytest.mark.long
def test_every_system_is_measured_at_every_number_of_connections(quick: BenchResult) -> None:
    rows = quick.figures["systems"]
    assert [(row["connections"], row["system"]) for row in rows] == [
        (n, name) for n in QUICK.connections for name in _installed()
    ]
    assert all(row["requests_per_s"] > 0 for row in rows)
    assert all(row["cpu_ms"] > 0 for row in rows if row["system"] != Direct.name)
    ours = [row for row in rows if row["system"].startswith(systems.Stepwell.name)]
    assert all(row["pool_cpu_ms"] > 0 for row in ours)


@pytest.mark.long
def test_a_slow_engine_streams_long_conversations_and_waves_are_measured(
    quick: BenchResult,
) -> None:
    figures = quick.figures
    for connections in QUICK.connections:
        rows = [row for row in figures["engine_of_50_ms"] if row["connections"] == connections]
        assert [row["system"] for row in rows] == _installed()
    assert all(row["p50_ms"] >= 50 for row in figures["engine_of_50_ms"])
    assert [row["system"] for row in figures["streams_of_an_event_every_5_ms"]] == _installed()
    streams = figures["streams_of_16_events_at_16"]
    assert {row["system"] for row in streams} <= {*_installed()}
    assert all(row["cpu_us_an_event"] > 0 for row in streams)
    short = figures[f"short_conversations_of_tool_calls_at_{max(QUICK.connections)}"]
    assert {(row["kind"], row["cpu_ms"] > 0) for row in short} == {(kind, True) for kind in CALLING}
    assert figures["turns_of_3200_tokens"][-1]["turn"] == LONG_TURNS
    assert all(row["p50_ms"] >= 50 for row in figures["open_trajectories_of_one_process"])
    assert figures["live_trajectory"]["tokens"] > 3 * 3_000
    assert figures["held_by_bound"] < 1
    waves = figures[f"waves_of_{QUICK.agents}_agents"]
    assert [row["errors"] for row in waves] == [0] * WAVES


@pytest.mark.long
def test_a_quick_run_reports_what_a_full_one_bounds(quick: BenchResult) -> None:
    assert quick.checks == {}
    for name in (
        "cpu_at_4_by_1",
        "p50_added_ms_at_1",
        "p99_added_ms_at_4_of_50_ms",
        "last_turn_by_second_cpu",
        "cpu_ms_of_longest_context",
        "longest_by_shortest_context_cpu",
        "cpu_ms_of_coding_streamed",
        "first_token_added_ms",
        "chunks_seen_before_the_next",
        "loop_delay_p99_ms",
        "rss_of_later_waves",
        "p99_of_open_trajectories",
        "longest_stall_ms_of_open_trajectories",
        "held_by_bound",
        "resident_by_bound",
    ):
        assert quick.figures[name] is not None
    assert json.loads(json.dumps(quick.as_json("gateway")))["bench"] == "gateway"


def test_a_full_run_measures_what_the_claims_are_about() -> None:
    assert tuple(FULL.connections) == CONNECTIONS == (1, 16, 64)
    assert FULL.agents == 512
    assert FULL.groups * ROLLOUTS >= 64, "every connection has a trajectory"


def test_a_section_that_does_not_exist_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"streams.*choose from throughput"):
        asyncio.run(run(quick=True, only=["streams"]))
    assert "stream" in SECTIONS


def test_a_steady_growth_is_seen_under_waves_of_calls() -> None:
    seconds = np.arange(300)
    in_flight = np.where(seconds % 57 > 30, 480, 20)
    tokens = 14e6 + 7e6 * np.abs(np.sin(seconds / 20))
    held = 400 + tokens / 1e5 + in_flight * 0.4 + np.random.default_rng(0).normal(0, 15, 300)
    loads = list(zip(tokens, in_flight, strict=True))
    assert abs(60.0 * growth(list(held), loads)) < 3.0
    assert 60.0 * growth(list(held + seconds / 10), loads) == pytest.approx(6.0, abs=3.0)


def test_a_soak_of_no_time_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="minutes is 0"):
        asyncio.run(run(only=["soak"], minutes=0))


@pytest.mark.long
def test_a_soak_runs_as_long_as_it_is_told_and_only_if_it_is_named(quick: BenchResult) -> None:
    assert not any("soak" in name for name in quick.figures)
    soaked = asyncio.run(run(quick=True, only=["soak"], minutes=0.05)).figures
    assert soaked["soak_errors"] == 0
    assert soaked[f"soak_of_{QUICK.agents}_agents"]["requests"] > QUICK.agents
    assert soaked["soak_mb_per_minute"] is not None


# -- what is sent ----------------------------------------------------------------------------


@pytest.mark.slow
def test_conversations_are_as_long_as_the_claims_say(
    workload: Workload, conversations: dict[str, Conversations]
) -> None:
    from stepwell.gateway.tokens.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(str(workload.tokenizer_path))

    def tokens(kind: str, prompt: int, turn: int) -> int:
        body = json.loads(conversations[kind].body(prompt, 0, turn, stream=False))
        text = tokenizer.render(body["messages"], None, {}, add_generation_prompt=True)
        return len(tokenizer.encode(text))

    chat = [tokens("chat", 0, turn) for turn in range(TURNS)]
    assert 950 < sum(chat) / TURNS < 1_050
    assert 63_000 < tokens("long", 0, LONG_TURNS - 1) < 65_000
    new = tokens("long", 0, 2) - tokens("long", 0, 1)
    assert 3_100 < new < 3_300
    many = [tokens("many", prompt, 0) for prompt in (0, 63)]
    assert 3_900 < many[0] < 4_100
    assert 7_900 < many[1] < 8_100
    assert len(workload.answer_ids) == ANSWER_TOKENS


def test_rollouts_of_a_prompt_begin_alike_and_go_on_differently(
    conversations: dict[str, Conversations],
) -> None:
    chat = conversations["chat"]
    assert chat.body(3, 0, 0, stream=False) == chat.body(3, 7, 0, stream=False)
    bodies = {chat.body(3, rollout, 1, stream=False) for rollout in range(8)}
    assert len(bodies) == 8
    second, third = (json.loads(chat.body(3, 5, turn, stream=True)) for turn in (1, 2))
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert [m["role"] for m in third["messages"]] == ["system", "user"] + ["assistant", "user"] * 2
    assert third["messages"][2]["content"] == chat.answer.decode()


@pytest.mark.parametrize("kind", CALLING)
def test_the_next_request_of_a_tool_conversation_names_the_call_that_was_answered(
    conversations: dict[str, Conversations], kind: str
) -> None:
    calling = conversations[kind]
    sent = calling.body(0, 0, 2, stream=False, call_ids=[b"call_a", b"call_b"])
    body = json.loads(sent)
    assert [len(body["tools"]), CALL_ID in sent.decode()] == [SHORT_TOOLS, False]
    if kind == "responses":
        assert [i["call_id"] for i in body["input"][1:]] == ["call_a", "call_a", "call_b", "call_b"]
        return
    roles = [m["role"] for m in body["messages"]]
    assert roles == ["system", "user"] + ["assistant", "tool"] * 2
    assert [m["tool_call_id"] for m in body["messages"][3::2]] == ["call_a", "call_b"]
    calls = [m["tool_calls"][0]["id"] for m in body["messages"][2::2]]
    assert calls == ["call_a", "call_b"]


# -- engine and client -----------------------------------------------------------------------


async def test_the_engine_answers_like_sglang(engine: Engine, workload: Workload) -> None:
    async with httpx.AsyncClient(base_url=engine.url) as http:
        whole = (await http.post("/generate", json={"input_ids": [1], "stream": False})).json()
        assert whole["output_ids"] == workload.answer_ids
        meta = whole["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == workload.answer_ids
        assert meta["finish_reason"] == {"type": "stop", "matched": workload.answer_ids[-1]}
        streamed = (await http.post("/generate", json={"input_ids": [1], "stream": True})).text
        events = [json.loads(e[6:]) for e in streamed.split("\n\n") if e.startswith("data: {")]
        assert [len(e["output_ids"]) for e in events] == list(range(1, ANSWER_TOKENS + 1))
        assert events[-1] == whole
        assert streamed.endswith("data: [DONE]\n\n")


async def test_the_engine_gives_ids_to_those_who_ask(engine: Engine, workload: Workload) -> None:
    async with httpx.AsyncClient(base_url=engine.url) as http:
        plain = (await http.post("/v1/chat/completions", json={})).json()
        asked = (await http.post("/v1/chat/completions", json={"return_token_ids": True})).json()
    assert "token_ids" not in plain["choices"][0]
    assert asked["choices"][0]["token_ids"] == workload.answer_ids
    assert len(asked["prompt_token_ids"]) == 1_000
    assert asked["choices"][0]["message"] == plain["choices"][0]["message"]


async def test_the_engine_answers_with_a_tool_call_if_it_is_told_to(
    engine: Engine, workload: Workload
) -> None:
    await engine.control(answer="call")
    async with httpx.AsyncClient(base_url=engine.url) as http:
        whole = (await http.post("/generate", json={"input_ids": [1]})).json()
        chat = (await http.post("/v1/chat/completions", json={})).json()["choices"][0]
    assert whole["output_ids"] == workload.call_ids
    assert whole["text"] == CALL
    assert chat["finish_reason"] == "tool_calls"
    assert json.loads(chat["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS


async def test_the_client_goes_on_from_the_tool_calls_that_it_gets(
    engine: Engine, client: Client
) -> None:
    await engine.control(answer="call")
    assert len((await client.run(_job(engine, kind="tools"))).latencies_s) == 2 * 4 * 2
    await engine.control()
    with pytest.raises(RuntimeError, match="another answer"):
        await client.run(_job(engine, kind="tools", turns=1))


async def test_the_client_sends_every_turn_of_every_rollout(engine: Engine, client: Client) -> None:
    result = await client.run(_job(engine))
    assert len(result.latencies_s) == 2 * 4 * 2
    assert all(0 < latency <= result.ended - result.began for latency in result.latencies_s)


async def test_the_client_ends_when_its_time_is_over(engine: Engine, client: Client) -> None:
    result = await client.run(_job(engine, prompts=1_000_000, turns=1_000, duration_s=0.4))
    assert 1 <= len(result.latencies_s) < 1_000_000
    assert result.ended - result.began >= 0.4


async def test_connections_begin_one_after_the_other_if_they_are_staggered(
    engine: Engine, client: Client
) -> None:
    result = await client.run(_job(engine, connections=4, prompts=1, stagger_s=0.05))
    assert len(result.latencies_s) == 8
    assert result.ended - result.began > 0.125  # three pauses, less what timers are early


async def test_the_client_sees_each_event_of_a_stream_as_it_is_written(
    engine: Engine, client: Client
) -> None:
    await engine.control(interval_s=0.002)
    result = await client.run(_job(engine, connections=1, prompts=1, rollouts=1, stream=True))
    (first, second), written = result.seen, await engine.control()
    assert len(first) == len(second) == ANSWER_TOKENS - 1  # the end token has no text
    for seen, times in zip(result.seen, written, strict=True):
        assert all(now >= then for (now, _), then in zip(seen, times, strict=False))


async def test_a_stream_has_as_many_events_as_it_is_divided_into(
    engine: Engine, client: Client
) -> None:
    await engine.control(interval_s=0.002, n_events=16)
    result = await client.run(_job(engine, connections=1, prompts=1, rollouts=1, stream=True))
    assert [len(times) for times in await engine.control()] == [16, 16]
    assert all(1 < len(seen) <= 16 for seen in result.seen)


async def test_an_answer_that_is_another_is_an_error(engine: Engine, client: Client) -> None:
    result = await client.attempt(_job(engine, path="/v1/models", connections=1))
    assert len(result.errors) == 16
    with pytest.raises(RuntimeError, match=r"16 requests failed, e\.g\. another answer"):
        await client.run(_job(engine, path="/v1/models", connections=1))


async def test_a_server_that_is_not_there_is_an_error_for_each_connection(
    engine: Engine, client: Client
) -> None:
    result = await client.attempt(_job(engine, ports=(1,)))  # nothing listens there
    assert [error.split(":")[0] for error in result.errors] == ["no connection"] * 3


# -- figures ---------------------------------------------------------------------------------


def _sample(ms: float) -> Sample:
    return Sample(
        requests_per_s=1e3 / ms,
        p50_ms=ms,
        p99_ms=2 * ms,
        max_ms=3 * ms,
        cpu_ms=ms,
        pool_cpu_ms=0.0,
        rss_mb=1.0,
    )


def test_what_is_added_is_taken_within_each_round() -> None:
    # The machine was ten times slower in the second round, for both.
    ours, direct = [_sample(3), _sample(30), _sample(4)], [_sample(1), _sample(10), _sample(1)]
    assert paired(ours, direct, lambda a, b: a.p50_ms - b.p50_ms) == 3
    rows = table({("direct", 1): direct, ("ours", 1): ours}, "direct")
    assert rows[1]["p50_added_ms"] == 3
    assert rows[1]["p99_added_ms"] == 6
    assert "p50_added_ms" not in rows[0]


def test_text_that_arrives_together_arrived_for_each_of_its_events() -> None:
    assert _arrivals([(1.0, 2), (3.0, 7), (4.0, 9)], [2, 5, 7, 9]) == [1.0, 3.0, 3.0, 4.0]
