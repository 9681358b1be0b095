"""One call's life over several engines, by real HTTP: what is sent, resumption, loss, recovery."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.backends.engines.api import GenerateRequest, Sampling, TopLogProbs
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.connections import ConnectionPool, OnData, Response
from stepwell.backends.errors import EngineError as AskingError
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from stepwell.gateway.engine import Generation, Sampler
from stepwell.gateway.engine.fleet import Fleet, _rendezvous
from stepwell.gateway.engine.generation import Part
from stepwell.gateway.errors import EngineError, EngineUnavailableError, RequestError
from tests.builders import until
from tests.gateway.conftest import Sampled, ScriptedEngine, log_prob, tops

PROMPT = np.arange(10, 15, dtype=np.int32)
FAST = Tuning(
    retry_backoff_s=0.02,
    engine_health_interval_s=0.05,
    engine_circuit_open_s=0.05,
    engine_version_grace_s=60.0,
)


@dataclass
class Rig:
    client: Sampler
    machines: list[ScriptedEngine]
    names: Iterator[str] = field(default_factory=lambda: map("new {}".format, itertools.count()))
    """Trajectories that have made no call yet."""

    async def generate(
        self, *, affinity: str = "t", n: int = 50, stream: bool = False, **sampling: Any
    ) -> Generation:
        self.seen: list[int] = []
        self.seen_at_once: list[int] = []
        """Numbers of ids that came together."""
        self.seen_log_probs: list[float] = []
        self.seen_tops: list[TopLogProbs] = []

        def on_tokens(
            ids: Sequence[int],
            log_probs: Sequence[float],
            tops: Sequence[TopLogProbs],
            version: int | None,
        ) -> None:
            self.seen += ids
            self.seen_at_once.append(len(ids))
            self.seen_log_probs += log_probs
            self.seen_tops += tops

        return await self.client.generate(
            PROMPT,
            Sampling(n, 1.0, **sampling),
            affinity=affinity,
            on_tokens=on_tokens if stream else None,
        )

    async def home(self, affinity: str = "t") -> tuple[ScriptedEngine, ScriptedEngine]:
        """The trajectory's engine, and another one."""
        await self.generate(affinity=affinity)
        home = next(m for m in self.machines if m.requests)
        home.requests.clear()
        return home, next(m for m in self.machines if m is not home)

    def name_for(self, machine: ScriptedEngine) -> str:
        """A trajectory that begins, and is placed on this engine, whatever ports they have."""
        engines = [*Fleet(m.url for m in self.machines)]
        return next(n for n in self.names if _rendezvous(n, engines).url == machine.url)

    def state(self, machine: ScriptedEngine) -> str:
        engines = {e["url"]: e for e in self.client.statistics()["engines"]}
        return str(engines[machine.url]["state"])

    async def checked(self) -> None:
        """Every engine has been asked for its version since."""
        before = {id(m): m.checks for m in self.machines}
        await until(lambda: all(m.checks >= before[id(m)] + 2 for m in self.machines))


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Any]]:
    """Makes rigs: `await rigs(2, versions of the engines…, **gateway options)`."""
    async with AsyncExitStack() as stack:

        async def make(
            n: int = 1, lora_path: str | None = None, tuning: Tuning = FAST, **options: Any
        ) -> Rig:
            machines = [ScriptedEngine(version="1") for _ in range(n)]
            for machine in machines:
                await stack.enter_async_context(machine.running())
            urls = tuple(m.url for m in machines)
            wiring = Wiring(urls, lora_path=lora_path, tuning=tuning)
            client = Sampler(GatewayConfig(**options), wiring)
            await client.start()
            stack.push_async_callback(client.close)
            return Rig(client, machines)

        yield make


def check_whole(got: Generation, ids: list[int]) -> None:
    """These ids, each with its log-prob, and spans that cover them without a gap."""
    assert got.response_ids.tolist() == ids
    assert got.log_probs.tolist() == pytest.approx([log_prob(i) for i in ids], abs=1e-6)
    starts = [s.start for s in got.spans]
    ends = [s.end for s in got.spans]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == len(ids)


# -- what is sent and what comes back --------------------------------------------------------


async def test_sampling_options_are_sent_under_the_engines_names_and_only_if_set(
    rigs: Any,
) -> None:
    rig = await rigs()
    await rig.generate()
    await rig.generate(
        min_p=0.1,
        constraint=("json_schema", '{"type": "object"}'),
        n_top_logprobs=3,
        stop=("\n",),
        seed=5,
    )
    plain, full = rig.machines[0].requests
    assert set(plain) == {"rid", "input_ids", "sampling_params", "return_logprob", "stream"}
    assert set(plain["sampling_params"]) == {"max_new_tokens", "temperature", "top_p", "top_k"}
    assert full["top_logprobs_num"] == 3
    params = full["sampling_params"]
    assert params["min_p"] == 0.1
    assert params["json_schema"] == '{"type": "object"}'
    assert (params["stop"], params["sampling_seed"]) == (["\n"], 5)
    assert full["input_ids"] == PROMPT.tolist()
    assert full["rid"] != plain["rid"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
async def test_alternatives_come_with_the_tokens_across_a_weight_update_and_are_cut_with_them(
    rigs: Any, stream: bool, incremental: bool
) -> None:
    rig = await rigs()
    [machine] = rig.machines
    machine.tops, machine.incremental = 2, incremental
    machine.script = [Sampled([7, 8], "abort", version="1"), Sampled([9, 10, 11], version="2")]
    got = await rig.generate(stream=stream, n_top_logprobs=2)
    check_whole(got, [7, 8, 9, 10, 11])
    expected = [tuple((t, v) for v, t, _ in tops(i, 2)) for i in (7, 8, 9, 10, 11)]
    assert list(got.top_log_probs) == expected
    assert got.cut(3).top_log_probs == tuple(expected[:3])
    if stream:
        assert (rig.seen, rig.seen_tops) == ([7, 8, 9, 10, 11], expected)
        assert rig.seen_log_probs == pytest.approx([log_prob(i) for i in rig.seen])


SCHEMA = ("json_schema", '{"type": "object"}')


async def test_what_a_constraint_shaped_begins_anew_after_a_weight_update(rigs: Any) -> None:
    """The engine matches the constraint from a request's first token on: what went on from half an
    object had a whole one behind it."""
    rig = await rigs()
    [machine] = rig.machines
    machine.script = [Sampled([7, 8], "abort", version="1"), Sampled([9, 10, 11], version="2")]
    got = await rig.generate(constraint=SCHEMA)
    check_whole(got, [9, 10, 11])
    assert [(s.version, s.start, s.end) for s in got.spans] == [(2, 0, 3)]
    first, second = machine.requests
    assert first["input_ids"] == second["input_ids"] == PROMPT.tolist()
    assert second["sampling_params"]["max_new_tokens"] == 50


@pytest.mark.parametrize("lost", [False, True])
async def test_a_stream_under_a_constraint_fails_where_it_cannot_go_on(
    lost: bool, rigs: Any
) -> None:
    rig = await rigs()
    await rig.checked()
    cut = Sampled([7, 8, 9], drop_after=2) if lost else Sampled([7, 8], "abort")
    rig.machines[0].script = [replace(cut, version="1")]
    with pytest.raises(EngineUnavailableError, match="after 2 streamed tokens, and json_schema"):
        await rig.generate(stream=True, constraint=SCHEMA)
    # Nothing was shown yet: it is asked for again.
    rig.machines[0].script = [Sampled([], "abort", version="1")]
    check_whole(await rig.generate(stream=True, constraint=SCHEMA), rig.seen)


async def test_without_being_asked_for_there_are_no_alternatives(rigs: Any) -> None:
    rig = await rigs()
    got = await rig.generate(stream=True)
    assert got.top_log_probs == ()
    assert rig.seen_tops == []
    assert got.cut(1).top_log_probs == ()


# -- an engine is lost -----------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_stream_goes_on_elsewhere_from_what_a_lost_engine_had_streamed(
    rigs: Any, engines: int
) -> None:
    rig = await rigs(engines)
    home, *_ = await rig.home() if engines == 2 else (rig.machines[0], None)
    await rig.checked()
    other = next((m for m in rig.machines if m is not home), home)
    home.script = [Sampled([7, 8, 9, 10], drop_after=2)]
    home.script[0].version = "1"
    other.script.append(Sampled([9, 10, 11], version="2"))
    got = await rig.generate(stream=True, n=30)
    check_whole(got, [7, 8, 9, 10, 11])
    assert rig.seen == [7, 8, 9, 10, 11]
    assert [(s.version, s.start, s.end) for s in got.spans] == [(1, 0, 2), (2, 2, 5)]
    last = other.requests[-1]
    assert last["input_ids"] == [*PROMPT.tolist(), 7, 8]
    assert last["sampling_params"]["max_new_tokens"] == 28
    assert rig.client.recoveries == 1
    assert got.finish_reason == "stop"


async def test_a_stream_whose_version_changed_before_the_loss_is_not_guessed_at(
    rigs: Any,
) -> None:
    rig = await rigs()
    await rig.checked()
    said = Sampled([7, 8, 9, 10], drop_after=3, versions=[("1", 0, 2), ("2", 2, 4)])
    rig.machines[0].script = [said]
    with pytest.raises(EngineUnavailableError, match="broke off after 3 streamed tokens"):
        await rig.generate(stream=True)
    assert rig.client.recoveries == 0


async def test_a_stream_of_an_engine_that_was_updated_unseen_is_not_guessed_at(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    await until(lambda: rig.machines[0].checks == 1)
    # Its first token may be from before the update to 2 that the first event reports.
    rig.machines[0].script = [Sampled([7, 8, 9], drop_after=2, version="2")]
    with pytest.raises(EngineUnavailableError, match="not certain"):
        await rig.generate(stream=True)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("together", [1, 2, 3, 6])
async def test_without_spans_tokens_are_of_the_version_that_events_name_around_them(
    rigs: Any, together: int, incremental: bool
) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    machine = rig.machines[0]
    await until(lambda: machine.checks == 1)
    machine.drops_spans, machine.incremental = True, incremental
    machine.events_per_write = together
    versions = [("1", 0, 2), ("2", 2, 4), ("3-canary", 4, 6)]
    machine.script = [Sampled([7, 8, 9, 10, 11, 12], versions=versions)]
    got = await rig.generate(stream=True)
    check_whole(got, [7, 8, 9, 10, 11, 12])
    # The third token came with the first event of 2, so 1 may have sampled it.
    assert [(s.version, s.start, s.end) for s in got.spans] == [(1, 0, 3), (2, 3, 5), (3, 5, 6)]
    assert got.policy_version == 1


async def test_events_that_are_here_at_once_are_read_as_one(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    machine, ids = rig.machines[0], [7, 8, 9, 10, 11, 12]
    await rig.generate()  # what it has, 1, is known
    machine.drops_spans, machine.events_per_write = True, len(ids)
    machine.script = [Sampled(ids, version="1"), Sampled(ids, version="2")]
    check_whole(await rig.generate(stream=True), ids)
    assert rig.seen_at_once == [6]
    got = await rig.generate(stream=True)
    check_whole(got, ids)
    assert rig.seen_at_once == [1, 5]  # 1 may have sampled what the first event of 2 brought
    assert [(s.version, s.start, s.end) for s in got.spans] == [(1, 0, 1), (2, 1, 6)]


async def test_a_change_back_and_forth_between_two_reads_is_not_missed(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    machine = rig.machines[0]
    await until(lambda: machine.checks == 1)
    machine.drops_spans, machine.events_per_write = True, 4
    versions = [("2", 0, 4), ("1", 4, 6), ("2", 6, 8)]
    machine.script = [Sampled([5, 6, 7, 8, 9, 10, 11, 12], versions=versions)]
    got = await rig.generate(stream=True)
    spans = [(s.version, s.start, s.end) for s in got.spans]
    assert spans == [(1, 0, 1), (2, 1, 4), (1, 4, 7), (2, 7, 8)]


@pytest.mark.parametrize("answered", ["2", "1"])
async def test_without_a_stream_a_change_gives_all_tokens_the_older_version(
    rigs: Any, answered: str
) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    machine = rig.machines[0]
    await until(lambda: machine.checks == 1)
    machine.version, machine.drops_spans = "2", True
    if answered == "1":  # it went back meanwhile, and the gateway knows 2 already
        machine.script = [Sampled([7], version="2")]
        await rig.generate()
    machine.script = [Sampled([7, 8], version=answered), Sampled([7, 8], version=answered)]
    changed, after = await rig.generate(), await rig.generate()
    assert [(s.version, s.start, s.end) for s in changed.spans] == [(1, 0, 2)]
    assert [(s.version, s.start, s.end) for s in after.spans] == [(int(answered), 0, 2)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_got_no_token_is_made_again_elsewhere(rigs: Any, stream: bool) -> None:
    rig = await rigs(2)
    home, other = await rig.home()
    home.cut = True
    got = await rig.generate(stream=stream)
    check_whole(got, [7, 8, 9])
    assert other.requests[-1]["input_ids"] == PROMPT.tolist()
    assert other.requests[-1]["sampling_params"]["max_new_tokens"] == 50
    assert rig.client.retries == 1


async def test_tries_are_bounded_over_the_whole_call(rigs: Any) -> None:
    rig = await rigs(2, engine_retries=3, tuning=replace(FAST, engine_circuit_failures=100))
    for machine in rig.machines:
        machine.cut = True
    with pytest.raises(EngineUnavailableError, match="no engine answered in 4 tries"):
        await rig.generate()
    assert sum(len(m.requests) for m in rig.machines) <= 4


async def test_calls_wait_for_an_engine_that_is_restarted(rigs: Any) -> None:
    rig = await rigs()
    [machine] = rig.machines
    await machine.stop()
    calls = [asyncio.create_task(rig.generate(affinity=str(i))) for i in range(8)]
    await until(lambda: rig.state(machine) == "down")
    await machine.start()
    for got in await asyncio.gather(*calls):
        check_whole(got, [7, 8, 9])


async def test_a_call_on_an_engine_that_went_silent_is_given_up_and_made_elsewhere(
    rigs: Any,
) -> None:
    rig = await rigs(2, tuning=replace(FAST, engine_health_timeout_s=0.2))
    home, other = await rig.home()
    gate = asyncio.Event()
    home.script = [Sampled([7, 8], gate=gate)]
    call = asyncio.create_task(rig.generate())
    await until(lambda: len(home.requests) == 1)
    home.mute = asyncio.Event()
    check_whole(await asyncio.wait_for(call, 10), [7, 8, 9])
    assert len(other.requests) == 1
    assert rig.state(home) == "down"
    home.mute.set()
    gate.set()
    await until(lambda: rig.state(home) == "up")


async def test_a_cancelled_call_is_aborted_on_the_engine_that_has_it(rigs: Any) -> None:
    rig = await rigs(2)
    home, other = await rig.home()
    home.script = [Sampled([7, 8], gate=asyncio.Event())]
    call = asyncio.create_task(rig.generate())
    await until(lambda: len(home.requests) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: len(home.aborts) == 1)
    assert home.aborts == [home.requests[0]["rid"]]
    assert other.aborts == []
    assert [e["in_flight"] for e in rig.client.statistics()["engines"]] == [0, 0]


# -- bad answers -----------------------------------------------------------------------------


async def test_an_engine_that_fails_calls_several_times_in_a_row_gets_no_more(rigs: Any) -> None:
    rig = await rigs(2, tuning=replace(FAST, engine_circuit_open_s=60.0))
    home, other = await rig.home()
    home.script = [Sampled([], status=500) for _ in range(3)]
    for _ in range(3):
        with pytest.raises(EngineError, match="answered 500"):
            await rig.generate()
    assert rig.state(home) == "open"
    await rig.generate()
    assert len(home.requests) == 3
    assert len(other.requests) == 1


async def test_calls_wait_for_the_probe_of_the_only_engine(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0, engine_circuit_failures=1))
    [machine] = rig.machines
    machine.script = [Sampled([], status=500), Sampled([], status=503)]
    with pytest.raises(EngineError, match="answered 500"):
        await rig.generate()
    check_whole(await rig.generate(), [7, 8, 9])
    assert rig.state(machine) == "up"


async def test_a_refused_request_is_not_the_engines_failure(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_circuit_failures=1))
    [machine] = rig.machines
    machine.script = [Sampled([], status=400) for _ in range(3)]
    for _ in range(3):
        with pytest.raises(RequestError, match="refuses the request"):
            await rig.generate()
    assert rig.state(machine) == "up"


async def test_a_full_queue_that_aborts_the_call_is_a_reason_to_try_elsewhere(rigs: Any) -> None:
    rig = await rigs(2)
    home, other = await rig.home()
    full = Sampled([7], "abort")
    honest = full.chunk

    def refused(n: int, **how: Any) -> Any:
        chunk = honest(n, **how)
        chunk["output_ids"], chunk["meta_info"]["output_token_logprobs"] = [], []
        chunk["meta_info"]["finish_reason"].update(status_code=503, message="The queue is full")
        return chunk

    full.chunk = refused  # type: ignore[method-assign]
    home.script = [full]
    check_whole(await rig.generate(stream=True), [7, 8, 9])
    assert len(other.requests) == 1


async def test_a_paused_engine_that_fails_health_still_gets_its_calls(rigs: Any) -> None:
    rig = await rigs()
    [machine] = rig.machines
    machine.healthy = False
    await until(lambda: rig.state(machine) == "ailing")
    check_whole(await rig.generate(), [7, 8, 9])


# -- weight versions -------------------------------------------------------------------------


async def test_an_engine_that_comes_back_with_old_weights_gets_traffic_when_it_has_the_new(
    rigs: Any,
) -> None:
    rig = await rigs(2)
    home, other = await rig.home()
    home.version = other.version = "5"
    await rig.checked()
    await home.stop()
    home.version = "0"
    await until(lambda: rig.state(home) == "down")
    await home.start()
    await until(lambda: rig.state(home) == "behind")
    await rig.generate(affinity=rig.name_for(home))
    assert home.requests == []
    home.version = "5"
    await until(lambda: rig.state(home) == "up")
    await rig.generate(affinity=rig.name_for(home))
    assert home.requests != []


async def test_a_restart_between_two_checks_is_found_by_its_first_reply(rigs: Any) -> None:
    rig = await rigs(tuning=replace(FAST, engine_health_interval_s=60.0))
    [machine] = rig.machines
    machine.script = [Sampled([7], version="5"), Sampled([7], version="4")]
    await rig.generate()
    machine.version = "4"
    got = await rig.generate()
    assert got.policy_version == 4  # it is what sampled it
    await until(lambda: rig.state(machine) == "behind")


async def test_when_the_only_engine_lost_its_weights_calls_wait_and_then_use_it(rigs: Any) -> None:
    rig = await rigs(engine_retries=50, tuning=replace(FAST, engine_version_grace_s=0.3))
    [machine] = rig.machines
    machine.version = "5"
    await rig.checked()
    await machine.stop()
    machine.version = "0"
    await until(lambda: rig.state(machine) == "down")
    await machine.start()
    got = await rig.generate()
    assert got.policy_version == 0
    assert rig.client.statistics()["used_behind"] == 1
    assert rig.client.statistics()["version"] == 5


async def test_beyond_its_patience_a_call_logs_which_versions_are_missing(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await rigs(engine_retries=1)
    [machine] = rig.machines
    machine.version = "5"
    await rig.checked()
    await machine.stop()
    machine.version = "3"
    await until(lambda: rig.state(machine) == "down")
    await machine.start()
    await until(lambda: rig.state(machine) == "behind")
    with pytest.raises(EngineUnavailableError):
        await rig.generate()
    assert "weight version 3 while others had 5" in caplog.text


async def test_engines_that_differ_during_a_rolling_update_are_all_used(rigs: Any) -> None:
    rig = await rigs(2)
    first, second = rig.machines
    first.version = "2"
    await rig.checked()
    names = [*map(rig.name_for, rig.machines)]
    assert [(await rig.generate(affinity=name)).policy_version for name in names] == [2, 1]
    assert rig.state(second) == "up"


# -- an adapter ------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_path", [None, "adapter"])
async def test_calls_name_the_adapter_that_generates(rigs: Any, lora_path: str | None) -> None:
    rig = await rigs(lora_path=lora_path)
    await rig.generate()
    assert rig.machines[0].requests[0].get("lora_path") == lora_path


# -- questions to any engine -----------------------------------------------------------------


async def test_the_context_length_is_asked_of_whichever_engine_answers(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await rigs(2)
    await rig.machines[0].stop()
    assert await rig.client.context_length() == 4096
    await rig.client.ready()
    await rig.machines[1].stop()
    await until(lambda: all(rig.state(m) == "down" for m in rig.machines))
    with pytest.raises(EngineUnavailableError, match="no engine is healthy"):
        await rig.client.ready()
    assert all(m.url in caplog.text for m in rig.machines)


async def test_the_context_length_is_waited_for_while_the_engine_is_away(rigs: Any) -> None:
    rig = await rigs()
    [machine] = rig.machines
    await machine.stop()
    asking = asyncio.create_task(rig.client.context_length())
    await until(lambda: rig.state(machine) == "down")
    await machine.start()
    assert await asking == 4096


# -- answers of another shape ------------------------------------------------------------------


class Says(ConnectionPool):
    """Gives every request this answer, of a stream as one event."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = json.dumps(answer).encode()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        headers: bytes = b"",
        on_data: OnData | None = None,
    ) -> Response:
        if on_data is None:
            return 200, self._answer
        on_data(b"data: %b\n\ndata: [DONE]\n\n" % self._answer)
        return 200, b""


async def part_of(answer: Any, *, stream: bool, most: int = 2) -> Part:
    """The part that the gateway takes of the engine's answer."""
    part = Part(most, vocabulary=9)
    request = GenerateRequest("r", PROMPT, Sampling(most, 1.0), most, stream=stream)
    await EngineClient("http://engine", connections=Says(answer)).sample(request, part.take)
    return part


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_a_weight_version_is_of_a_server_that_is_too_old(
    stream: bool,
) -> None:
    """SGLang's before 0.5."""
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None]]}
    answer = {"output_ids": [7], "meta_info": meta}
    with pytest.raises(AskingError, match="has no weight_version: its server is too old"):
        await part_of(answer, stream=stream)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in `value`."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += places(value[key], (*path, key))
    return found


@given(data=st.data(), other=JSON, stream=st.booleans())
def test_an_answer_of_another_shape_is_the_engines_failure(
    data: Any, other: Any, stream: bool
) -> None:
    answer: dict[str, Any] = {
        "output_ids": [7, 8],
        "meta_info": {
            "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
            "output_top_logprobs": [[[-0.5, 7, None]], [[-1.0, 3, None]]],
            "weight_versions": [
                {"version": "1", "start": 0, "end": 1},
                {"version": "2", "start": 1, "end": 2},
            ],
            "weight_version": "2",
            "completion_tokens": 2,
            "cached_tokens": 0,
            "finish_reason": {"type": "stop", "matched": 8},
        },
    }
    *path, last = data.draw(st.sampled_from(places(answer)))
    inner: Any = answer
    for key in path:
        inner = inner[key]
    inner[last] = other
    try:
        part = asyncio.run(part_of(answer, stream=stream))
        generation = part.generation(part.finish)
    except (EngineError, AskingError):
        return
    assert generation.response_ids.tolist() == answer["output_ids"]
    assert all(type(i) is int and i < 9 for i in answer["output_ids"])
    assert all(type(e[0]) is not str for e in answer["meta_info"]["output_token_logprobs"])
    assert len(generation.response_ids) == len(generation.log_probs) == generation.spans[-1].end
