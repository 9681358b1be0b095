"""A tiny random Qwen2-VL (or 2.5) with its tokenizer, chat template and image processor.

One placeholder stands for 28 x 28 pixels; pictures have 4 to 64 of them.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = Path(__file__).parent.parent / "examples" / "colours" / "chat_template.jinja"
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 64
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then the control, vision and tool tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in CONTROL + VISION])
    core.add_tokens([AddedToken(t, special=False) for t in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def make_vision_model(
    folder: Path,
    *,
    kind: Literal["qwen2_vl", "qwen2_5_vl"] = "qwen2_vl",
    seed: int = 0,
    context: int = 4096,
    **text: Any,
) -> Path:
    """Write the model; `text` changes its `text_config`."""
    tokenizer = vision_tokenizer()
    names = tokenizer.get_vocab()
    vision: dict[str, Any] = {"depth": 2, "patch_size": 14, "spatial_merge_size": 2}
    vision["in_chans"] = 3  # as published checkpoints say it, and SGLang reads it
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | text
    ids = {
        "image_token_id": names["<|image_pad|>"],
        "video_token_id": names["<|video_pad|>"],
        "vision_start_token_id": names["<|vision_start|>"],
        "vision_end_token_id": names["<|vision_end|>"],
        "vision_token_id": names["<|vision_pad|>"],
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": text_config["hidden_size"], "num_heads": 2}
        config: Any = Qwen2VLConfig(text_config=text_config, vision_config=vision, **ids)
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        vision |= {"out_hidden_size": text_config["hidden_size"], "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision, **ids)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    # Of the usual size, so that pictures change log-probs visibly.
    for parameter in model.model.visual.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2))
    return folder


def png(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """A picture of coarse random colours, of that size."""
    draw = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(draw).resize((width, height), Image.Resampling.NEAREST)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
