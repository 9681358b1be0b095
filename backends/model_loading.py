"""Loads a Hugging Face model that generates text, whether or not it reads pictures.

`AutoModelForCausalLM` refuses models with a vision tower; `AutoModelForImageTextToText` has those
whose pictures are supported (`pictures.py`), with the decoder in `base_model.language_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stepwell.backends.pictures import MODEL_TYPES


def load_causal_lm(
    path: str | Path, *, trust_remote_code: bool = False, empty: bool = False, **options: Any
) -> Any:
    """The model in `path`, by `from_pretrained` with its `options`.

    Args:
        empty: On the meta device; no file of weights is read.
    """
    options["trust_remote_code"] = trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    auto: Any = AutoModelForCausalLM
    if config.model_type in MODEL_TYPES:
        auto = AutoModelForImageTextToText
    if empty:
        options.pop("local_files_only", None)
        with torch.device("meta"):
            return auto.from_config(config, **options)
    return auto.from_pretrained(path, **options)
