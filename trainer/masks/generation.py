"""`generation`: the template itself marks what the model writes, with `{% generation %}` blocks.

transformers returns the mask (`return_assistant_tokens_mask`); whether the token that closes a turn
is inside is the template author's choice. One rendering makes the whole row, so `thinking` has no
use here: reasoning that the template does not show is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stepwell.trainer.errors import MaskError
from stepwell.trainer.masks.base import (
    LossMaskGenerator,
    MaskedRow,
    Message,
    Tool,
    Turn,
    check_messages,
    for_template,
    reasoning_of,
)

BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class GenerationMasks(LossMaskGenerator):
    """By the template's own `{% generation %}` blocks."""

    def rows(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[MaskedRow]:
        if not BLOCK.search(str(self.tokenizer.chat_template)):
            raise MaskError(
                "the chat template has no {% generation %} block to tell what the model writes; "
                "use 'prefix'"
            )
        with_loss = check_messages(messages)
        shown = [for_template(m) for m in messages]
        try:
            encoded = self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) if tools else None,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._template_args,
            )
        except Exception as e:  # a template is a program of its own: it may raise anything
            raise MaskError(
                f"the chat template refuses the messages ({type(e).__name__}: {e!s:.200})"
            ) from e
        ids = np.asarray(encoded["input_ids"], np.int32)
        written = np.asarray(encoded["assistant_masks"], np.int8)
        edges = np.flatnonzero(np.diff(written, prepend=0, append=0)).tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        if len(spans) != len(with_loss):
            raise MaskError(
                f"the template marks {len(spans)} texts as written by the model, but "
                f"{len(with_loss)} messages are the assistant's; use 'prefix'"
            )
        turns = []
        mask = np.zeros_like(written)
        for (start, end), (index, loss) in zip(spans, with_loss.items(), strict=True):
            thought = reasoning_of(shown[index]).strip()
            if thought and thought not in self.tokenizer.decode(ids[start:end].tolist()):
                raise MaskError(
                    f"messages[{index}]: the chat template does not show its reasoning "
                    f"({thought!r:.60}); use 'prefix', which trains each turn as it was written"
                )
            mask[start:end] = loss
            turns.append(Turn(index, start, end, loss))
        if any(a.end > b.start for a, b in pairwise(turns)):
            raise MaskError("the template marks texts of the model that overlap; use 'prefix'")
        end = turns[-1].end
        return [MaskedRow(ids[:end], mask[:end], tuple(turns))]
