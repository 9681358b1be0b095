# ruff: noqa: E402  # the platform is chosen before verl is imported
"""Rows with pictures are what verl's own agent loop makes of them: `make test-verl`.

`AutoProcessor` of Qwen2-VL needs torchvision, so verl's code is given a stand-in of the parts that
it is made of: the image processor, the tokenizer and the model's own `get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="make test-verl runs it, where verl is")

from tests.backends.verl_cpu import use_cpu

use_cpu()

from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from stepwell.backends.config import VerlConfig
from stepwell.backends.pictures import decode
from stepwell.backends.verl.backend import VerlBackend
from stepwell.backends.verl.queue import queue_rows
from tests.backends.test_vision_training import Album
from tests.vision_model import make_vision_model


class Processor:
    """The parts of Qwen's processor that verl uses."""

    def __init__(self, folder: Path) -> None:
        self.image_processor: Any = AutoImageProcessor.from_pretrained(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForImageTextToText.from_pretrained(folder)
        self.get_rope_index = model.model.get_rope_index
        self.image_token_id = model.config.image_token_id
        self.video_token_id = model.config.video_token_id

    def __call__(
        self, text: Any, images: Sequence[Image.Image] | None, **options: Any
    ) -> BatchFeature:
        made: dict[str, Any] = dict(self.tokenizer(text, return_tensors="pt"))
        made["mm_token_type_ids"] = torch.zeros_like(made["input_ids"])
        if images:
            made |= self.image_processor(images=list(images), return_tensors="pt")
        return BatchFeature(made)


def test_a_data_proto_with_pictures_is_what_verls_agent_loop_makes(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path)
    album = Album(folder)
    steps = album.conversations()
    config = VerlConfig(model_path=folder, prompt_length=160, response_length=96)
    backend = VerlBackend(config)
    made = backend.convert(steps, pictures=album.pngs)
    rows = backend.rows(steps, pictures=album.pngs)
    processor = Processor(folder)
    worker: Any = SimpleNamespace(
        processor=processor, tokenizer=processor.tokenizer, _get_mm_processor_kwargs=lambda _: {}
    )
    shown = {s.token_ids.tobytes(): s.pictures for s in steps}
    seen = 0
    for i, row in enumerate(rows):
        pictures = shown[row.input_ids.numpy().astype("int32").tobytes()]
        images = [decode(album.pngs[p.digest], album.processor.bounds) for p in pictures]
        ids, mask = (made.batch[name][i : i + 1] for name in ("input_ids", "attention_mask"))
        data = {"images": images or None}
        output = SimpleNamespace(multi_modal_data=data, mm_processor_kwargs=None)
        inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)
        positions = AgentLoopWorker._compute_position_ids(worker, ids, mask, inputs)
        assert made.batch["position_ids"][i].equal(positions[0])
        own = made.non_tensor_batch["multi_modal_inputs"][i]
        assert own.keys() == inputs.keys()
        for name, value in inputs.items():
            assert own[name].equal(value), name
        seen += len(images)
    assert seen > 10
    queued = queue_rows(rows) if len({row.temperature for row in rows}) == 1 else None
    assert queued is None or queued.fields[0]["position_ids"].shape[0] == 4
