"""Loss masks of conversations that come as messages: SFT data, imported traces.

Data that went through the gateway needs none of this: its Steps hold the engine's own tokens. What
exists only as messages is tokenised here, so that the tokens the assistant wrote, and no others,
carry loss::

    messages ──generator(name, tokenizer)──► MaskedRow   token_ids [T], loss_mask [T], turns
                                                │
                                                └─ to_steps ──► Step, Step, …  ──► DataPool

Generators by name (`MASK_GENERATORS`), or by the dotted path of a `LossMaskGenerator`:

    auto          the first below that fits the tokenizer's chat template
    generation    the template marks what the model writes: `{% generation %}`
    distill_qwen  DeepSeek's distilled models: `<｜Assistant｜>`, a thought that the prompt opens
    qwen, chatml  `<|im_start|>assistant … <|im_end|>`
    llama3        `<|start_header_id|>assistant<|end_header_id|> … <|eot_id|>`
    prefix        any template: what a conversation gains by one more message

Owns: which tokens are the assistant's. Does not own: templates and tokenizers (transformers), what
is done with the mask. Loads no torch.
"""

from stepwell.trainer.errors import MaskError
from stepwell.trainer.masks.base import LossMaskGenerator, MaskedRow, Thinking, Turn
from stepwell.trainer.masks.registry import MASK_GENERATORS, mask_generator
from stepwell.trainer.masks.steps import to_steps
from stepwell.trainer.masks.turnwise import TurnwiseMasks

__all__ = [
    "MASK_GENERATORS",
    "LossMaskGenerator",
    "MaskError",
    "MaskedRow",
    "Thinking",
    "Turn",
    "TurnwiseMasks",
    "mask_generator",
    "to_steps",
]
