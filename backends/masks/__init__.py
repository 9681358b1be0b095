"""Loss masks of conversations that come as messages: SFT data, imported traces.

Data that went through the gateway needs none of this: its Steps hold the engine's own tokens. What
exists only as messages is tokenised here, so that the tokens the assistant wrote, and no others,
carry loss::

    messages ──mask_generator(name, tokenizer)──► MaskedRow   token_ids [T], loss_mask [T], turns
                                                     │
                                                     └─ to_steps ──► Step, Step, …  ──► DataPool

Generators by name (`MASK_GENERATORS`):

    auto          the first below that fits the tokenizer's chat template
    distill_qwen  DeepSeek's distilled models: `<｜Assistant｜>`, a thought that the prompt opens
    prefix        any template: what a conversation gains by one more message; also as qwen, qwen3,
                  qwen3_5 (slime's names) and llama3
    a path        a class or function of your own (`own.py`), slime's shape included

Owns: which tokens are the assistant's. Does not own: templates and tokenizers (transformers), what
is done with the mask. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stepwell.backends.errors import MaskError
from stepwell.backends.masks.base import ASSISTANT, LossMaskGenerator, MaskedRow, Turn
from stepwell.backends.masks.multi_turn import MultiTurnLossMaskGenerator
from stepwell.backends.masks.own import is_path, load_own
from stepwell.backends.masks.steps import to_steps
from stepwell.backends.masks.turnwise import DistillQwenMasks, PrefixMasks, TurnwiseMasks

__all__ = [
    "MASK_GENERATORS",
    "LossMaskGenerator",
    "MaskError",
    "MaskedRow",
    "MultiTurnLossMaskGenerator",
    "Turn",
    "TurnwiseMasks",
    "check_mask_name",
    "is_path",
    "load_own",
    "mask_generator",
    "to_steps",
]

MASK_GENERATORS: Mapping[str, type[TurnwiseMasks]] = MappingProxyType(
    {
        "distill_qwen": DistillQwenMasks,
        "prefix": PrefixMasks,
        "qwen": PrefixMasks,
        "qwen3": PrefixMasks,
        "qwen3_5": PrefixMasks,
        "llama3": PrefixMasks,
    }
)


def check_mask_name(name: str) -> str:
    """Return `name`. Imports nothing, so that configurations can be read anywhere.

    Raises:
        MaskError: it is neither a built-in name nor a path.
    """
    if name not in ("auto", *MASK_GENERATORS) and not is_path(name):
        raise MaskError(
            f"is {name!r}; choose one of auto, {', '.join(MASK_GENERATORS)}, or name a class or "
            "function of your own: package.module:Name or path/to/file.py:Name"
        )
    return name


def mask_generator(
    name: str, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> LossMaskGenerator:
    """Return the generator registered under `name`, or "auto", or at the path `name`.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        chat_template_kwargs: arguments of the chat template.

    Raises:
        MaskError: there is none, or it is not for this tokenizer.
    """
    if name == "auto":
        template = str(getattr(tokenizer, "chat_template", ""))
        name = "distill_qwen" if ASSISTANT in template else "prefix"
    if is_path(check_mask_name(name)):
        return load_own(name)(tokenizer, chat_template_kwargs or {})
    return MASK_GENERATORS[name](tokenizer, chat_template_kwargs)
