"""Scores of response tokens without ever holding the logits of all of them.

A vocabulary of 150,000 makes 600 kB of fp32 logits per token, and the softmax and its gradient as
much again; 10,000 response tokens are more than the model. So the decoder runs once, and what
follows it runs over n positions, `chunk` at a time::

    decoder ──► hidden [n, H] ──┬─► tail(hidden[0:c])  ─► log π, entropy [c] ─┐
                                ├─► tail(hidden[c:2c]) ─► log π, entropy [c] ─┼─► [n], [n]
                                └─► …   logits [c, V] are freed, and made again in the backward

The tail is the model's own forward with its decoder replaced by one that returns the chunk, so
that whatever a family does around its LM head (Gemma's soft cap, Cohere's and Granite's scale)
stays part of π. The gradient is exact: activation checkpointing, arXiv:1604.06174.

Does not own: which positions, or the scoring of logits (`model.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Score: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(logits [c, V], which of the n positions they are) -> (log π [c], entropy [c] | None)."""


def chunk_tokens(limit_mb: int, vocab: int) -> int:
    """Positions whose float32 logits fit into `limit_mb` megabytes; at least one."""
    return max(1, limit_mb * 1_000_000 // (4 * vocab))


def chunked(
    model: Any,
    model_kwargs: Mapping[str, Any],
    positions: Tensor,
    score: Score,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """(log π [n], entropy [n] | None) at `positions` of one forward pass of `model`.

    Args:
        model: a Hugging Face causal LM.
        positions: int64, [n]: indices into rows × width of the decoder's output.
        score: is called again in the backward pass; pure.
        chunk: positions whose logits exist at once.
    """
    seen: list[Any] = []

    def keep(_: torch.nn.Module, __: Any, output: Any) -> Any:
        seen.append(output)
        return _with_hidden(output, output.last_hidden_state[:, :0])

    # The model's own forward, so that it prepares the decoder's inputs as ever; its head sees an
    # output without positions.
    with _decoder(model).register_forward_hook(keep):
        model(**model_kwargs)
    (output,) = seen
    hidden = output.last_hidden_state.flatten(0, 1)[positions]
    output = _with_hidden(output, hidden[:0])  # the tails outlive this call; the rest need not

    def tail(part: Tensor, where: slice) -> tuple[Tensor, Tensor | None]:
        with _decoder_returns(model, _with_hidden(output, part.unsqueeze(0))):
            logits = model.forward(input_ids=part.new_zeros(1, len(part), dtype=torch.int64))
        return score(logits.logits[0], where)

    scored = []
    for start in range(0, len(positions), chunk):
        where = slice(start, min(start + chunk, len(positions)))
        if torch.is_grad_enabled():
            scored.append(
                checkpoint(
                    tail, hidden[where], where, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            scored.append(tail(hidden[where], where))
    log_probs, entropies = zip(*scored, strict=True)
    return torch.cat(log_probs), None if entropies[0] is None else torch.cat(entropies)


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The decoder's output with other hidden states."""
    changed = copy.copy(output)
    changed.last_hidden_state = hidden
    return changed


def _decoder(model: Any) -> Any:
    """The module whose output the model's forward gives to the head: the base model; OPT passes by
    it to the decoder in it."""
    base, decoder = model.base_model, model.get_decoder()
    reads_pictures = "vision_config" in model.config.sub_configs
    within = any(module is decoder for module in base.modules())
    return decoder if within and not reads_pictures else base


@contextmanager
def _decoder_returns(model: Any, output: Any) -> Iterator[None]:
    decoder = _decoder(model)
    # An attribute of the instance hides the method of its class, and is gone again afterwards.
    decoder.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del decoder.forward
