"""Loads a Hugging Face model that generates text, whether or not it reads pictures.

`AutoModelForCausalLM` refuses models with a vision tower; `AutoModelForImageTextToText` has those
whose pictures are supported (`pictures.py`), with the decoder in `base_model.language_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stepwell.backends.pictures import MODEL_TYPES


def load_causal_lm(path: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The model in `path`, by `from_pretrained` with its `options`."""
    options["trust_remote_code"] = trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    auto: Any = AutoModelForCausalLM
    if config.model_type in MODEL_TYPES:
        auto = AutoModelForImageTextToText
    return auto.from_pretrained(path, **options)
