"""The contract of every engine, embedded or a real SGLang: the API as Stepwell relies on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineRequestError
from tests.backends.engines.streams import streamed
from tests.builders import until

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
LONG = {"max_new_tokens": 400, "ignore_eos": True}


def log_probs(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([v for v, _, _ in answer["meta_info"]["output_token_logprobs"]])


def assert_spans_cover(answer: dict[str, Any], versions: list[str]) -> None:
    spans = answer["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == versions
    edges = [0, *(s["end"] for s in spans)]
    assert [s["start"] for s in spans] == edges[:-1]
    assert edges[-1] == len(answer["output_ids"])


class InFlight:
    """A streamed request that has produced tokens and goes on."""

    def __init__(self, client: EngineClient, **fields: Any) -> None:
        self._chunks = streamed(client, PROMPT, LONG, return_logprob=True, **fields)

    async def started(self, n: int = 5) -> dict[str, Any]:
        async for chunk in self._chunks:
            assert chunk["meta_info"]["finish_reason"] is None, "it was too quick for the test"
            if len(chunk["output_ids"]) >= n:
                return chunk
        raise AssertionError("the stream ended early")

    async def rest(self) -> dict[str, Any]:
        return [chunk async for chunk in self._chunks][-1]

    async def leave(self) -> None:
        await self._chunks.aclose()


async def test_generate_returns_ids_log_probs_and_why_it_ended(client: EngineClient) -> None:
    answer = await client.generate(
        PROMPT, {"max_new_tokens": 6, "ignore_eos": True}, return_logprob=True, rid="abc"
    )
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("abc", 10, 6)
    assert meta["weight_version"] in ("0", "default")
    assert_spans_cover(answer, [meta["weight_version"]])
    assert isinstance(answer["text"], str)


async def test_a_stream_is_cumulative_and_ends_with_done(client: EngineClient) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.url}/generate", json=body) as response,
    ):
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for earlier, later in pairwise(chunks):
        n = len(earlier["output_ids"])
        assert later["output_ids"][:n] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        before = earlier["meta_info"]["output_token_logprobs"]
        assert later["meta_info"]["output_token_logprobs"][:n] == before
        assert earlier["meta_info"]["finish_reason"] is None
    assert len(chunks[-1]["output_ids"]) == 30
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


async def test_log_probs_are_after_temperature_and_before_top_p_and_top_k(
    client: EngineClient, engine: Any, reference: Callable[..., Any]
) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True}
    for extra in ({"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.6, "top_k": 20}):
        answer = await client.generate(PROMPT, {**params, **extra}, return_logprob=True)
        expected = reference(engine.base).log_probs(
            PROMPT, answer["output_ids"], extra["temperature"]
        )
        torch.testing.assert_close(log_probs(answer), expected, atol=1e-4, rtol=0)


async def test_temperature_zero_is_greedy_and_scores_at_temperature_one(
    client: EngineClient, engine: Any, reference: Callable[..., Any]
) -> None:
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    first, second = [await client.generate(PROMPT, params, return_logprob=True) for _ in range(2)]
    assert first["output_ids"] == second["output_ids"]
    expected = reference(engine.base).log_probs(PROMPT, first["output_ids"])
    torch.testing.assert_close(log_probs(first), expected, atol=1e-4, rtol=0)


async def test_alternatives_come_with_each_token_best_first(client: EngineClient) -> None:
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = await client.generate(PROMPT, params, return_logprob=True, top_logprobs_num=2)
    top = answer["meta_info"]["output_top_logprobs"]
    assert all(len(best) == 2 and best[0][0] >= best[1][0] for best in top)
    assert [best[0][1] for best in top] == answer["output_ids"]


async def test_the_end_token_stops_and_is_part_of_the_ids_but_not_of_the_text(
    client: EngineClient,
) -> None:
    answers = await asyncio.gather(
        *(client.generate(PROMPT, {"max_new_tokens": 300}) for _ in range(8))
    )
    ends = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ends, "a tenth of the vocabulary ends a request; none of eight did"
    for answer in ends:
        assert answer["meta_info"]["finish_reason"]["matched"] == answer["output_ids"][-1]
        assert len(answer["text"]) <= len(answer["output_ids"]) - 1


async def test_a_stop_token_id_stops_unless_eos_is_ignored(client: EngineClient) -> None:
    greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    ids = (await client.generate(PROMPT, greedy))["output_ids"]
    stop = ids[5]
    params = {"max_new_tokens": 12, "temperature": 0, "stop_token_ids": [stop]}
    stopped = await client.generate(PROMPT, params)
    assert stopped["output_ids"] == ids[: len(stopped["output_ids"])]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    ignoring = await client.generate(PROMPT, {**params, "ignore_eos": True})
    assert ignoring["output_ids"] == ids


async def test_a_stop_string_trims_the_text_but_not_the_ids(client: EngineClient) -> None:
    params = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    for _ in range(20):
        whole = await client.generate(PROMPT, params)
        if " " not in whole["text"] and len(set(whole["text"])) > 8:
            break
    alphabet = sorted(set(whole["text"]))
    stopped = await client.generate(PROMPT, {**params, "stop": alphabet})
    reason = stopped["meta_info"]["finish_reason"]
    assert reason["type"] == "stop"
    assert reason["matched"] in alphabet
    assert reason["matched"] not in stopped["text"]
    assert len(stopped["output_ids"]) == len(stopped["text"]) + 1


async def test_abort_ends_a_request_and_those_whose_id_starts_with_its_own(
    client: EngineClient,
) -> None:
    doomed, spared = InFlight(client, rid="doomed-1"), InFlight(client, rid="doomed-2")
    also = InFlight(client, rid="doomed-10")
    seen = await doomed.started()
    await also.started()
    await spared.started()
    await client.abort("doomed")  # no request of that id
    await client.abort("doomed-1")
    answer = await doomed.rest()
    assert (await also.rest())["meta_info"]["finish_reason"]["type"] == "abort"
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "Aborted")
    assert answer["output_ids"][: len(seen["output_ids"])] == seen["output_ids"]
    assert_spans_cover(answer, [answer["meta_info"]["weight_version"]])
    assert (await spared.rest())["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_all_ends_every_request(client: EngineClient) -> None:
    flights = [InFlight(client) for _ in range(3)]
    for flight in flights:
        await flight.started()
    await client.abort()
    for flight in flights:
        assert (await flight.rest())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_requests_sent_while_paused_wait_for_continue(client: EngineClient) -> None:
    for mode in ("abort", "retract", "in_place"):
        await client.pause(mode)
        waiting = asyncio.create_task(client.generate(PROMPT, {"max_new_tokens": 2}))
        for _ in range(5):  # the engine answers other calls meanwhile
            await client.model_info()
            await asyncio.sleep(0.02)
        assert not waiting.done()
        await client.continue_()
        assert (await waiting)["meta_info"]["finish_reason"]["type"] in ("length", "stop")


async def test_pausing_with_abort_returns_what_is_there(client: EngineClient) -> None:
    flight = InFlight(client)
    seen = await flight.started()
    await client.pause("abort")
    answer = await flight.rest()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) >= len(seen["output_ids"])
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


async def test_a_request_held_in_place_goes_on_under_the_new_weights(
    client: EngineClient, model_dirs: Any
) -> None:
    flight = InFlight(client)
    await flight.started()
    await client.pause("in_place")
    await client.update_weights_from_disk(str(model_dirs.new), 7, flush_cache=False)
    await client.continue_()
    answer = await flight.rest()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert answer["meta_info"]["num_retractions"] == 0
    assert_spans_cover(answer, ["0", "7"])


async def test_a_retracted_request_is_recomputed_under_the_new_weights(
    client: EngineClient, engine: Any, model_dirs: Any, reference: Callable[..., Any]
) -> None:
    flight = InFlight(client)
    await flight.started()
    await client.pause("retract")
    await client.update_weights_from_disk(str(model_dirs.new), 8)
    await client.continue_()
    answer = await flight.rest()
    assert answer["meta_info"]["num_retractions"] == 1
    assert_spans_cover(answer, ["0", "8"])
    cut = answer["meta_info"]["weight_versions"][0]["end"]
    ids, actual = answer["output_ids"], log_probs(answer)
    old = reference(engine.base).log_probs(PROMPT, ids[:cut])
    new = reference(model_dirs.new).log_probs(PROMPT + ids[:cut], ids[cut:])
    torch.testing.assert_close(actual[:cut], old, atol=1e-4, rtol=0)
    torch.testing.assert_close(actual[cut:], new, atol=1e-4, rtol=0)


async def test_an_update_without_a_pause_lets_running_requests_finish_on_the_old_weights(
    client: EngineClient, model_dirs: Any
) -> None:
    flight = InFlight(client)
    await flight.started()
    update = asyncio.create_task(client.update_weights_from_disk(str(model_dirs.new), 9))
    answer = await flight.rest()
    await update
    assert_spans_cover(answer, ["0"])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    after = await client.generate(PROMPT, {"max_new_tokens": 2, "ignore_eos": True})
    assert_spans_cover(after, ["9"])
    assert await client.weight_version() == 9


async def test_new_weights_are_the_ones_that_sample(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any]
) -> None:
    body = {"model_path": str(model_dirs.new), "weight_version": "3"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.url}/update_weights_from_disk", json=body) as answered,
    ):
        result = await answered.json()
    assert result["success"]
    assert result["message"] == "Succeeded to update model weights. Weight version updated to 3."
    answer = await client.generate(
        PROMPT, {"max_new_tokens": 30, "ignore_eos": True}, return_logprob=True
    )
    expected = reference(model_dirs.new).log_probs(PROMPT, answer["output_ids"])
    torch.testing.assert_close(log_probs(answer), expected, atol=1e-4, rtol=0)
    info = await client.model_info()
    assert (info["weight_version"], info["model_path"]) == ("3", str(model_dirs.new))


async def test_a_bad_update_is_refused_and_the_old_weights_still_serve(
    client: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    before = await client.generate(PROMPT, params, return_logprob=True)
    (tmp_path / "config.json").write_text((model_dirs.base / "config.json").read_text())
    for path in ("/nonexistent", str(tmp_path)):
        with pytest.raises(EngineRequestError, match="Failed to"):
            await client.update_weights_from_disk(path, 5)
    assert await client.weight_version() == 0
    after = await client.generate(PROMPT, params, return_logprob=True)
    assert after["output_ids"] == before["output_ids"]
    torch.testing.assert_close(log_probs(after), log_probs(before), atol=1e-5, rtol=0)


async def test_a_shared_prefix_is_reused_until_the_cache_is_flushed_or_the_weights_change(
    client: EngineClient, model_dirs: Any
) -> None:
    async def cached() -> int:
        answer = await client.generate(PROMPT, {"max_new_tokens": 1})
        return int(answer["meta_info"]["cached_tokens"])

    await client.flush()
    assert await cached() == 0
    assert await cached() == len(PROMPT) - 1
    await client.flush()
    assert await cached() == 0
    await client.update_weights_from_disk(str(model_dirs.new), 4)
    assert await cached() == 0


async def test_a_client_that_disconnects_frees_its_place(client: EngineClient) -> None:
    async def running() -> int:
        return int((await client.loads())["loads"][0]["num_running_reqs"])

    flight = InFlight(client)
    await flight.started()
    plain = asyncio.create_task(client.generate(PROMPT, LONG))

    async def both_run() -> bool:
        return await running() == 2

    await until(both_run)
    await flight.leave()
    plain.cancel()

    async def none_runs() -> bool:
        return await running() == 0

    await until(none_runs)
    await client.flush()  # refused while a request is in flight


async def test_a_prompt_longer_than_the_context_is_refused(client: EngineClient) -> None:
    limit = await client.max_model_len()
    with pytest.raises(EngineRequestError, match="longer than the model's context length") as e:
        await client.generate([40] * (limit + 1), {"max_new_tokens": 1})
    assert e.value.status == 400
    with pytest.raises(EngineRequestError, match="maximum context length"):
        await client.generate([40] * (limit - 5), {"max_new_tokens": 10})


async def test_more_requests_than_places_all_finish(client: EngineClient) -> None:
    tasks = [
        client.generate([40 + i, 50, 60], {"max_new_tokens": 5, "ignore_eos": True})
        for i in range(24)
    ]
    answers = await asyncio.gather(*tasks)
    assert all(len(a["output_ids"]) == 5 for a in answers)


async def test_health_and_model_information(client: EngineClient) -> None:
    assert await client.health()
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{client.url}/health_generate") as response:
            assert response.status == 200
        async with http.get(f"{client.url}/get_model_info") as response:
            assert (await response.json())["is_generation"] is True
    assert await client.max_model_len() == 512
