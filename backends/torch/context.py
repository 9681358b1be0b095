"""Context parallel: ranks that share the tokens of a micro-batch, for rows that one cannot hold.

    rank 0   tokens [0, m)    all heads ─┐ all-to-all ┌─ all tokens, heads 0, 1 ─┐ all-to-all ┌─ …
    rank 1   tokens [m, 2m)   all heads ─┘            └─ all tokens, heads 2, 3 ─┘            └─ …
             projections, MLP                            attention, as on one rank

This is DeepSpeed-Ulysses (arXiv:2309.14509). Each rank attends for its heads over the whole
sequence, by the attention of one rank (`tree.py`), so every form of rows is exact: merged rows end
to end, and trees. Key heads that the ranks cannot divide are repeated before.

Scores of response tokens are computed where their tokens are and then shared, so each rank of a
group has the whole micro-batch's and computes the same loss, also one of whole responses. Its
backward pass goes through its own tokens: the sum over ranks, which FSDP2 makes anyway, is the
gradient. What is counted (loss, metrics) is counted by the group's first rank.

Worked example, 5 tokens, 2 ranks: the sequence is padded to 6, of which rank 0 has [0, 3), rank 1
[3, 6). Attention sees 5. A response at places 2 and 3 is scored on both, a token each.

Owns how one sequence is shared. Does not own which rows there are (`rows.py`), nor which ranks
compute them (`fsdp.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's place among those that share its micro-batches."""

    rank: int
    size: int
    group: Any
    """torch's process group of them."""

    @classmethod
    def join(cls, size: int) -> Context | None:
        """A group of `size` neighbours; None: this rank shares with nobody. All ranks must call
        it."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]  # torch's
        return cls(dist.get_rank() % size, size, group)

    def part(self, sequence: Tensor) -> Tensor:
        """This rank's share of a whole micro-batch: [1, n] -> [1, m], zeros behind its end."""
        m = -(-sequence.shape[1] // self.size)
        padded = pad(sequence, (0, m * self.size - sequence.shape[1]))
        return padded[:, self.rank * m : (self.rank + 1) * m]

    def whole(self, scores: Sequence[Tensor], own: Tensor, n: int) -> list[Tensor]:
        """Scores of all n response tokens, of which this rank has those at `own`: [own] -> [n]
        each."""
        stacked = torch.stack([*scores])
        whole = _Whole.apply(stacked, own, n, self.group)  # type: ignore[no-untyped-call]  # torch's
        return [score.clone() for score in whole]  # FSDP2 wants no views

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        n_tokens: int,
    ) -> Tensor:
        """Attention over the whole sequence, of which each rank has a part.

        Args:
            attention: of some heads: [1, heads, n, d] each -> [1, n, heads, d].
            query: [1, heads, m, d]; keys and values may have fewer heads.
            n_tokens: n, of all ranks, without what pads the last part.

        Returns:
            [1, m, heads, d].
        """
        size, heads, m = self.size, query.shape[1], query.shape[2]
        copies = math.lcm(key.shape[1], size) // key.shape[1]
        parts = [query, *(x.repeat_interleave(copies, 1) for x in (key, value))]
        # One exchange for the three: [to rank, all numbers of its heads]
        sent = torch.cat([x.reshape(size, -1) for x in parts], 1)
        received = _Exchange.apply(sent, self.group)  # type: ignore[no-untyped-call]  # torch's
        widths = [x.numel() // size for x in parts]
        own = []
        for x, flat in zip(parts, received.split(widths, 1), strict=True):
            by_rank = flat.reshape(size, -1, m, x.shape[3])
            own.append(by_rank.transpose(0, 1).flatten(1, 2)[None, :, :n_tokens])
        out = attention(*own)
        out = pad(out, (0, 0, 0, 0, 0, m * size - n_tokens)).reshape(size, m, heads // size, -1)
        back = _Exchange.apply(out, self.group)  # type: ignore[no-untyped-call]  # torch's
        return back.transpose(0, 1).reshape(1, m, heads, -1)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """Block i of the first dimension goes to rank i, whose block comes here; so do gradients."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(blocks: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received


class _Whole(torch.autograd.Function):
    """Columns that ranks have some of each, [k, own] -> [k, n]. All compute the same loss of them:
    a column's gradient is the one that its rank has, not a sum."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, own: Tensor, n: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        whole = mine.new_zeros(len(mine), n)
        whole[:, own] = mine
        dist.all_reduce(whole, group=group)  # each is a sum with zeros
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad[:, own], None, None, None
