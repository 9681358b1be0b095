"""Promises that only the embedded engine makes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.embedded.__main__ import main
from stepwell.backends.engines.embedded.reply import Text
from stepwell.backends.engines.embedded.request import Request, SamplingParams
from stepwell.backends.errors import EngineRequestError
from tests.backends.engines.exchanges import MODEL
from tests.backends.engines.streams import streamed

PROMPT = [40, 41, 42, 43, 44, 45]


pytestmark = pytest.mark.parametrize("_running", ["embedded"], indirect=True)


async def test_fields_it_does_not_implement_are_refused_by_name(client: EngineClient) -> None:
    with pytest.raises(EngineRequestError, match=r"sampling_params\.temprature: Extra"):
        await client.generate(PROMPT, {"temprature": 1})
    with pytest.raises(EngineRequestError, match=r"not supported .*\['video_data'\]"):
        await client.generate(PROMPT, video_data="x.mp4")
    with pytest.raises(EngineRequestError, match=r"image_data: the model .* reads text only"):
        await client.generate(PROMPT, image_data="x.png")
    with pytest.raises(EngineRequestError, match=r"not supported .*\['text'\]"):
        await client.generate(PROMPT, text="both")
    with pytest.raises(EngineRequestError, match="input_ids"):
        await client.generate([PROMPT, PROMPT])  # type: ignore[list-item]  # a batch
    with pytest.raises(EngineRequestError, match=r"sampling_params\.n: Extra"):
        await client.generate(PROMPT, {"n": 2})
    with pytest.raises(EngineRequestError, match="mode"):
        await client.pause("later")  # type: ignore[arg-type]  # what a typo would send


async def test_a_request_id_in_use_is_refused(client: EngineClient) -> None:
    stream = streamed(client, PROMPT, {"max_new_tokens": 400, "ignore_eos": True}, rid="one")
    await anext(stream)
    with pytest.raises(EngineRequestError, match="Duplicate request ID detected: one"):
        await client.generate(PROMPT, rid="one")
    await stream.aclose()


async def test_the_same_seed_samples_the_same_tokens(client: EngineClient) -> None:
    """SGLang heeds seeds with `--enable-deterministic-inference`, which no CPU attention has."""
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 11}
    one, two, other = await asyncio.gather(
        client.generate(PROMPT, params),
        client.generate(PROMPT, params),
        client.generate(PROMPT, {**params, "sampling_seed": 12}),
    )
    assert one["output_ids"] == two["output_ids"] != other["output_ids"]


async def test_a_seeded_response_that_goes_on_draws_what_it_would_have_drawn(
    client: EngineClient,
) -> None:
    """It repeated the draws of its beginning."""
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 11}
    whole = (await client.generate(PROMPT, params))["output_ids"]
    rest = await client.generate([*PROMPT, *whole[:7]], {**params, "max_new_tokens": 13})
    assert whole[7:] == rest["output_ids"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors", "damaged"),
        ("delta.json", "damaged"),
    ],
)
async def test_weights_with_a_damaged_file_are_refused(
    file: str, content: str, client: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    shutil.copytree(model_dirs.new, tmp_path / "v1")
    (tmp_path / "v1" / file).write_text(content)
    with pytest.raises(EngineRequestError, match="Failed to load weights"):
        await client.update_weights_from_disk(str(tmp_path / "v1"), 1)
    assert await client.weight_version() == 0


async def test_an_update_after_an_unpaused_drain_says_success(
    client: EngineClient, model_dirs: Any
) -> None:
    """SGLang says success:false here although the new weights are in force."""
    body = {"model_path": str(model_dirs.new), "weight_version": "1"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.url}/update_weights_from_disk", json=body) as answered,
    ):
        assert (await answered.json())["success"]


def test_streamed_text_never_ends_within_a_character(engine: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "naïve — 日本語"
    ids = tokenizer(text).input_ids
    assert len(ids) > len(text), "characters span tokens"
    request = Request("r", tokenizer("> ").input_ids, SamplingParams())
    decoded = Text(request, tokenizer)
    seen = [decoded.so_far(ids[: n + 1]) for n in range(len(ids))]
    assert all(text.startswith(s) for s in seen)
    request.finish_reason = {"type": "length", "length": len(ids)}
    assert decoded.final(ids) == text


def test_the_command_line_names_what_is_wrong(
    model_dirs: Any, capsys: pytest.CaptureFixture[str], engine: Any
) -> None:
    with pytest.raises(SystemExit):
        main(["--model-path", "/nonexistent"])
    assert "--model-path is '/nonexistent', which has no config.json" in capsys.readouterr().err
    port = engine.url.rsplit(":", 1)[1]
    assert main(["--model-path", str(model_dirs.base), "--port", port]) == 2
    assert f"--port is {port}: Address already in use" in capsys.readouterr().err
