"""The contract of the seam (`engines/api.py`), in the words of the seam alone: the same tests for
the embedded engine, a real SGLang, a real vLLM, a scripted Dynamo and the example of a third party.
What each engine answered is a table in `docs/engines.md` (`table.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from stepwell.backends.config import EngineConfig, PauseMode
from stepwell.backends.engines.api import Engine, GenerateRequest, Output, Sampling
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineRequestError, EngineUnavailableError
from stepwell.datapool.types import VersionSpan
from tests.backends.engines.conftest import save_qwen3
from tests.backends.engines.dynamo_server import dynamo, in_a_thread
from tests.backends.engines.embedded_here import embedded_here
from tests.backends.engines.table import EXAMPLE

ROOT = Path(__file__).parents[3]
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
CONTEXT = 16_384
REAL = "STEPWELL_TEST_ENGINES" in os.environ
LONG = 1500 if REAL else 600
"""Tokens of a request that is to be met under way and ends by itself: half a second at least."""
ENDLESS = 16_000
"""Tokens of one that is to be met under way and does not end, however busy this machine is."""
KINDS = os.environ.get("STEPWELL_TEST_ENGINES", f"embedded,{EXAMPLE},dynamo").split(",")
CLOSE = {"atol": 1e-4, "rtol": 0}


class Call:
    """A request under way, with the outputs that came."""

    def __init__(self, engine: Engine, n: int, *, stream: bool, **sampling: Any) -> None:
        self.rid = uuid.uuid4().hex
        self.outputs: list[Output] = []
        self._n = n
        self._news = asyncio.Event()
        settings = Sampling(n, **{"temperature": 1.0, **sampling})
        prompt = np.array(PROMPT, np.int32)
        request = GenerateRequest(self.rid, prompt, settings, n, stream=stream)
        self.task = asyncio.create_task(engine.sample(request, self._take))

    def _take(self, output: Output) -> None:
        self.outputs.append(output)
        self._news.set()

    async def started(self, more: int = 5) -> None:
        """Return once it has `more` tokens than now and goes on."""
        n = len(self.ids) + more
        while len(self.ids) < n and not self.task.done():
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait({self.task, news}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
        assert not self.task.done() or self.task.result() is None
        assert self.outputs[-1].finish is None, "it was too quick for the test"

    async def ended(self) -> Output:
        """The last output."""
        async with asyncio.timeout(120):
            await self.task
        assert [o.finish for o in self.outputs[:-1]] == [None] * (len(self.outputs) - 1)
        return self.outputs[-1]

    @property
    def ids(self) -> list[int]:
        return [i for output in self.outputs for i in output.ids]

    @property
    def log_probs(self) -> torch.Tensor:
        return torch.tensor([p for output in self.outputs for p in output.log_probs])


class Asker:
    """Starts calls to one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def endless(self, **sampling: Any) -> Call:
        """A stream that goes on."""
        return self.call(ENDLESS, stream=True, **sampling)

    def call(self, n: int, *, stream: bool = False, **sampling: Any) -> Call:
        return Call(self._engine, n, stream=stream, **sampling)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of a model that never ends by itself, since the seam has no way to
    ignore an end: its end is a token behind the model's vocabulary."""
    root = tmp_path_factory.mktemp("endless")
    for seed, name in enumerate(("base", "new")):
        folder = save_qwen3(root / name, seed, head_dim=32)  # vLLM's least on a CPU
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
        tokenizer.save_pretrained(folder)
        for file in ("config.json", "generation_config.json"):
            config = json.loads((folder / file).read_text())
            config["eos_token_id"] = tokenizer.eos_token_id
            if "max_position_embeddings" in config:
                config["max_position_embeddings"] = CONTEXT
            (folder / file).write_text(json.dumps(config))
    return root / "base", root / "new"


def config_of(model: Path, kind: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        kind=kind,
        model_path=model,
        dtype="float32",
        max_running_requests=8,
        stream_interval=1,
        options=options,
    )


@contextmanager
def started(
    model: Path, folder: Path, kind: str, **options: Any
) -> Iterator[tuple[EngineConfig, str]]:
    """An engine of this kind, and its url."""
    config = config_of(model, kind, **options)
    supervisor = Supervisor(config, folder)
    try:
        yield config, supervisor.start()
    finally:
        supervisor.stop()


@pytest.fixture(scope="module")
def embedded(endless: tuple[Path, Path]) -> Iterator[tuple[EngineConfig, str]]:
    """The one that is asked itself, and behind Dynamo."""
    with embedded_here(endless[0], "float32") as url:
        yield config_of(endless[0], "embedded"), url


@pytest.fixture(scope="module", params=KINDS)
def running(
    request: pytest.FixtureRequest,
    endless: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EngineConfig, str]]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
    elif request.param == "dynamo":
        config, url = request.getfixturevalue("embedded")
        with in_a_thread(dynamo(url)) as (frontend, worker):
            attached = {"kind": "dynamo", "options": {"frontend": frontend}}
            yield config.model_copy(update=attached), worker
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "examples" / "plugin")
            options = {"tokens_per_line": 1} if request.param == EXAMPLE else {}
            folder = tmp_path_factory.mktemp("logs")
            with started(endless[0], folder, request.param, **options) as running:
                yield running


@pytest.fixture
async def engine(
    running: tuple[EngineConfig, str], endless: tuple[Path, Path]
) -> AsyncIterator[Engine]:
    """Unpaused, idle and on its first weights when a test begins."""
    config, url = running
    async with connect(config, url) as engine:
        yield engine
        await engine.continue_()
        await engine.abort()
        if (await engine.state()).version != 0:
            await engine.update_weights_from_disk(str(endless[0]), 0)
        # A server may look at an abort when it steps next: this request is it.
        await Asker(engine).call(1).task


@pytest.fixture
def ask(engine: Engine) -> Asker:
    return Asker(engine)


def spans_of(output: Output) -> list[int]:
    """Versions of the spans, which lie behind one another."""
    assert output.spans is not None
    assert output.spans[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(output.spans))
    return [span.version for span in output.spans]


def assert_of(
    call: Call, spans: Sequence[VersionSpan], models: dict[int, Path], reference: Callable[..., Any]
) -> None:
    """The log-probs are those of the version that each span names."""
    ids = call.ids
    for span in spans:
        before = PROMPT + ids[: span.start]
        wanted = reference(models[span.version]).log_probs(before, ids[span.start : span.end])
        torch.testing.assert_close(call.log_probs[span.start : span.end], wanted, **CLOSE)


@pytest.mark.slow
async def test_ids_go_in_and_sampled_ids_come_out_with_their_log_probs(
    ask: Asker, endless: Any, reference: Callable[..., Any]
) -> None:
    for stream in (False, True):
        call = ask.call(30, stream=stream)
        last = await call.ended()
        assert len(call.ids) == 30
        assert (last.finish, spans_of(last)) == ("length", [0])
        assert_of(call, last.spans or (), {0: endless[0]}, reference)
        assert len(call.outputs) == 1 or stream


async def test_a_stream_hands_on_what_is_new_as_it_is_sampled(engine: Engine, ask: Asker) -> None:
    call = ask.endless()
    await call.started()
    n_outputs, n_ids = len(call.outputs), len(call.ids)
    await call.started()
    await engine.abort()
    await call.ended()
    assert len(call.outputs) > n_outputs > 0
    assert len(call.ids) > n_ids > 0
    assert all(len(o.ids) == len(o.log_probs) for o in call.outputs)


async def test_log_probs_are_at_the_temperature_of_the_request(
    ask: Asker, endless: Any, reference: Callable[..., Any]
) -> None:
    for temperature in (0.7, 1.3):
        call = ask.call(30, temperature=temperature)
        await call.ended()
        wanted = reference(endless[0]).log_probs(PROMPT, call.ids, temperature)
        torch.testing.assert_close(call.log_probs, wanted, **CLOSE)


async def test_temperature_zero_is_greedy_and_scores_at_temperature_one(
    ask: Asker, endless: Any, reference: Callable[..., Any]
) -> None:
    first, second = ask.call(20, temperature=0.0), ask.call(20, temperature=0.0, stream=True)
    await first.ended()
    await second.ended()
    assert first.ids == second.ids
    wanted = reference(endless[0]).log_probs(PROMPT, first.ids)
    torch.testing.assert_close(first.log_probs, wanted, **CLOSE)


async def test_alternatives_come_with_each_token_best_first(ask: Asker) -> None:
    for stream in (False, True):
        call = ask.call(8, stream=stream, n_top_logprobs=3)
        await call.ended()
        tops = [top for output in call.outputs for top in output.top_log_probs]
        assert len(tops) == 8
        for top in tops:
            values = [p for _, p in top]
            assert len(top) == 3
            assert values == sorted(values, reverse=True)


async def test_a_token_id_that_stops_is_the_last_one_and_is_named(ask: Asker) -> None:
    whole = ask.call(12, temperature=0.0)
    await whole.ended()
    stop = whole.ids[5]
    n = whole.ids.index(stop) + 1
    for stream in (False, True):
        call = ask.call(12, stream=stream, temperature=0.0, stop_token_ids=(stop,))
        last = await call.ended()
        assert (last.finish, last.matched, call.ids) == ("stop", stop, whole.ids[:n])


async def test_a_string_that_stops_is_named_and_its_tokens_are_kept(ask: Asker) -> None:
    whole = ask.call(12, temperature=0.0)
    await whole.ended()
    printable = next(i for i in whole.ids if 14 < i < 96)  # "!" is 3, a token per character
    stop = chr(printable + 30)
    n = whole.ids.index(printable) + 1
    for stream in (False, True):
        call = ask.call(12, stream=stream, temperature=0.0, stop=("no such text", stop))
        last = await call.ended()
        assert (last.finish, last.matched, call.ids) == ("stop", stop, whole.ids[:n])


async def test_an_aborted_request_ends_with_what_it_has_and_others_go_on(
    engine: Engine, ask: Asker
) -> None:
    doomed, spared = ask.endless(), ask.endless()
    await doomed.started()
    await spared.started()
    await engine.abort("nobody")
    await engine.abort(doomed.rid)
    last = await doomed.ended()
    assert (last.finish, spans_of(last)) == ("abort", [0])
    assert 5 <= len(doomed.ids) < ENDLESS
    await spared.started()


async def test_abort_of_all_ends_every_request(engine: Engine, ask: Asker) -> None:
    calls = [ask.endless() for _ in range(3)]
    for call in calls:
        await call.started()
    await engine.abort()
    for call in calls:
        assert (await call.ended()).finish == "abort"


async def test_requests_that_come_while_it_is_paused_wait(engine: Engine, ask: Asker) -> None:
    mode: PauseMode
    for mode in ("abort", "retract", "in_place"):
        await engine.pause(mode)
        call = ask.call(2)
        for _ in range(5):  # it answers other calls meanwhile
            assert (await engine.state()).version == 0
            await asyncio.sleep(0.02)
        assert not call.task.done()
        await engine.continue_()
        assert (await call.ended()).finish == "length"


async def test_a_pause_that_aborts_returns_what_is_there(engine: Engine, ask: Asker) -> None:
    stream, whole = ask.endless(), ask.call(ENDLESS)
    await stream.started()
    await engine.pause("abort")
    for call in (stream, whole):
        assert (await call.ended()).finish == "abort"
        assert len(call.ids) == len(call.log_probs)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_that_a_pause_holds_goes_on_under_the_new_weights_with_two_spans(
    mode: PauseMode,
    engine: Engine,
    ask: Asker,
    endless: tuple[Path, Path],
    reference: Callable[..., Any],
) -> None:
    """Retracted, its log-probs are each version's own; held in place, it goes on on the old
    cache, and only those before the update are."""
    call = ask.endless()
    await call.started()
    await engine.pause(mode)
    await engine.update_weights_from_disk(str(endless[1]), 7, flush_cache=mode == "retract")
    await engine.continue_()
    await call.started()
    await engine.abort()
    last = await call.ended()
    assert (last.finish, spans_of(last), last.version) == ("abort", [0, 7], 7)
    assert last.spans is not None
    spans = last.spans if mode == "retract" else last.spans[:1]
    assert_of(call, spans, dict(zip((0, 7), endless, strict=True)), reference)


@pytest.mark.slow
async def test_an_update_without_a_pause_lets_running_requests_finish_on_the_old_weights(
    engine: Engine, ask: Asker, endless: tuple[Path, Path], reference: Callable[..., Any]
) -> None:
    call = ask.call(LONG, stream=True)
    await call.started()
    update = asyncio.create_task(engine.update_weights_from_disk(str(endless[1]), 9))
    assert spans_of(await call.ended()) == [0]
    await update
    after = ask.call(20)
    last = await after.ended()
    assert spans_of(last) == [9]
    assert_of(after, last.spans or (), {9: endless[1]}, reference)
    assert await engine.weight_version() == 9


async def test_a_canary_says_so_and_has_its_number(
    engine: Engine, ask: Asker, endless: tuple[Path, Path]
) -> None:
    await engine.pause("retract")
    await engine.update_weights_from_disk(str(endless[1]), "8-canary")
    await engine.continue_()
    state = await engine.state()
    assert (state.version, state.is_canary, state.name) == (8, True, "8-canary")
    last = await ask.call(2).ended()
    assert (last.version, last.is_canary) == (8, True)


async def test_weights_that_are_not_there_are_refused_and_the_old_ones_serve_on(
    engine: Engine, ask: Asker, endless: tuple[Path, Path], tmp_path: Path
) -> None:
    before = ask.call(20, temperature=0.0)
    await before.ended()
    shutil.copy(endless[0] / "config.json", tmp_path)
    for path in ("/nonexistent", str(tmp_path)):
        with pytest.raises(EngineRequestError, match=r"(?i)failed|cannot|not"):
            await engine.update_weights_from_disk(path, 5)
    assert await engine.weight_version() == 0
    after = ask.call(20, temperature=0.0)
    await after.ended()
    assert after.ids == before.ids
    torch.testing.assert_close(after.log_probs, before.log_probs, atol=1e-5, rtol=0)


async def test_new_weights_use_no_prefix_of_the_old_ones(
    engine: Engine, ask: Asker, endless: tuple[Path, Path], reference: Callable[..., Any]
) -> None:
    await ask.call(2).ended()
    await engine.pause("abort")
    await engine.update_weights_from_disk(str(endless[1]), 4)
    await engine.continue_()
    call = ask.call(20)
    last = await call.ended()
    assert last.cached_tokens == 0
    assert_of(call, last.spans or (), {4: endless[1]}, reference)


async def test_a_call_that_is_cancelled_and_aborted_frees_its_place(
    engine: Engine, ask: Asker
) -> None:
    calls = [ask.endless() for _ in range(8)]  # as many as it takes at once
    for call in calls:
        await call.started(1)
    for call in calls:
        call.task.cancel()
        await engine.abort(call.rid)
    async with asyncio.timeout(120):  # a machine may be busy; endless ones take longer
        await ask.call(2).task


async def test_more_requests_than_places_all_finish(ask: Asker) -> None:
    calls = [ask.call(5, stream=i % 2 == 0) for i in range(24)]
    for call in calls:
        await call.ended()
        assert len(call.ids) == 5


async def test_a_prompt_that_does_not_fit_is_refused(engine: Engine) -> None:
    limit = await engine.max_model_len()
    assert limit == CONTEXT
    prompt = np.full(limit + 1, 40, np.int32)
    request = GenerateRequest("long", prompt, Sampling(1, 1.0), 1)
    with pytest.raises(EngineRequestError) as e:
        await engine.sample(request, lambda _: None)
    assert e.value.status == 400


async def test_it_says_that_it_is_well_and_a_copy_in_another_process_asks_the_same(
    engine: Engine,
) -> None:
    await engine.check()
    await engine.check_generates()
    assert await engine.health()
    copy = pickle.loads(pickle.dumps(engine))
    assert (copy.url, copy.own, type(copy)) == (engine.url, engine.own, type(engine))


async def test_where_nobody_listens_it_is_said_so(
    running: tuple[EngineConfig, str],
) -> None:
    async with connect(running[0], "http://127.0.0.1:9") as engine:
        with pytest.raises(EngineUnavailableError) as e:
            await engine.state()
        assert e.value.refused
        assert not await engine.health()
