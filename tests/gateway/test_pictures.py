"""Pictures in calls of the four dialects: what the model is shown, what is stored, what is refused,
and that known bytes are not decoded again."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import time
import zlib
from base64 import b64decode, b64encode
from functools import partial
from io import BytesIO
from typing import Any

import aiohttp
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from google import genai
from openai import APIError, AsyncOpenAI, BadRequestError
from PIL import Image
from pydantic import ValidationError

from stepwell.backends.pictures import digest_of
from stepwell.datapool.pictures import shadow_ids
from stepwell.gateway.config import PicturesConfig
from stepwell.gateway.pictures import PictureReader, RequestPictures
from tests.builders import until
from tests.gateway.conftest import Sampled, World
from tests.helpers import instances
from tests.vision_model import make_vision_model, png

TURNS = 50


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_vision_model(tmp_path_factory.mktemp("vision"), context=32_768))


@pytest.fixture
async def vision(worlds: Any, vision_folder: str) -> World:
    """A gateway whose model takes pictures; its engine says "fine"."""
    made: World = await worlds(family=vision_folder, tokenizer_path=vision_folder)
    for engine in made.engines:  # type: ignore[attr-defined]  # of the failover tests
        engine.context_length = 32_768
    return made


def data_url(picture: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{b64encode(picture).decode()}"


def shown(*parts: Any) -> list[dict[str, Any]]:
    """A user's content of texts and pictures, as chat completions have it."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


def check_exact(world: World, n_branches: int = 1) -> None:
    """Every stored Step is what the engine was sent, with its pictures, and extends its parent."""
    steps = world.stored()
    sent = {
        (tuple(request["input_ids"]), tuple(request.get("image_data", ())))
        for request in world.engine.requests
    }
    by_digest = {
        digest_of(Image.open(BytesIO(b64decode(data)))): data
        for _, pictures in sent
        for data in pictures
    }
    assert sum(step.parent_index is None for step in steps) == n_branches
    for step in steps:
        kept = np.ones(len(step.prompt_ids), bool)
        for picture in step.pictures:
            assert (step.prompt_ids[picture.at : picture.end] == placeholder(world)).all()
            kept[picture.at + 1 : picture.end] = False
        assert (
            tuple(step.prompt_ids[kept].tolist()),
            tuple(by_digest[picture.digest] for picture in step.pictures),
        ) in sent
        if step.parent_index is not None:
            parent = next(s for s in steps if s.step_index == step.parent_index)
            before = shadow_ids(parent.token_ids, parent.pictures)
            whole = shadow_ids(step.prompt_ids, step.pictures)
            assert np.array_equal(whole[: len(before)], before)


def placeholder(world: World) -> int:
    return world.tokenizer.special["<|image_pad|>"]


# -- fifty turns -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_fifty_turns_of_screenshots_are_one_branch_in_chat_completions(
    vision: World,
) -> None:
    client = await vision.client()
    messages: list[Any] = [{"role": "system", "content": "Look."}]
    for i in range(TURNS):
        messages.append({"role": "user", "content": shown(f"screen {i}", png(seed=i))})
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)
    assert len(vision.stored()) == TURNS
    check_exact(vision)
    assert vision.gateway.pictures.n_decoded == TURNS
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(vision.stored()[-1].prompt_ids)
    assert len(vision.stored()[-1].pictures) == TURNS


CLICK = (
    '<tool_call>\n{"name": "computer", "arguments": '
    '{"type": "click", "x": 3, "y": 4}}\n</tool_call>'
)
LEFT_CLICK = (
    '<tool_call>\n{"name": "computer", "arguments": '
    '{"action": "left_click", "coordinate": [3, 4]}}\n</tool_call>'
)


@pytest.mark.slow
async def test_fifty_computer_calls_are_one_branch_in_responses(vision: World) -> None:
    client = await vision.client()
    tool: Any = {
        "type": "computer_use_preview",
        "display_width": 1024,
        "display_height": 768,
        "environment": "browser",
    }
    items: list[Any] = [{"role": "user", "content": "Click on the button."}]
    for i in range(TURNS):
        vision.say(CLICK)
        answer = await client.responses.create(model="m", input=items, tools=[tool], store=False)
        (call,) = answer.output
        assert call.type == "computer_call"
        assert call.action is not None
        assert call.action.to_dict() == {"type": "click", "x": 3, "y": 4}
        items.append(call.to_dict())
        shot = {"type": "computer_screenshot", "image_url": data_url(png(seed=i))}
        items.append({"type": "computer_call_output", "call_id": call.call_id, "output": shot})
    assert len(vision.stored()) == TURNS
    check_exact(vision)
    assert vision.gateway.pictures.n_decoded == TURNS - 1


async def test_fifty_screenshots_in_tool_results_are_one_branch_in_anthropics_messages(
    vision: World,
) -> None:
    client = AsyncAnthropic(base_url=vision.base_url(), api_key="none", max_retries=0)
    tool: Any = {
        "type": "computer_20250124",
        "name": "computer",
        "display_width_px": 1024,
        "display_height_px": 768,
    }
    messages: list[Any] = [{"role": "user", "content": "Click on the button."}]
    async with client:
        for i in range(TURNS):
            vision.say(LEFT_CLICK)
            answer = await client.beta.messages.create(
                model="m", max_tokens=256, messages=messages, tools=[tool]
            )
            (call,) = answer.content
            assert call.type == "tool_use"
            assert call.input == {"action": "left_click", "coordinate": [3, 4]}
            messages.append({"role": "assistant", "content": [call.to_dict()]})
            source = {
                "type": "base64",
                "media_type": "image/png",
                "data": b64encode(png(seed=i)).decode(),
            }
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "image", "source": source}],
            }
            messages.append({"role": "user", "content": [result]})
        count = await client.beta.messages.count_tokens(model="m", messages=messages, tools=[tool])
    assert len(vision.stored()) == TURNS
    check_exact(vision)
    assert count.input_tokens > len(vision.stored()[-1].prompt_ids)


@pytest.mark.slow
async def test_fifty_pictures_are_one_branch_in_gemini(vision: World) -> None:
    client = genai.Client(
        api_key="none", http_options=genai.types.HttpOptions(base_url=vision.base_url())
    )
    contents: list[Any] = []
    for i in range(TURNS):
        part = genai.types.Part.from_bytes(data=png(seed=i), mime_type="image/png")
        contents.append(genai.types.Content(role="user", parts=[part]))
        answer = await client.aio.models.generate_content(model="m", contents=contents)
        assert answer.candidates is not None
        contents.append(answer.candidates[0].content)
    assert len(vision.stored()) == TURNS
    check_exact(vision)
    assert answer.usage_metadata is not None
    details = answer.usage_metadata.prompt_tokens_details
    assert details is not None
    n_of_pictures = sum(picture.n_tokens for picture in vision.stored()[-1].pictures)
    assert [d.token_count for d in details if d.modality == "IMAGE"] == [n_of_pictures]


URL = data_url(png(seed=5))
INLINE = {"inlineData": {"mimeType": "image/png", "data": b64encode(png(seed=5)).decode()}}
TOOL_RESULTS: dict[str, tuple[str, Any]] = {
    "chat completions": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [
                        {"type": "text", "text": "Seen:"},
                        {"type": "image_url", "image_url": {"url": URL}},
                    ],
                },
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [
                        {"type": "input_text", "text": "Seen:"},
                        {"type": "input_image", "image_url": URL},
                    ],
                },
            ]
        },
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "Look."}]},
                {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
                {
                    "role": "user",
                    "parts": [
                        {
                            "functionResponse": {
                                "name": "look",
                                "response": {"output": "Seen:"},
                                "parts": [INLINE],
                            }
                        }
                    ],
                },
            ]
        },
    ),
}
"""By dialect; `test_fifty_screenshots_in_tool_results_...` has Anthropic's."""


@pytest.mark.parametrize("dialect", TOOL_RESULTS)
async def test_a_tool_answers_with_a_text_and_a_picture(vision: World, dialect: str) -> None:
    path, body = TOOL_RESULTS[dialect]
    async with (
        aiohttp.ClientSession() as http,
        http.post(vision.base_url() + path, json={"model": "m", **body}) as answer,
    ):
        assert answer.status == 200, await answer.text()
    (step,) = vision.stored()
    (picture,) = step.pictures
    assert picture.digest == digest_of(Image.open(BytesIO(png(seed=5))))
    check_exact(vision)
    text = vision.tokenizer.decode(step.prompt_ids[: picture.at].tolist())
    assert text.rpartition("<tool_response>")[2].startswith("\nSeen:")


async def test_the_newer_computer_tool_has_a_list_of_actions(vision: World) -> None:
    client = await vision.client()
    tool: Any = {"type": "computer"}
    vision.say(CLICK)
    items: list[Any] = [{"role": "user", "content": "Click."}]
    answer = await client.responses.create(model="m", input=items, tools=[tool])
    (call,) = answer.output
    assert call.type == "computer_call"
    assert call.action is None
    assert [a.to_dict() for a in call.actions or ()] == [{"type": "click", "x": 3, "y": 4}]
    shot = {"type": "computer_screenshot", "image_url": URL}
    items += [
        call.to_dict(),
        {"type": "computer_call_output", "call_id": call.call_id, "output": shot},
    ]
    await client.responses.create(model="m", input=items, tools=[tool])
    assert [step.parent_index for step in vision.stored()] == [None, 0]
    check_exact(vision)


# -- hostile pictures ------------------------------------------------------------------------


def saved(image: Image.Image, form: str, **how: Any) -> bytes:
    out = BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bare_png(width: int, height: int, depth: int = 8, colour: int = 0, data: bytes = b"") -> bytes:
    """A PNG as its bytes say, whatever they are."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bomb() -> bytes:
    """169 Mpx in some 20 kB."""
    return bare_png(13_000, 13_000, data=zlib.compress(bytes(13_001 * 13_000 // 8), 9))


RED = Image.new("RGB", (60, 60), (255, 0, 0))
WHITE = (255, 255, 255)
FRAMES = [Image.new("RGB", (60, 60), c) for c in ((255, 0, 0), (0, 255, 0))]
TURNED = Image.new("RGB", (90, 60), (255, 0, 0))
EXIF = Image.Exif()
EXIF[0x0112] = 6
PALETTE = RED.quantize(4)
CLEAR = Image.new("RGBA", (60, 60), (0, 0, 255, 0))
HALF = Image.new("RGBA", (60, 60), (255, 0, 0, 128))
GREY_ALPHA = Image.new("LA", (60, 60), (0, 0))
DEEP = Image.fromarray(np.full((60, 60), 30_000, np.uint16))
INK = Image.new("CMYK", (60, 60), (0, 255, 255, 0))
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
WEBP = saved(RED, "WEBP", lossless=True)

REFUSED: dict[str, tuple[str, str]] = {
    "a decompression bomb": (data_url(bomb()), "169000000 pixels"),
    "a side that is too long": (data_url(bare_png(20_000, 20)), "side"),
    "no pixels": (data_url(bare_png(0, 20)), "refused"),
    "an aspect of 300": (data_url(saved(Image.new("RGB", (300, 1)), "PNG")), "200 times"),
    "a truncated PNG": (data_url(png(200, 200)[:300]), "damaged"),
    "a truncated JPEG": (
        data_url(
            saved(
                Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8)),
                "JPEG",
            )[:900],
            "image/jpeg",
        ),
        "damaged",
    ),
    "a PNG without pixels' data": (data_url(bare_png(60, 60)), "damaged"),
    "half a head": (data_url(png()[:20]), "damaged"),
    "text": (data_url(b"I am a picture, believe me."), "PNG, JPEG, WebP"),
    "an SVG": (data_url(SVG, "image/svg+xml"), "PNG, JPEG, WebP"),
    "a TIFF": (data_url(saved(RED, "TIFF"), "image/tiff"), "PNG, JPEG, WebP"),
    "a BMP called a PNG": (data_url(saved(RED, "BMP")), "PNG, JPEG, WebP"),
    "a PDF": (data_url(b"%PDF-1.7", "application/pdf"), "media type is 'application/pdf'"),
    "no base64": ("data:image/png;base64,%%%%", "not base64"),
    "a URL that is not base64": ("data:image/png,abc", "not in base64"),
    "nothing": ("data:image/png;base64,", "empty"),
    "an address": ("https://example.com/a.png", "not fetched"),
    "a file": ("file:///etc/passwd", "not fetched"),
    "plain base64": (b64encode(png()).decode(), "no picture in base64"),
    "16-bit RGB with a transparent colour": (
        data_url(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", 30, 30, 16, 2, 0, 0, 0))
            + chunk(b"tRNS", bytes(6))
            + chunk(b"IDAT", zlib.compress(bytes((1 + 30 * 6) * 30)))
            + chunk(b"IEND", b"")
        ),
        "16-bit RGB",
    ),
}
READ: dict[str, tuple[bytes, tuple[int, int, int]]] = {
    "animated GIF: the first frame": (
        saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        (255, 0, 0),
    ),
    "animated PNG": (
        saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
        (255, 0, 0),
    ),
    "turned by EXIF": (saved(TURNED, "JPEG", exif=EXIF, quality=100), (254, 0, 0)),
    "CMYK": (saved(INK, "JPEG", quality=100), (255, 0, 0)),
    "16-bit grey keeps its high byte": (saved(DEEP, "PNG"), (117, 117, 117)),
    "palette": (saved(PALETTE, "PNG"), (255, 0, 0)),
    "clear pixels are white": (saved(CLEAR, "PNG"), WHITE),
    "half clear red": (saved(HALF, "PNG"), (255, 127, 127)),
    "grey with alpha": (saved(GREY_ALPHA, "PNG"), WHITE),
    "one bit": (saved(Image.new("1", (60, 60), 1), "PNG"), WHITE),
    "a PNG called a JPEG": (png(60, 60, seed=0), (-1, -1, -1)),
    "WebP": (WEBP, (255, 0, 0)),
}


def test_there_are_thirty_of_them() -> None:
    assert len(REFUSED) + len(READ) >= 30


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_picture_is_refused_with_its_reason(vision: World, name: str) -> None:
    source, reason = REFUSED[name]
    client = await vision.client()
    content: Any = [{"type": "image_url", "image_url": {"url": source}}]
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}]
        )
    assert refused.value.param == "messages[0].content[0].image_url.url"
    assert reason in refused.value.message
    assert len(refused.value.message) < 300
    assert not vision.engine.requests


@pytest.mark.parametrize("name", READ)
async def test_an_odd_picture_is_read_by_the_stated_rules(vision: World, name: str) -> None:
    file, colour = READ[name]
    client = await vision.client()
    content: Any = [{"type": "image_url", "image_url": {"url": data_url(file, "image/jpeg")}}]
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    (sent,) = vision.engine.requests[0]["image_data"]
    image = Image.open(BytesIO(b64decode(sent)))
    assert (image.mode, image.format) == ("RGB", "PNG")
    assert colour[0] < 0 or np.abs(np.asarray(image.getpixel((30, 30))) - colour).max() <= 2
    if name == "turned by EXIF":
        assert image.width < image.height


async def test_a_model_without_vision_refuses_pictures_in_one_clear_line(world: World) -> None:
    client = await world.client()
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": shown("Look.", png())}],  # type: ignore[misc,list-item]
        )
    assert refused.value.message.endswith(
        "messages[0].content[1].image_url.url is a picture, and only text is taken here; send "
        "text, or serve a model with vision (docs/images.md)"
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 8,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "https://a"}}
                        ],
                    }
                ],
            },
            "messages[0].content[0].source",
        ),
        (
            "/v1beta/models/m:generateContent",
            {
                "contents": [
                    {"parts": [{"fileData": {"mimeType": "image/png", "fileUri": "gs://a/b"}}]}
                ]
            },
            "contents[0].parts[0].fileData.fileUri",
        ),
    ],
)
async def test_addresses_and_file_ids_are_refused_by_name(
    vision: World, path: str, body: Any, field: str
) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(vision.base_url() + path, json=body) as answer,
    ):
        assert answer.status == 400
        text = await answer.text()
    assert field in text
    assert "not fetched; send the picture itself, in base64" in text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4,"}}],
                    }
                ]
            },
            "messages[0].content[0] is",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:video/mp4;base64,AAAA"},
                            }
                        ],
                    }
                ]
            },
            "its media type is 'video/mp4'",
        ),
        (
            "/v1beta/models/m:generateContent",
            {"contents": [{"parts": [{"inlineData": {"mimeType": "video/mp4", "data": "AAAA"}}]}]},
            "contents[0].parts[0].inlineData.mimeType is 'video/mp4'",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0] is",
        ),
    ],
)
async def test_videos_and_files_are_refused_by_name(
    vision: World, path: str, body: Any, named: str
) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(vision.base_url() + path, json=body) as answer,
    ):
        assert answer.status == 400
        assert named in await answer.text()


def test_no_bound_of_pixels_is_above_that_of_the_decoder() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    most = 2 * Image.MAX_IMAGE_PIXELS
    with pytest.raises(ValidationError, match="max_pixels"):
        PicturesConfig(max_pixels=most)
    PicturesConfig(max_pixels=178_000_000)
    assert most > 178_000_000


async def test_a_body_brings_so_many_pictures_and_no_more(worlds: Any, vision_folder: str) -> None:
    world = await worlds(
        family=vision_folder, tokenizer_path=vision_folder, pictures={"max_count": 2}
    )
    client = await world.client()
    messages: Any = [{"role": "user", "content": shown(*(png(seed=i) for i in range(3)))}]
    with pytest.raises(Exception, match="brings 3 pictures, and may bring 2") as refused:
        await client.chat.completions.create(model="m", messages=messages)
    assert refused.value.status_code == 413  # type: ignore[attr-defined]


async def test_pictures_beyond_the_models_context_are_not_even_decoded(vision: World) -> None:
    """The memory they take is bounded by what the model can be shown."""
    sizes = vision.gateway.pictures.processor.max_pixels**0.5
    picture = Image.new("RGB", (int(sizes), int(sizes)))
    many = []
    for i in range(100):
        picture.putpixel((0, 0), (i, 0, 0))
        many.append(saved(picture, "PNG"))
    n_each = vision.gateway.pictures.processor.n_tokens(many[0])
    for engine in vision.engines:  # type: ignore[attr-defined]
        engine.context_length = 4 * n_each
    client = await vision.client()
    messages: Any = [{"role": "user", "content": shown(*many)}]
    with pytest.raises(BadRequestError, match="maximum context length") as refused:
        await client.chat.completions.create(model="m", messages=messages)
    assert refused.value.code == "context_length_exceeded"
    assert vision.gateway.pictures.n_decoded <= 6
    # Counted is what would be sent, whatever fits.
    blocks: Any = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": b64encode(picture).decode(),
            },
        }
        for picture in many[:6]
    ]
    anthropic = AsyncAnthropic(base_url=vision.base_url(), api_key="none", max_retries=0)
    async with anthropic:
        said: Any = [{"role": "user", "content": blocks}]
        count = await anthropic.messages.count_tokens(model="m", messages=said)
    assert count.input_tokens > 6 * n_each


async def test_a_request_with_many_pictures_does_not_hold_up_one_with_a_picture(
    vision: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bytes] = []
    reader = vision.gateway.pictures
    canonical = type(reader.processor).canonical

    def slow(processor: Any, data: bytes) -> Any:
        time.sleep(0.005)
        done.append(data)
        return canonical(processor, data)

    monkeypatch.setattr(type(reader.processor), "canonical", slow)
    many = [png(seed=i) for i in range(1, 60)]

    async def ask(uid: str, *pictures: bytes) -> None:
        client = await vision.client(uid, uid)
        messages: Any = [{"role": "user", "content": shown(*pictures)}]
        await client.chat.completions.create(model="m", messages=messages)

    first = asyncio.create_task(ask("many", *many))
    await until(lambda: len(done) > 0)
    await ask("one", png(seed=0))
    assert done.index(png(seed=0)) < 50
    await first
    # Nor does one that has gone.
    begun, gone = (
        len(done),
        asyncio.create_task(ask("gone", *(png(seed=i) for i in range(100, 150)))),
    )
    await until(lambda: len(done) > begun)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await ask("next", png(seed=99))
    assert len(done) < begun + 40


async def test_a_body_with_pictures_may_be_longer_than_one_of_text(
    worlds: Any, vision_folder: str
) -> None:
    world = await worlds(
        family=vision_folder,
        tokenizer_path=vision_folder,
        max_body_bytes=1_200_000,
        pictures={"max_body_bytes": 4_000_000},
    )
    client = await world.client()
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    picture = saved(Image.fromarray(noise), "PNG")
    assert len(picture) > 1_200_000
    # An emoji, too: a long body of wide characters is bounded, and a picture has none.
    await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": shown("\U0001f600", picture)}],  # type: ignore[misc,list-item]
    )
    for text in ("a " * 700_000, "a " * 2_100_000):
        with pytest.raises(Exception, match="max_body_bytes") as refused:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}]
            )
        assert refused.value.status_code == 413  # type: ignore[attr-defined]


# -- one picture, and another ----------------------------------------------------------------


async def test_the_same_bytes_are_decoded_once_whatever_the_number_of_turns_and_rollouts(
    vision: World,
) -> None:
    picture = png(seed=1)
    for rollout in range(4):
        client = await vision.client(f"t{rollout}", "p1")
        messages: list[Any] = [{"role": "user", "content": shown(picture, "What is it?")}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    assert vision.gateway.pictures.n_decoded == 1
    assert len(vision.stored()) == 12


async def test_requests_that_bring_a_picture_together_decode_it_once(vision: World) -> None:
    messages: Any = [{"role": "user", "content": shown(png(400, 400))}]
    clients = [await vision.client(f"t{i}", "p1") for i in range(8)]
    await asyncio.gather(
        *(c.chat.completions.create(model="m", messages=messages) for c in clients)
    )
    assert vision.gateway.pictures.n_decoded == 1
    digests = {step.pictures[0].digest for step in vision.stored()}
    assert len(digests) == 1


async def test_a_request_that_comes_while_a_picture_is_just_decoded_decodes_it_no_second_time(
    vision_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads end in one turn of the loop: the second one's body is read, and the picture that
    the first one waits for is there."""
    reader = PictureReader.of(vision_folder, PicturesConfig())
    assert reader is not None
    loop = asyncio.get_running_loop()
    asked: list[tuple[asyncio.Future[Any], Any]] = []

    def in_thread(_: Any, function: Any, *arguments: Any) -> asyncio.Future[Any]:
        asked.append((loop.create_future(), partial(function, *arguments)))
        return asked[-1][0]

    def end(*which: int) -> None:
        for i in which:
            future, work = asked[i]
            future.set_result(work())

    monkeypatch.setattr(loop, "run_in_executor", in_thread)
    body = json.dumps({"messages": [{"role": "user", "content": shown(png(56, 56))}]}).encode()
    first = asyncio.create_task(reader.take(body, "me", 1000.0))
    await until(lambda: len(asked) == 1)
    end(0)
    await until(lambda: len(asked) == 2)
    second = asyncio.create_task(reader.take(body, "me", 1000.0))
    await until(lambda: len(asked) == 3)
    end(2, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asked) == 3
    assert not (await first)[1].known.keys() - (await second)[1].known.keys()
    assert reader.n_decoded == 1
    monkeypatch.undo()
    reader.close()


async def test_pictures_of_one_size_make_different_prompts_of_the_same_ids(vision: World) -> None:
    for i in range(2):
        client = await vision.client(f"user{i}", "p1")
        messages: Any = [{"role": "user", "content": shown(png(seed=i), "What is it?")}]
        await client.chat.completions.create(model="m", messages=messages)
    one, other = vision.stored()
    assert np.array_equal(one.prompt_ids, other.prompt_ids)
    assert one.pictures[0].digest != other.pictures[0].digest
    assert not np.array_equal(
        shadow_ids(one.prompt_ids, one.pictures), shadow_ids(other.prompt_ids, other.pictures)
    )
    first, second = (request["image_data"] for request in vision.engine.requests)
    assert first != second


async def test_a_conversation_goes_on_only_with_its_own_picture(vision: World) -> None:
    client = await vision.client()
    asked: list[Any] = [{"role": "user", "content": shown(png(seed=1))}]
    answer = await client.chat.completions.create(model="m", messages=asked)
    for seed in (1, 2):
        messages: Any = [
            {"role": "user", "content": shown(png(seed=seed))},
            answer.choices[0].message,
            {"role": "user", "content": f"And now, {seed}?"},
        ]
        await client.chat.completions.create(model="m", messages=messages)
    own, other = vision.stored()[1:]
    assert own.parent_index == 0
    assert other.parent_index is None
    assert other.metadata["branch"] == "history_edited"


async def test_another_file_of_the_same_pixels_is_the_same_picture(vision: World) -> None:
    client, out = await vision.client(), BytesIO()
    Image.open(BytesIO(png(56, 56, seed=3))).save(out, "PNG", compress_level=0)
    answer = None
    for file in (png(56, 56, seed=3), out.getvalue()):
        messages: list[Any] = [{"role": "user", "content": shown(file)}]
        if answer is not None:
            messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
        answer = await client.chat.completions.create(model="m", messages=messages)
    check_exact(vision)
    assert vision.gateway.pictures.n_decoded == 2


async def test_an_owners_pictures_are_not_known_to_another_owner(
    worlds: Any, vision_folder: str
) -> None:
    keys = {name: {"key": f"a-key-of-{name}-00000", "channel": name} for name in ("one", "two")}
    world = await worlds(family=vision_folder, tokenizer_path=vision_folder, agent_keys=keys)
    for name in ("one", "one", "two"):
        client = AsyncOpenAI(
            base_url=f"{world.url}/v1", api_key=f"a-key-of-{name}-00000", max_retries=0
        )
        async with client:
            messages: Any = [{"role": "user", "content": shown(png())}]
            await client.chat.completions.create(model="m", messages=messages)
    assert world.gateway.pictures.n_decoded == 2
    assert [request["extra_key"] for request in world.engine.requests] == ["one", "one", "two"]


async def test_a_retry_with_pictures_gets_the_stored_reply(vision: World) -> None:
    client = await vision.client()
    messages: Any = [{"role": "user", "content": shown(png(), "What is it?")}]
    answers = [
        await client.chat.completions.create(
            model="m", messages=messages, extra_headers={"x-stainless-retry-count": count}
        )
        for count in ("0", "1")
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message
    assert len(vision.stored()) == 1
    assert len(vision.engine.requests) == 1


async def test_a_picture_that_left_the_history_begins_a_branch(vision: World) -> None:
    """Computer-use agents drop old screenshots: a documented cost, not a wrong prompt."""
    client = await vision.client()
    messages: list[Any] = [{"role": "user", "content": shown("screen", png(seed=1))}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    messages[0] = {"role": "user", "content": "screen (left out)"}
    messages += [
        answer.choices[0].message,
        {"role": "user", "content": shown("screen", png(seed=2))},
    ]
    await client.chat.completions.create(model="m", messages=messages)
    second = vision.stored()[1]
    assert (second.parent_index, second.metadata["branch"]) == (None, "history_edited")
    assert len(second.pictures) == 1


# -- what a Step and an answer hold ----------------------------------------------------------


async def test_messages_of_a_step_refer_to_pictures_and_hold_none(vision: World) -> None:
    client = await vision.client()
    messages: Any = [{"role": "user", "content": shown("What is it?", png(640, 480, seed=4))}]
    await client.chat.completions.create(model="m", messages=messages)
    (step,) = vision.stored()
    (picture,) = step.pictures
    said, reply = step.metadata["messages"]
    assert said["content"] == [
        {"type": "text", "text": "What is it?"},
        {
            "type": "image",
            "digest": picture.digest,
            "width": picture.width,
            "height": picture.height,
            "n_tokens": picture.n_tokens,
        },
    ]
    assert reply["content"] == "fine"
    assert picture.n_tokens == picture.width // 28 * (picture.height // 28)
    assert len(json.dumps(step.metadata)) < 2000


async def test_the_dashboard_shows_a_picture_of_a_trajectory_that_refers_to_it(
    vision: World,
) -> None:
    for uid, seed in (("t1", 1), ("t2", 2)):
        client = await vision.client(uid, f"p-{uid}")
        messages: Any = [{"role": "user", "content": shown("What is it?", png(seed=seed))}]
        await client.chat.completions.create(model="m", messages=messages)
    digest = vision.stored("t1")[0].pictures[0].digest
    async with aiohttp.ClientSession(f"{vision.url}/ui/api/") as http:
        asked = {"trajectory_uid": "t1", "digest": digest}
        async with http.get("picture", params=asked) as answer:
            assert (answer.status, answer.content_type) == (200, "image/png")
            assert digest_of(Image.open(BytesIO(await answer.read()))) == digest
        for wrong in ({"trajectory_uid": "t2"}, {"digest": "0" * 64}):
            async with http.get("picture", params=asked | wrong) as answer:
                assert answer.status == 404
        async with http.get("tokens", params={"trajectory_uid": "t1", "index": "0"}) as answer:
            (picture,) = (await answer.json())["pictures"]
    assert picture == vision.stored("t1")[0].pictures[0]._asdict()


async def test_nothing_keeps_a_pictures_bytes_after_its_request(vision: World) -> None:
    client = await vision.client()
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    messages: Any = [{"role": "user", "content": shown("x" * 9000, out.getvalue())}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    await client.chat.completions.create(model="m", messages=messages)
    del messages, answer
    vision.engine.requests.clear()
    gc.collect()
    assert not [each for each in instances(RequestPictures) if each._body or each.pngs]


async def test_a_resolution_that_is_asked_for_is_told_to_be_left_aside(vision: World) -> None:
    client = await vision.client()
    url = {"url": data_url(png()), "detail": "low"}
    content: Any = [{"type": "image_url", "image_url": url}]
    answer = await client.chat.completions.with_raw_response.create(
        model="m", messages=[{"role": "user", "content": content}]
    )
    assert answer.headers["x-stepwell-ignored"] == "image_detail=low"


async def test_previous_responses_bring_their_pictures(vision: World) -> None:
    client = await vision.client()
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    first = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
    await client.responses.create(model="m", input="Sure?", previous_response_id=first.id)
    check_exact(vision)
    assert len(vision.stored()[1].pictures) == 1


@pytest.mark.parametrize("detail", ["höch", "日本", "low\r\nx: y", {"a": 1}])
async def test_a_resolution_that_no_header_can_hold_is_told_all_the_same(
    vision: World, detail: Any
) -> None:
    url = {"url": data_url(png()), "detail": detail}
    content: Any = [{"type": "image_url", "image_url": url}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{vision.url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-stepwell-ignored"].startswith("image_detail")


async def test_a_branch_behind_a_previous_response_has_its_pictures_from_the_pool(
    vision: World,
) -> None:
    client = await vision.client()
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    first = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
    await client.responses.create(
        model="m", input="Sure?", instructions="Be brief.", previous_response_id=first.id
    )
    sent = [request["image_data"] for request in vision.engine.requests]
    assert sent[1] == sent[0]
    assert len(vision.stored()[1].pictures) == 1
    check_exact(vision, n_branches=2)


async def test_pictures_that_are_not_held_are_not_taken_for_a_format_that_the_engine_refuses(
    vision: World,
) -> None:
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    first = await (await vision.client()).responses.create(
        model="m", input=[{"role": "user", "content": content}]
    )
    schema = {"type": "object", "properties": {}}
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    with pytest.raises(APIError, match="1 pictures of earlier turns are not held") as failed:
        await (await vision.client("t2")).responses.create(
            model="m", input="Sure?", previous_response_id=first.id, text=form
        )
    assert "grammar" not in str(failed.value)


async def test_a_compaction_reads_pictures_and_gives_the_users_back(vision: World) -> None:
    """Screenshots, which tools took, are in the summary alone."""
    vision.say("A chart, and a screen.")
    shot = {"type": "computer_screenshot", "image_url": data_url(png(seed=1))}
    said: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look."},
                {"type": "input_image", "image_url": data_url(png()), "detail": "auto"},
            ],
        },
        {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": shot},
    ]
    async with aiohttp.ClientSession() as http:
        compact = f"{vision.url}/v1/responses/compact"
        async with http.post(compact, json={"model": "m", "input": said}) as answer:
            assert answer.status == 200, await answer.text()
            output = (await answer.json())["output"]
    assert output[0]["content"] == said[0]["content"]
    assert [item["type"] for item in output] == ["message", "compaction"]
    assert len(vision.stored()[0].pictures) == 2
    client = await vision.client()
    await client.responses.create(model="m", input=output)
    assert len(vision.stored()[1].pictures) == 1
    check_exact(vision, n_branches=2)


async def test_a_compaction_by_id_needs_the_pictures_themselves(vision: World) -> None:
    client = await vision.client()
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    first = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "previous_response_id": first.id}
        async with http.post(f"{vision.url}/v1/responses/compact", json=body) as answer:
            assert answer.status == 400
            assert "send the conversation as input" in (await answer.json())["error"]["message"]


async def test_white_box_agents_send_pictures_in_messages_alone(vision: World) -> None:
    async with aiohttp.ClientSession() as http:
        body: Any = {"messages": [{"role": "user", "content": shown(png())}], "max_tokens": 8}
        async with http.post(f"{vision.url}/generate", json=body) as answer:
            assert answer.status == 200
            sampled = await answer.json()
        assert placeholder(vision) in sampled["prompt_ids"]
        sent = {"prompt_ids": sampled["prompt_ids"], "max_tokens": 8}
        async with http.post(f"{vision.url}/generate", json=sent) as answer:
            assert answer.status == 400
            assert "ids of vision tokens" in (await answer.json())["error"]["message"]


async def test_white_box_steps_hold_no_vision_tokens(vision: World) -> None:
    step = {
        "prompt_ids": [1, placeholder(vision)],
        "response_ids": [2],
        "trajectory_uid": "t",
        "prompt_uid": "p",
    }
    item = {"instance_id": "i", "reward": 1.0, "tokens": [1, placeholder(vision), 2]}
    item |= {"response_length": 1, "weight_versions": ["0"]}
    async with aiohttp.ClientSession() as http:
        for path, body in (("/submit_steps", {"steps": [step]}), ("/buffer/write", item)):
            async with http.post(vision.url + path, json=body) as answer:
                assert answer.status == 400
                assert "ids of vision tokens" in await answer.text()
        named = {**step, "prompt_ids": [1], "pictures": [["0" * 64, 28, 28, 0, 1]]}
        body = {"steps": [named]}
        async with http.post(f"{vision.url}/submit_steps", json=body) as answer:
            assert answer.status == 400
            assert "steps[0].pictures is no field of a Step" in await answer.text()
    assert not vision.stored()


async def test_a_vision_token_that_an_engine_samples_fails_the_call(vision: World) -> None:
    vision.engine.script.append(Sampled([7, placeholder(vision), 9]))
    client = await vision.client()
    with pytest.raises(APIError, match="sampled a vision token"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "No picture."}]
        )
    assert not vision.stored()


async def test_a_conversation_with_pictures_goes_on_at_another_gateway(
    worlds: Any, vision: World, vision_folder: str
) -> None:
    """Its engine has not seen the pictures: those of turns that are stored come from the pool."""
    other = await worlds(family=vision_folder, tokenizer_path=vision_folder, pool=vision.pool)
    messages: list[Any] = []
    for i, world in enumerate((vision, other)):
        client = await world.client()
        messages.append({"role": "user", "content": shown(png(seed=i))})
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)
    again = await (await vision.client()).chat.completions.create(
        model="m", messages=messages[:-1], extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.choices[0].message.content == answer.choices[0].message.content
    steps = vision.stored()
    assert [step.parent_index for step in steps] == [None, 0]
    assert [len(step.pictures) for step in steps] == [1, 2]
    assert vision.engine.requests[0]["image_data"] == other.engine.requests[0]["image_data"][:1]


async def test_a_picture_that_the_pool_cannot_read_comes_from_the_body_or_is_the_pools_failure(
    worlds: Any, vision: World, vision_folder: str
) -> None:
    other = await worlds(family=vision_folder, tokenizer_path=vision_folder, pool=vision.pool)
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    items: Any = [{"role": "user", "content": content}]
    first = await (await vision.client()).responses.create(model="m", input=items)
    said = [
        *items,
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "Sure?"},
    ]
    store = vision.port._port.service._pool.pictures.store  # type: ignore[attr-defined]
    for key in [*store.keys()]:
        store.remove(key)
    await (await other.client()).responses.create(model="m", input=said)
    assert len(vision.stored()[1].pictures) == 1
    client = await vision.client()
    with pytest.raises(APIError) as failed:
        await client.responses.create(model="m", input="Sure?", previous_response_id=first.id)
    assert failed.value.status_code == 503  # type: ignore[attr-defined]
    assert store.__class__.__name__ not in str(failed.value)


@pytest.mark.parametrize("role", ["system", "assistant", "user"])
async def test_the_text_of_a_placeholder_is_no_picture(vision: World, role: str) -> None:
    client = await vision.client()
    said = [{"role": role, "content": "<|vision_start|><|image_pad|><|vision_end|>"}]
    messages: Any = [*said, {"role": "user", "content": shown("Look.", png())}]
    if role == "user":  # marked as text, which it is
        await client.chat.completions.create(model="m", messages=messages)
        assert len(vision.stored()[0].pictures) == 1
        return
    with pytest.raises(BadRequestError, match="placeholder"):
        await client.chat.completions.create(model="m", messages=messages)


async def test_a_text_that_looks_like_a_picture_stays_a_text(vision: World) -> None:
    client = await vision.client()
    url = data_url(png(seed=9))
    arguments = json.dumps({"url": url})
    call = {"id": "c", "type": "function", "function": {"name": "open", "arguments": arguments}}
    tool = {"name": "open", "parameters": {"type": "object", "default": {"url": url}}}
    messages: Any = [
        {"role": "user", "content": shown("Open it.", png(seed=9), png(seed=8))},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "opened"},
    ]
    with pytest.raises(BadRequestError, match="stands as a text, too"):
        # The very same string is a picture here and a text there: nobody can mean that.
        await client.chat.completions.create(
            model="m", messages=messages, tools=[{"type": "function", "function": tool}]
        )
    tool["parameters"]["default"]["url"] = data_url(png(seed=7))  # type: ignore[index]
    await client.chat.completions.create(
        model="m", messages=messages, tools=[{"type": "function", "function": tool}]
    )
    (step,) = vision.stored()
    assert len(step.pictures) == 2
    async with aiohttp.ClientSession() as http:
        body = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
        async with http.post(f"{vision.url}/generate", json=body) as answer:
            sampled = await answer.json()
    assert sampled["prompt_ids"] == step.prompt_ids.tolist()


# -- engines ---------------------------------------------------------------------------------


async def test_an_engine_that_keeps_pictures_is_sent_each_of_them_once(vision: World) -> None:
    vision.engine.held_pictures = {}
    client = await vision.client()
    messages: list[Any] = []
    for i in range(5):
        messages.append({"role": "user", "content": shown(png(seed=i))})
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)
        if i == 3:  # it was started again
            vision.engine.held_pictures = {}
    sent = [request["image_data"] for request in vision.engine.requests]
    by_bytes = [sum(not p.startswith("sha256:") for p in pictures) for pictures in sent]
    assert by_bytes == [1, 1, 1, 1, 1, 5]  # the fifth call twice: its engine knew none of them
    digests = [picture.digest for picture in vision.stored()[3].pictures]
    assert sent[3][:3] == [f"sha256:{digest}" for digest in digests[:3]]
    assert not any("logit_bias" in r["sampling_params"] for r in vision.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_another_length_in_the_engine_fails_by_name(
    vision: World, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = vision.engine._chunk

    def longer(said: Any, n: int, start: int, n_prompt: int) -> dict[str, Any]:
        return chunk(said, n, start, n_prompt + 1)

    monkeypatch.setattr(vision.engine, "_chunk", longer)
    client = await vision.client()
    messages: Any = [{"role": "user", "content": shown(png())}]

    async def ask() -> None:
        answer = await client.chat.completions.create(model="m", messages=messages, stream=stream)
        async for _ in answer if stream else ():  # type: ignore[attr-defined]
            pass

    with pytest.raises(APIError, match="tokens and the one that was sent"):
        await ask()
    assert not vision.stored()


async def test_sglang_is_told_not_to_sample_a_vision_token(vision: World) -> None:
    client = await vision.client()
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "No picture."}]
    )
    masked = vision.engine.requests[0]["sampling_params"]["logit_bias"]
    assert {int(i) for i in masked} == {*vision.gateway.pictures.processor.forbidden_ids}
    assert placeholder(vision) in {int(i) for i in masked}


async def test_vllm_refuses_pictures_by_name(worlds: Any, vision_folder: str) -> None:
    world = await worlds(
        family=vision_folder, tokenizer_path=vision_folder, engine_kind="vllm", context_length=9999
    )
    client = await world.client()
    messages: Any = [{"role": "user", "content": shown(png())}]
    with pytest.raises(BadRequestError, match="takes no pictures: it is vLLM"):
        await client.chat.completions.create(model="m", messages=messages)


# -- the loop --------------------------------------------------------------------------------


def screenshot(seed: int) -> bytes:
    """A megabyte."""
    pixels = np.random.default_rng(seed).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels), "PNG", compress_level=1)


async def post(url: str, path: str, body: bytes) -> bytes:
    """Send a body as it is, in pieces, without a client that would work in this loop itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    for at in range(0, len(body), 1 << 17):
        writer.write(body[at : at + (1 << 17)])
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.slow
async def test_no_turn_of_the_loop_is_held_up_by_screenshots_of_a_megabyte(
    vision: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 requests with one each, as fast as they are taken, and one with all of them: 29 MB."""
    pictures = [screenshot(i) for i in range(20)]
    bodies = [
        json.dumps({"messages": [{"role": "user", "content": shown(*its)}]}).encode()
        for its in (*([p] for p in pictures), pictures)
    ]
    assert len(bodies[0]) > 1_000_000
    took: list[float] = []
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        began = time.thread_time()  # of this thread alone: what others do meanwhile is not counted
        run(handle)
        took.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    for i, body in enumerate(bodies):
        answer = await post(vision.url, f"/t{i}/p{i}/v1/chat/completions", body)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    assert max(took) < 0.05
