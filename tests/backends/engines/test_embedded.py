"""What only the embedded engine promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.embedded.__main__ import main
from stepwell.backends.engines.embedded.request import Request, SamplingParams
from stepwell.backends.engines.embedded.text import Detokenizer
from stepwell.backends.errors import EngineRequestError

PROMPT = [40, 41, 42, 43, 44, 45]


pytestmark = pytest.mark.parametrize("_running", ["embedded"], indirect=True)


async def test_fields_it_does_not_implement_are_refused_by_name(client: EngineClient) -> None:
    with pytest.raises(EngineRequestError, match=r"sampling_params\.temprature is unknown"):
        await client.generate(PROMPT, {"temprature": 1})
    with pytest.raises(EngineRequestError, match="image_data is not supported"):
        await client.generate(PROMPT, image_data="x.png")
    with pytest.raises(EngineRequestError, match="Either text or input_ids"):
        await client.generate(PROMPT, text="both")
    with pytest.raises(EngineRequestError, match="mode"):
        await client.pause("later")  # type: ignore[arg-type]  # what a typo would send


async def test_n_samples_of_one_prompt_come_back_as_a_list(client: EngineClient) -> None:
    params = {"n": 3, "max_new_tokens": 4, "ignore_eos": True}
    answers = await client.generate(PROMPT, params, rid="x")
    assert [a["meta_info"]["id"] for a in answers] == ["x_0", "x_1", "x_2"]
    assert all(len(a["output_ids"]) == 4 for a in answers)


async def test_a_streamed_batch_says_whose_chunk_it_is(client: EngineClient) -> None:
    final: dict[int, Any] = {}
    params = {"max_new_tokens": 4, "ignore_eos": True}
    chunks = client.generate_stream([PROMPT, PROMPT[:2]], params)  # type: ignore[list-item]  # a batch
    async for chunk in chunks:
        final[chunk["index"]] = chunk
    assert [final[i]["meta_info"]["prompt_tokens"] for i in (0, 1)] == [6, 2]
    assert all(c["meta_info"]["finish_reason"]["type"] == "length" for c in final.values())


async def test_a_request_id_in_use_is_refused(client: EngineClient) -> None:
    stream = client.generate_stream(PROMPT, {"max_new_tokens": 400, "ignore_eos": True}, rid="one")
    await anext(stream)
    with pytest.raises(EngineRequestError, match="Duplicate request ID detected: one"):
        await client.generate(PROMPT, rid="one")
    await stream.aclose()  # type: ignore[attr-defined]  # it is an async generator


async def test_the_same_seed_samples_the_same_tokens(client: EngineClient) -> None:
    """SGLang heeds seeds with `--enable-deterministic-inference`, which no CPU attention has."""
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 11}
    one, two, other = await asyncio.gather(
        client.generate(PROMPT, params),
        client.generate(PROMPT, params),
        client.generate(PROMPT, {**params, "sampling_seed": 12}),
    )
    assert one["output_ids"] == two["output_ids"] != other["output_ids"]


async def test_an_update_after_an_unpaused_drain_says_success(
    client: EngineClient, model_dirs: Any
) -> None:
    """SGLang says success:false here although the new weights are in force."""
    result = await client.update_weights_from_disk(str(model_dirs.new), 1)
    assert result.success


async def test_token_texts_come_with_the_log_probs_when_asked(client: EngineClient) -> None:
    answer = await client.generate(
        PROMPT,
        {"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
        return_text_in_logprobs=True,
    )
    texts = [t for _, _, t in answer["meta_info"]["output_token_logprobs"]]
    assert all(isinstance(t, str) and t for t in texts)


class ByteTokenizer:
    """One token per byte: characters span tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def test_streamed_text_never_ends_within_a_character(engine: Any) -> None:
    text = "naïve — 日本語"
    request = Request("r", list(b"> "), SamplingParams())
    detokenizer = Detokenizer(ByteTokenizer(), request)
    data = list(text.encode())
    seen = [detokenizer.update(data[: n + 1]) for n in range(len(data))]
    assert all(text.startswith(s) for s in seen)
    request.finish_reason = {"type": "length", "length": len(data)}
    assert detokenizer.final(data) == text


def test_the_command_line_names_what_is_wrong(
    model_dirs: Any, capsys: pytest.CaptureFixture[str], engine: Any
) -> None:
    with pytest.raises(SystemExit):
        main(["--model-path", "/nonexistent"])
    assert "--model-path is '/nonexistent', which has no config.json" in capsys.readouterr().err
    port = engine.url.rsplit(":", 1)[1]
    assert main(["--model-path", str(model_dirs.base), "--port", port]) == 2
    assert f"--port is {port}: Address already in use" in capsys.readouterr().err
