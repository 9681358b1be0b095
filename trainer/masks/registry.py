"""Generators of loss masks by name or dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stepwell.datapool.dotted import resolve
from stepwell.trainer.errors import MaskError
from stepwell.trainer.masks.base import LossMaskGenerator, Thinking
from stepwell.trainer.masks.distill import ASSISTANT, DistillQwenMasks
from stepwell.trainer.masks.generation import BLOCK, GenerationMasks
from stepwell.trainer.masks.prefix import Llama3Masks, PrefixMasks, QwenMasks

MASK_GENERATORS: Mapping[str, type[LossMaskGenerator]] = MappingProxyType(
    {
        "generation": GenerationMasks,
        "distill_qwen": DistillQwenMasks,
        "qwen": QwenMasks,
        "chatml": QwenMasks,
        "llama3": Llama3Masks,
        "prefix": PrefixMasks,
    }
)


def mask_generator(
    name: str,
    tokenizer: Any,
    *,
    thinking: Thinking = "preserve",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> LossMaskGenerator:
    """The generator registered under `name`, "auto", or the class at the dotted path.

    Raises:
        MaskError: there is none, or it is not for this tokenizer.
    """
    kind = _auto(tokenizer) if name == "auto" else MASK_GENERATORS.get(name) or _by_path(name)
    return kind(tokenizer, thinking=thinking, chat_template_kwargs=chat_template_kwargs)


def _auto(tokenizer: Any) -> type[LossMaskGenerator]:
    template = str(getattr(tokenizer, "chat_template", ""))
    if BLOCK.search(template):
        return GenerationMasks
    return DistillQwenMasks if ASSISTANT in template else PrefixMasks


def _by_path(name: str) -> type[LossMaskGenerator]:
    hint = f"choose auto, {', '.join(MASK_GENERATORS)} or a class as package.module:Class"
    try:
        found = resolve(name)
    except ImportError as e:
        raise MaskError(
            f"the mask generator is {name!r}, which cannot be imported ({e}); {hint}"
        ) from e
    if not (isinstance(found, type) and issubclass(found, LossMaskGenerator)):
        raise MaskError(f"the mask generator is {name!r}, which is no LossMaskGenerator; {hint}")
    return found
