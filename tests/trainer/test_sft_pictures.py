"""SFT of conversations with pictures: the loss is that of a plain forward of transformers; what
cannot be trained is refused before the run."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from stepwell.backends.pictures import PictureProcessor
from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool import DataPoolClient
from stepwell.datapool.types import SFT, Group, Trajectory
from stepwell.trainer.config import DataConfig, SftConfig, TableConfig
from stepwell.trainer.data import Conversations, open_conversations
from stepwell.trainer.errors import DataError
from stepwell.trainer.sampling import CHANNEL
from stepwell.trainer.sft import ConversationWriter
from tests.trainer.test_loop_losses import ROOT, updater_of
from tests.vision_model import make_vision_model, png
from tests.vision_reference import VisionReference

SHOWN = {"type": "image"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def conversation(*images: str) -> dict[str, Any]:
    """Two turns, a picture in the question and one in the tool's answer."""
    call = {"type": "function", "function": {"name": "turn", "arguments": "{}"}}
    return {
        "instance_id": "c",
        "messages": [
            {"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": "Let me turn it.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [SHOWN, text("turned")]},
            {"role": "assistant", "content": "A cat."},
        ],
        "images": list(images),
    }


def table(folder: Path, *rows: dict[str, Any]) -> TableConfig:
    """`data.sft` of these rows, as a configuration names it."""
    (folder / "a.png").write_bytes(png(84, 56, seed=1))
    (folder / "b.png").write_bytes(png(60, 130, seed=2))  # on no grid
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"sft": str(path)}).sft
    assert config is not None
    return config


def reference_loss(model: Path, row: dict[str, Any], folder: Path) -> float:
    """Mean -log π of what the assistant wrote, of ids that transformers' template makes."""
    reference, tokenizer = VisionReference(model), AutoTokenizer.from_pretrained(model)
    pngs = [reference.processor.canonical((folder / f).read_bytes()).png for f in row["images"]]
    grid = reference.processor.features(pngs)["image_grid_thw"]
    messages = [dict(m) for m in row["messages"]]
    messages[0]["content"] = [SHOWN, text("What is it?")]

    def ids(until: int, *, asks: bool) -> list[int]:
        found = tokenizer.apply_chat_template(
            messages[:until], add_generation_prompt=asks, return_dict=False
        )
        n = iter(grid.prod(axis=1) // 4)
        pad = reference.processor.placeholder_id
        return [i for id in found for i in [id] * (int(next(n)) if id == pad else 1)]

    losses = []
    for i in (1, 3):
        prompt, whole = ids(i, asks=True), ids(i + 1, asks=False)
        written = whole[len(prompt) : len(whole) - 1]  # the template's line break is not trained
        n = len([m for m in messages[:i] if isinstance(m["content"], list)])
        losses.append(-reference.log_probs(prompt, written, pngs[:n]))
    return float(torch.cat(losses).detach().mean())


@pytest.mark.parametrize("form", ["step", "merged", "tree"])
def test_the_loss_is_that_of_a_plain_forward(model: Path, tmp_path: Path, form: str) -> None:
    row = conversation("a.png", "b.png")
    source = table(tmp_path, row)
    (task,) = open_conversations(source, SftConfig(), model)
    written = Conversations(source, SftConfig(), model).written(task, "c")
    assert [len(step.pictures) for step in written.steps] == [1, 2]
    group = Group("c", (Trajectory("c", "c", tuple(written.steps)),), metadata={CHANNEL: SFT})
    options = (f"model.path={model}", f"backend.rows={form}")
    torch.set_num_threads(1)
    with updater_of(tmp_path / "run", *options, backend=TorchBackend) as updater:
        prepared = updater.prepare([group], written.pictures)
        found = updater.step(prepared, prepared.mini_batches[0].steps)
    assert found["sft/loss"] == pytest.approx(reference_loss(model, row, tmp_path), abs=1e-5)


@pytest.mark.parametrize("is_text", [False, True])
async def test_conversations_come_into_the_pool_with_their_pictures(
    model: Path, tmp_path: Path, is_text: bool
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(56, 56, seed=3)).decode()}"
    of_its_own = {"type": "image_url", "image_url": url if is_text else {"url": url}}
    row = conversation("a.png", "b.png")
    row["messages"][0] = {"role": "user", "content": [SHOWN, of_its_own, text("Which?")]}
    source = table(tmp_path, row)
    (task,) = open_conversations(source, SftConfig(), model)
    conversations = Conversations(source, SftConfig(), model)
    async with DataPoolClient.local() as pool:
        writer = ConversationWriter(pool, conversations)
        await writer.run_group(task, "c", 1)
        lease = await pool.lease_batch(channel=SFT)
        assert lease is not None
        (steps,) = (t.steps for group in lease.groups for t in group.trajectories)
        digests = [picture.digest for picture in steps[-1].pictures]
        stored = await pool.read_pictures("c", digests, SFT)
    processor = PictureProcessor.of(model)
    assert processor is not None
    sent = [tmp_path / "a.png", png(56, 56, seed=3), tmp_path / "b.png"]
    made = [processor.canonical(p if isinstance(p, bytes) else p.read_bytes()) for p in sent]
    assert [stored[digest] for digest in digests] == [picture.png for picture in made]
    for picture, step in ((made[0], steps[0]), (made[2], steps[1])):
        (place,) = (p for p in step.pictures if p.digest == picture.digest)
        ids = step.prompt_ids[place.at - 1 : place.end + 1]
        assert ids[0] == processor.start_id
        assert np.all(ids[1:-1] == processor.placeholder_id)
        assert len(ids) == picture.n_tokens + 2
        assert ids[-1] == processor.end_id


def _with(messages: int, content: Any) -> dict[str, Any]:
    row = conversation("a.png", "b.png")
    row["messages"][messages] = row["messages"][messages] | {"content": content}
    return row


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (conversation("a.png"), "has 1 pictures and 2 <image>"),
        (conversation("a.png", "rows.jsonl"), "is no PNG, JPEG, WebP or GIF"),
        (_with(0, "<|image_pad|><image>What is it?"), "hold 2 pictures and .* shows 3"),
        (_with(3, "A <|vision_start|> cat."), "has a vision token"),
        (_with(3, [SHOWN, text("A cat.")]) | {"images": ["a.png", "b.png", "a.png"]}, "shows 3"),
    ],
)
def test_a_conversation_whose_pictures_cannot_be_trained_is_refused_before_the_run(
    model: Path, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        open_conversations(table(tmp_path, row), SftConfig(), model)


def test_a_model_of_text_is_given_no_pictures(tmp_path: Path) -> None:
    source = table(tmp_path, conversation("a.png", "b.png"))
    with pytest.raises(DataError, match=r"messages\[0\] has a picture, but .* reads text only"):
        open_conversations(source, SftConfig(), ROOT / "examples/quickstart/model")


async def test_a_damaged_picture_is_refused_by_its_row(model: Path, tmp_path: Path) -> None:
    row = conversation("a.png", "b.png")
    source = table(tmp_path, row)
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    config = TypeAdapter(TableConfig).dump_python(source)
    assert config["image_key"] == "images"
    with pytest.raises(DataError, match=r"conversation 'c' .* messages\[0\]: .* damaged"):
        await asyncio.to_thread(open_conversations, source, SftConfig(), model)
