"""The embedded engine answers with the keys and types that a real SGLang 0.5.23 was recorded with.

A key of a recorded answer that the embedded engine leaves out on purpose is listed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

FIXTURES = Path(__file__).with_name("fixtures")
LEFT_OUT = {
    "model_info.embedding",  # embedding models: not generated from
    "get_model_info.embedding",
}
BODIES: dict[str, Any] = {
    "generate_plain": {
        "input_ids": [40, 41, 42],
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
    },
    "generate_batch": {
        "input_ids": [[40, 41, 42, 43, 44, 45], [40, 41, 42, 43, 44, 45]],
        "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
    },
    "generate_stream": {
        "input_ids": [40, 41, 42],
        "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    },
}


def assert_same_shape(recorded: Any, answer: Any, where: str) -> None:
    if isinstance(recorded, dict):
        assert isinstance(answer, dict), where
        missing = {k for k in recorded if k not in answer and f"{where}.{k}" not in LEFT_OUT}
        assert not missing, f"{where} lacks {missing}"
        for key in recorded.keys() & answer.keys():
            assert_same_shape(recorded[key], answer[key], f"{where}.{key}")
    elif isinstance(recorded, list):
        assert isinstance(answer, list), where
        if recorded and answer:
            # Rows such as [log-prob, id, text] have a type per position; lists of objects one type.
            if len(recorded) == len(answer) and not isinstance(recorded[0], list | dict):
                for i, (a, b) in enumerate(zip(recorded, answer, strict=True)):
                    assert_same_shape(a, b, f"{where}[{i}]")
            else:
                assert_same_shape(recorded[0], answer[0], f"{where}[0]")
    elif recorded is not None and answer is not None:
        assert type(recorded) is type(answer), f"{where}: {answer!r} instead of {recorded!r}"


def request_body(name: str, recorded: dict[str, Any], base: Path) -> Any:
    if name in BODIES:
        return BODIES[name]
    body = recorded["request"]
    if isinstance(body, dict) and body.get("model_path") == "MODEL_DIR":
        body = {**body, "model_path": str(base)}
    return body


@pytest.mark.parametrize("name", sorted(p.stem for p in FIXTURES.glob("*.json")))
async def test_answers_have_the_recorded_keys_and_types(name: str, engine: Any) -> None:
    recorded = json.loads((FIXTURES / f"{name}.json").read_text())
    body = request_body(name, recorded, engine.base)
    async with (
        aiohttp.ClientSession() as http,
        # Twice: the recorded batch found its prompts in the prefix cache.
        http.request(recorded["method"], engine.url + recorded["path"], json=body),
        http.request(recorded["method"], engine.url + recorded["path"], json=body) as response,
    ):
        text = await response.text()
    assert response.status == recorded["status"], text
    if "stream" in recorded:
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        chunks = [orjson.loads(line) for line in lines[:-1]]
        assert_same_shape(recorded["stream"][-1], chunks[-1], name)
        if len(chunks) > 1:  # tokens that come quickly share a chunk
            assert_same_shape(recorded["stream"][0], chunks[0], name)
    elif isinstance(recorded["body"], dict | list):
        assert_same_shape(recorded["body"], orjson.loads(text), name)
    else:
        assert text.strip() == (recorded["body"] or "")
