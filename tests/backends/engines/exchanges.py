"""Requests whose answers by a real SGLang are recorded, and how an engine is asked them.

    for exchange in EXCHANGES:  flush ─► calls before ─► the call ─► calls after
    fixtures/NAME.json          {"engine": …, "path": …, "status": …, "body": … | "stream": […]}

`record.py` writes the fixtures, `test_recorded.py` compares an engine's answers with them. The
model is the quickstart's, committed, so that what a greedy decoder says of it can be compared too;
`new` is the same with its last norm doubled: the same greedy tokens, other log-probs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
MODEL = HERE.parents[2] / "examples" / "quickstart" / "model"

PROMPT = [
    1,
    367,
    207,
    370,
    290,
    369,
    345,
    317,
    290,
    371,
    311,
    368,
    34,
    229,
    25,
    26,
    314,
    229,
    27,
    28,
    324,
    2,
    207,
    1,
    351,
    207,
]
"""Greedy, the model calls its calculator and ends."""
GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    body: Any = None


@dataclass(frozen=True)
class Exchange:
    """`call`, after `before` and followed by `after`. With `in_flight`, a long request is streamed
    first, and what is recorded is the last it says."""

    call: Call
    before: Sequence[Call] = ()
    after: Sequence[Call] = ()
    in_flight: bool = False


def _generate(**fields: Any) -> Exchange:
    params = {**GREEDY, "max_new_tokens": 6, **fields.pop("params", {})}
    return Exchange(Call("POST", "/generate", {"sampling_params": params, **fields}))


def _post(path: str, body: Any) -> Call:
    return Call("POST", path, body)


CONTINUE = _post("/continue_generation", {})
LONG = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 400}}
UPDATE = {"model_path": "NEW_DIR", "weight_version": "7", "flush_cache": False}
BACK = _post("/update_weights_from_disk", {"model_path": "MODEL_DIR", "weight_version": "0"})
GREETED = _generate(input_ids=PROMPT).call


def _paused(mode: str) -> Exchange:
    """An update while a request is in flight and generation is paused in `mode`."""
    body = {**UPDATE, "flush_cache": mode != "in_place"}
    before = (_post("/pause_generation", {"mode": mode}), _post("/update_weights_from_disk", body))
    return Exchange(CONTINUE, before=before, after=(BACK,), in_flight=True)


EXCHANGES: dict[str, Exchange] = {
    "health": Exchange(Call("GET", "/health")),
    "model_info": Exchange(Call("GET", "/model_info")),
    "get_model_info": Exchange(Call("GET", "/get_model_info")),
    "v1_models": Exchange(Call("GET", "/v1/models")),
    "loads": Exchange(Call("GET", "/v1/loads")),
    "no_such_route": Exchange(Call("GET", "/get_weight_version")),
    "generate": _generate(input_ids=PROMPT, return_logprob=True, rid="me"),
    "generate_without_log_probs": _generate(input_ids=PROMPT),
    "generate_again": Exchange(GREETED, before=(GREETED,)),
    "generate_stream": _generate(input_ids=PROMPT, return_logprob=True, stream=True),
    "generate_to_the_end_token": _generate(
        input_ids=PROMPT, params={"max_new_tokens": 100, "ignore_eos": False}
    ),
    "generate_to_a_stop_string": _generate(
        input_ids=PROMPT, params={"max_new_tokens": 60, "stop": ["no such text", "calc"]}
    ),
    "generate_to_a_stop_string_in_a_special_token": _generate(
        input_ids=PROMPT, params={"max_new_tokens": 60, "stop": "im_end"}
    ),
    "generate_to_a_stop_id": _generate(
        input_ids=PROMPT,
        params={"max_new_tokens": 60, "ignore_eos": False, "stop_token_ids": [310]},
    ),
    "generate_too_long": _generate(input_ids=[5] * 3000),
    "generate_no_room": _generate(input_ids=[5] * 2000, params={"max_new_tokens": 100}),
    "generate_nothing": _generate(),
    "pause_abort_in_flight": _paused("abort"),
    "pause_retract_in_flight": _paused("retract"),
    "pause_in_place_in_flight": _paused("in_place"),
    "abort_in_flight": Exchange(_post("/abort_request", {"rid": "long-1"}), in_flight=True),
    "pause": Exchange(_post("/pause_generation", {"mode": "abort"}), after=(CONTINUE,)),
    "continue": Exchange(CONTINUE),
    "abort_rid": Exchange(_post("/abort_request", {"rid": "nobody"})),
    "abort_all": Exchange(_post("/abort_request", {"abort_all": True})),
    "flush_cache": Exchange(_post("/flush_cache", {})),
    "update": Exchange(_post("/update_weights_from_disk", UPDATE), after=(BACK,)),
    "update_unnamed": Exchange(
        _post("/update_weights_from_disk", {"model_path": "NEW_DIR"}), after=(BACK,)
    ),
    "update_nowhere": Exchange(
        _post("/update_weights_from_disk", {"model_path": "/nonexistent", "weight_version": "8"})
    ),
    "generate_updated": Exchange(
        _generate(input_ids=PROMPT, return_logprob=True).call,
        before=(_post("/update_weights_from_disk", UPDATE),),
        after=(BACK,),
    ),
}


def save_new(folder: Path) -> Path:
    """The `new` weights, as a model directory."""
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


class Asker:
    """Puts exchanges to the engine at `url` and gives the answers, paths replaced by names."""

    def __init__(self, http: aiohttp.ClientSession, url: str, new: Path) -> None:
        self._http = http
        self._url = url
        self._paths = {str(new): "NEW_DIR", str(MODEL): "MODEL_DIR"}

    async def answer(self, exchange: Exchange) -> dict[str, Any]:
        """Status and body (or the chunks of a stream) of the recorded call."""
        await self._call(_post("/flush_cache", {}))
        flight = asyncio.create_task(self._fly()) if exchange.in_flight else None
        if flight is not None:
            await self._runs(flight)
        for call in exchange.before:
            await self._call(call)
        answer = await self._call(exchange.call)
        if flight is not None:
            answer = await flight
        for call in exchange.after:
            await self._call(call)
        return answer

    async def _fly(self) -> dict[str, Any]:
        body = {**LONG, "rid": "long-1", "return_logprob": False, "stream": False}
        return await self._call(_post("/generate", body))

    async def _runs(self, flight: asyncio.Task[dict[str, Any]]) -> None:
        while True:
            load = (await self._call(Call("GET", "/v1/loads")))["body"]["loads"][0]
            if load["num_running_reqs"]:
                return
            assert not flight.done(), f"it was not in flight: {flight.result()}"
            await asyncio.sleep(0.01)

    async def _call(self, call: Call) -> dict[str, Any]:
        body = None if call.body is None else json.dumps(call.body)
        for path, name in self._paths.items():
            body = body and body.replace(f'"{name}"', json.dumps(path))
        async with self._http.request(
            call.method,
            self._url + call.path,
            data=body,
            headers={"content-type": "application/json"},
        ) as response:
            text = await response.text()
        for path, name in self._paths.items():
            text = text.replace(path, name)
        if text.startswith("data: "):
            lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert lines[-1] == "[DONE]"
            return {"status": response.status, "stream": [json.loads(line) for line in lines[:-1]]}
        try:
            return {"status": response.status, "body": json.loads(text)}
        except json.JSONDecodeError:
            return {"status": response.status, "body": text.strip()}
