"""The address that a generate function of slime calls: SGLang's body and answer; a field that is
not served is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from stepwell.trainer.rollout.gateway import ClosedError
from stepwell.trainer.slime.engine_address import HOST, EngineAddress

WORDS = {1: "one", 2: " two", 3: " END", 9: ""}


class Tokenizer:
    """Four words; 9 ends a reply."""

    eos_token_id = 9

    def encode(self, text: str) -> list[int]:
        return [i for i, word in WORDS.items() if word and word.strip() in text]

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(WORDS[i] for i in ids)


class Gateway:
    """Answers what the test says."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.response = [1, 2, 3, 9]
        self.reason = "stop"
        self.is_closed = False

    async def ask(self, url: str, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        if self.is_closed:
            raise ClosedError("the rollout has ended")
        self.asked.append(body)
        return {
            "prompt_ids": body["prompt_ids"],
            "response_ids": self.response,
            "rollout_log_probs": [-0.5] * len(self.response),
            "version_spans": [
                {"version": 4, "start": 0, "end": 2},
                {"version": 5, "start": 2, "end": len(self.response)},
            ],
            "sampling_params": {"temperature": 1.0},
            "finish_reason": self.reason,
        }


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def address(gateway: Gateway) -> AsyncIterator[EngineAddress]:
    identity = {"trajectory_uid": "t", "prompt_uid": "p"}
    own: Any = gateway
    async with EngineAddress(own, "http://gateway", identity, Tokenizer()) as made:
        yield made


async def post(address: EngineAddress, body: object, path: str = "/generate") -> tuple[int, Any]:
    url = f"http://{HOST}:{address.port}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_call_is_the_gateways_and_its_answer_sglangs(
    address: EngineAddress, gateway: Gateway
) -> None:
    params = {"max_new_tokens": 8, "top_p": None, "custom_params": {}, "sampling_seed": 3}
    body = {"text": "one two", "sampling_params": params, "return_logprob": True, "stream": False}
    status, answer = await post(address, {**body, "rid": "mine"})
    assert status == 200
    (asked,) = gateway.asked
    assert asked == {
        "max_tokens": 8,
        "seed": 3,
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "prompt_ids": [1, 2],
    }
    assert (answer["text"], answer["output_ids"]) == ("one two END", [1, 2, 3, 9])
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, i, None] for i in (1, 2, 3, 9)]
    assert (meta["id"], meta["weight_version"]) == ("mine", "4")
    assert meta["finish_reason"] == {"type": "stop"}
    assert [call.response_ids for call in address.calls] == [[1, 2, 3, 9]]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stop": " END"}, "one two"),
        ({"stop": ["never", " two"]}, "one"),
        ({"stop": " END", "no_stop_trim": True}, "one two END"),
        ({"stop_token_ids": [3]}, "one two END"),
    ],
)
async def test_the_text_ends_before_a_stop_and_the_ids_do_not(
    address: EngineAddress, params: dict[str, Any], text: str
) -> None:
    _, answer = await post(address, {"input_ids": [1], "sampling_params": params})
    assert (answer["text"], answer["output_ids"]) == (text, [1, 2, 3, 9])


async def test_parameters_that_ask_for_something_go_to_the_gateway_which_names_them(
    address: EngineAddress, gateway: Gateway
) -> None:
    params = {"custom_params": {"a": 1}, "temperature": 0.5}
    await post(address, {"input_ids": [1], "sampling_params": params})
    assert gateway.asked[0]["custom_params"] == {"a": 1}
    assert gateway.asked[0]["temperature"] == 0.5


async def test_a_stop_id_at_the_end_is_not_shown(address: EngineAddress, gateway: Gateway) -> None:
    gateway.response, gateway.reason = [1, 2, 3], "length"
    _, answer = await post(address, {"input_ids": [1], "sampling_params": {"stop_token_ids": [3]}})
    assert answer["text"] == "one two"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([1], r"the body is [1]; send an object"),
        ({"input_ids": [1], "text": "one"}, "as input_ids or as text, one of them"),
        ({}, "as input_ids or as text, one of them"),
        ({"text": ["one", "two"]}, "send one prompt a call"),
        ({"input_ids": [1], "stream": True}, "stream is True, which is not served; leave it out"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path is 'x', which is not served"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    address: EngineAddress, gateway: Gateway, body: object, said: str
) -> None:
    status, answer = await post(address, body)
    assert status == 400
    assert said in answer["error"]["message"]
    assert said in address.refusal
    assert (gateway.asked, address.calls) == ([], [])


async def test_another_path_and_a_rollout_that_has_ended_are_refused(
    address: EngineAddress, gateway: Gateway
) -> None:
    status, answer = await post(address, {}, "/v1/chat/completions")
    assert status == 400
    assert "they call POST /generate" in answer["error"]["message"]
    gateway.is_closed = True
    status, answer = await post(address, {"input_ids": [1]})
    assert (status, answer["error"]["message"]) == (409, "the rollout has ended")
