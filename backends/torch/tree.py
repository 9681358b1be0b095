"""Prefix-tree packing: what several rows begin with goes through the model once.

Rows are sorted, their common prefixes found, and the tree that this makes is laid out depth first
in one sequence. A token's position id is its depth, and it attends to its ancestors::

    rows            P A        packed     P A B C D         nodes      P ─┬─ A
                    P B C                                                 └─ B ─┬─ C
                    P B D      position   0 1 1 2 2                             └─ D

Depth first means that the descendants of a node are the tokens right behind it, [end, reach).
Attention is then two unmasked-or-causal blocks per node, and no masked block is ever touched:

    its own tokens          causal,   queries = keys = [start, end)
    those who descend       unmasked, queries = [end, reach), keys = [start, end)

On the CPU both are PyTorch's flash kernels, joined by their log-sum-exp as in ring attention
(Liu et al., arXiv:2310.01889). On a GPU it is one FlexAttention kernel (arXiv:2412.05496) whose
block mask says the same: k is seen by q if k <= q < reach(k).

Rows that share nothing are packed end to end by the same means (`share=False`): a tree whose nodes
are rows. On a GPU they take the varlen flash kernel, in bfloat16.

It reaches the model through transformers' `AttentionInterface`, so any causal LM that attends
through it will do. One that mixes tokens otherwise (convolutions, recurrences, sliding windows on
the CPU, attention sinks) is refused by `enable`, which compares both forms on the model itself.

Owns: the packing, the attention. Does not own: which rows there are and how they are split into
micro-batches (`rows.py`), the model's call (`model.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from stepwell.backends.errors import BackendConfigError, UnsupportedByBackendError
from stepwell.backends.rows import Compared, common_prefix, in_tree_order
from stepwell.backends.torch.context import Context

TREE_ATTENTION = "stepwell_tree"
"""The name in transformers' registry of attention functions."""

MIN_SHARED = 8
"""Tokens that sharing must save to be worth a node of its own: two more kernel calls a layer."""

MAX_NODE = 256
"""Longer nodes are cut: PyTorch's CPU kernel skips masked blocks of 512 keys only, and so computes
most of a shorter triangle twice over. Two triangles and the square between them cost less."""

BLOCK = 128
"""Tokens of a block of FlexAttention's mask, the kernel's own size."""

PROBE_TOLERANCE = MappingProxyType({"cpu": 1e-4, "cuda": 5e-3, "bfloat16": 5e-2})
"""Difference of logits between tree and rows, over the largest logit, that `enable` accepts: sums
in another order differ by 1e-6 (by 1e-3 in TF32, by 2e-2 in bfloat16), attention that ignores the
tree by 5e-1 (by 6e-2 where the logits are nearly flat)."""

Indices = npt.NDArray[np.int64]

_VARLEN_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True: key heads may be fewer than query heads there; not in torch 2.11."""
_ONLY_FLEX = ("softcap", "s_aux", "position_bias")
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Node(NamedTuple):
    """Tokens [start, end) of the packed sequence; its descendants are [end, reach)."""

    start: int
    end: int
    reach: int

    def pieces(self) -> list[Node]:
        """The node as a chain of nodes of at most `MAX_NODE` tokens: what follows descends."""
        size = self.end - self.start
        n = -(-size // MAX_NODE)
        edges = [self.start + size * i // n for i in range(n + 1)]
        return [Node(a, b, self.reach) for a, b in pairwise(edges)]


@dataclass(eq=False, slots=True)
class Tree:
    """Rows as one sequence, with what they begin with once; attention's argument."""

    nodes: tuple[Node, ...]
    """Depth first."""
    ids: Compared
    position_ids: Indices
    where: tuple[Indices, ...]
    """For each row given, the place of each of its tokens in the sequence."""
    shares: bool = True
    """False: the rows lie end to end, each on its own."""
    _block_mask: Any = field(default=None, init=False)
    _edges: Tensor | None = field(default=None, init=False)

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def reach(self) -> Tensor:
        """int64, [n_tokens]: the end of what descends from each token."""
        reach = np.zeros(self.n_tokens, dtype=np.int64)
        for node in self.nodes:
            reach[node.start : node.end] = node.reach
        return torch.from_numpy(reach)

    def edges(self, device: torch.device) -> Tensor:
        """int32, [rows + 1]: where rows that share nothing begin and end. Made once."""
        if self._edges is None:
            sizes = [len(where) for where in sorted(self.where, key=lambda where: int(where[0]))]
            ends = np.cumsum([0, *sizes], dtype=np.int32)
            self._edges = to_device(torch.from_numpy(ends), device)
        return self._edges

    def block_mask(self, device: torch.device) -> Any:
        """FlexAttention's block mask, made once for all layers, of blocks and never of tokens: a
        later block sees some of a block of keys if it begins before the farthest of their reaches
        ends, and all of it if it ends before the nearest."""
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import BlockMask

            n, own = self.n_tokens, self.reach()
            blocks = -(-n // BLOCK)
            by_block = np.pad(own.numpy(), (0, blocks * BLOCK - n)).reshape(blocks, BLOCK)
            first = np.arange(blocks)[:, None] * BLOCK
            later = np.tri(blocks, k=-1, dtype=bool)
            whole = later & (by_block.min(1)[None] >= first + BLOCK)
            part = (later & (by_block.max(1)[None] > first) & ~whole) | np.eye(blocks, dtype=bool)
            reach = to_device(own, device)

            def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q) & (q < reach[k])

            def listed(some: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
                order = np.argsort(~some, axis=1, kind="stable").astype(np.int32)
                counts = some.sum(1, dtype=np.int32)
                on = (to_device(torch.from_numpy(x)[None, None], device) for x in (counts, order))
                return next(on), next(on)

            self._block_mask = BlockMask.from_kv_blocks(
                *listed(part),
                *listed(whole),
                BLOCK_SIZE=BLOCK,
                mask_mod=sees,
                seq_lengths=(n, n),
            )
        return self._block_mask


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which nobody waits: a pageable one would wait for all before it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack(rows: Sequence[Compared], min_shared: int = MIN_SHARED, *, share: bool = True) -> Tree:
    """The rows (none empty) as one prefix tree; without `share`, end to end.

    `min_shared` keeps chance agreements of a few tokens from becoming nodes; those tokens are then
    computed once per row, which changes no result.
    """
    ids: list[Compared] = []
    positions: list[Indices] = []
    where: list[Indices] = [np.empty(0, np.int64)] * len(rows)
    nodes: list[Node] = []
    path: list[Node] = []
    """Nodes of the row laid out last, from the root: what descends from them is still to come."""
    n = 0
    previous: int | None = None
    for r in in_tree_order(rows):
        depths = [*accumulate((node.end - node.start for node in path), initial=0)]
        shared = 0
        if previous is not None and share:
            shared = common_prefix(rows[previous], rows[r])
            # The last branch point before it, if going beyond saves too little.
            branch = max(depth for depth in depths if depth <= shared)
            shared = shared if shared - branch >= min_shared else branch
        while path and depths[-2] >= shared:
            nodes.append(path.pop()._replace(reach=n))
            depths.pop()
        if (surplus := depths[-1] - shared) > 0:  # the row leaves the last node midway
            *path, last = path
            path.append(last._replace(end=last.end - surplus))
            nodes.append(Node(last.end - surplus, last.end, n))
        known = where[previous][:shared] if previous is not None else where[r]
        fresh = rows[r][shared:]
        if len(fresh):
            path.append(Node(n, n + len(fresh), n))
            ids.append(fresh)
            positions.append(np.arange(shared, len(rows[r])))
        where[r] = np.concatenate([known, np.arange(n, n + len(fresh))])
        n += len(fresh)
        previous = r
    nodes += [node._replace(reach=n) for node in path]
    pieces = sorted(piece for node in nodes for piece in node.pieces())
    return Tree(tuple(pieces), np.concatenate(ids), np.concatenate(positions), tuple(where), share)


class _TreeAttention(torch.autograd.Function):
    """Attention over a tree by flash kernels; saves q, k, v, out and its log-sum-exp, O(tokens).

    With out and log-sum-exp of the whole softmax, the flash backward of one block of keys gives
    that block's exact share of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, nodes: Sequence[Node], scale: float | None
    ) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=torch.float32)
        out = out.transpose(1, 2)
        lse = torch.empty(q.shape[:3], dtype=torch.float32)

        def attend(at: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = _flash(
                q[:, :, at], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scale
            )
            return found

        for node in nodes:
            own = slice(node.start, node.end)
            out[:, :, own], lse[:, :, own] = attend(own, own, True)
        for node in nodes:
            if node.end == node.reach:
                continue
            at = slice(node.end, node.reach)
            o, weight = attend(at, slice(node.start, node.end), False)
            # softmax over both: out ← out + σ(Δ)(o - out), log-sum-exp ← log(e^lse + e^weight)
            share = torch.sigmoid(weight - lse[:, :, at]).unsqueeze(-1)
            out[:, :, at].lerp_(o.float(), share)
            lse[:, :, at] = torch.logaddexp(lse[:, :, at], weight)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)

        def share(at: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = _flash_backward(
                grad[:, :, at],
                q[:, :, at],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, at],
                lse[:, :, at],
                0.0,
                causal,
                scale=ctx.scale,
            )
            return found

        for node in ctx.nodes:
            own = slice(node.start, node.end)
            dq[:, :, own], dk[:, :, own], dv[:, :, own] = share(own, own, True)
        for node in ctx.nodes:
            if node.end == node.reach:
                continue
            at, keys = slice(node.end, node.reach), slice(node.start, node.end)
            more_q, more_k, more_v = share(at, keys, False)
            dq[:, :, at] += more_q
            dk[:, :, keys] += more_k
            dv[:, :, keys] += more_v
        return dq, dk, dv, None, None


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query [1, heads, n, d], key and value [1, kv heads, n, d].

    Without `tree`, plain causal attention (SDPA). With `context`, ranks have a part of the tree's
    tokens each.

    Returns:
        [1, n, heads, d], and no attention weights.

    Raises:
        UnsupportedByBackendError: the layer wants what this attention does not do.
    """
    if tree is None:
        kwargs.pop("is_causal", None)
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if context is not None:
        if of_heads := [
            name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None
        ]:
            raise UnsupportedByBackendError(
                f"{type(module).__name__} asks for attention with {of_heads[0]}, whose heads "
                "ranks cannot share; set backend.context_parallel to 1"
            )

        def of_some_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tree_attention_forward(
                module, q, k, v, attention_mask, scaling, dropout, tree, **kwargs
            )[0]

        return context.attend(of_some_heads, query, key, value, tree.n_tokens), None
    on_cpu = query.device.type == "cpu"
    unwanted = {name: kwargs.get(name) for name in ("sliding_window", *_ONLY_FLEX * on_cpu)}
    if attention_mask is not None:
        unwanted["attention_mask"] = attention_mask
    if value.shape[3] != key.shape[3]:  # DeepSeek's; flash kernels take one width
        unwanted["values of another width"] = value.shape[3]
    for name, value_ in unwanted.items():
        if value_ is not None:
            raise UnsupportedByBackendError(
                f"{type(module).__name__} asks for attention with {name}, which rows 'tree' does "
                f"not do on {query.device.type}; set backend.rows to 'merged'"
            )
    if on_cpu:
        out: Tensor = _TreeAttention.apply(query, key, value, tree.nodes, scaling)  # type: ignore[no-untyped-call]  # torch's
        return out.transpose(1, 2), None
    # In eval mode throughout (see torch/backend.py): no dropout to pass on.
    if not tree.shares and query.dtype != torch.float32 and not any(map(kwargs.get, _ONLY_FLEX)):
        edges, longest = tree.edges(query.device), max(map(len, tree.where))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        grouped: Any = {"enable_gqa": True} if _VARLEN_GROUPS else {}
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        rows = varlen_attn(
            q, k, v, edges, edges, longest, longest, scale=scaling, window_size=(-1, 0), **grouped
        )
        return cast(Tensor, rows)[None], None
    mask = tree.block_mask(query.device)
    flex: tuple[Tensor, Tensor | None] = flex_attention_forward(
        module, query, key, value, mask, scaling=scaling, **kwargs
    )
    return flex[0], None


def enable(
    model: Any,
    dtype: torch.dtype = torch.float32,
    *,
    probe: bool = True,
    wanted: str = "backend.rows is 'tree'",
    remedy: str = "set backend.rows to 'merged'",
) -> None:
    """Make `model` attend by tree where it is given one, and prove on it that this works.

    Args:
        dtype: that the model will compute in, whatever it was loaded in.
        probe: False where the weights are not here; the rank that has them proves it.
        wanted: the setting that asks for it, and
        remedy: what to do where it cannot be, for the error.

    Raises:
        BackendConfigError: the model does not attend through transformers' interface, its code
            fails at a tree, or its
            logits for a small tree differ from those of the rows in it.
    """
    # A tree is no tensor; FlexAttention is compiled by itself.
    attention = torch.compiler.disable(tree_attention_forward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    AttentionInterface.register(TREE_ATTENTION, attention)
    name = type(model).__name__
    before = model.config.get_text_config()._attn_implementation
    with _quiet():
        _set_attention(model, TREE_ATTENTION)
    if not is_enabled(model):
        raise BackendConfigError(
            f"{wanted}, but {name} does not attend through transformers' "
            f"AttentionInterface; {remedy}"
        )
    if not probe:
        return
    try:
        worst = _probe(model, dtype)
    except UnsupportedByBackendError as e:
        _set_attention(model, before)
        raise BackendConfigError(f"{wanted}, but {e}") from e
    except Exception as e:  # of the model's own code: it may read a mask that there is not
        _set_attention(model, before)
        why = f"{type(e).__name__}: {' '.join(str(e).split()):.200}"
        raise BackendConfigError(f"{wanted}, which {name} does not take ({why}); {remedy}") from e
    reduced = dtype != torch.float32
    tolerance = PROBE_TOLERANCE["bfloat16" if reduced else _device(model).type]
    if not worst <= tolerance:
        _set_attention(model, before)
        raise BackendConfigError(
            f"{wanted}, but logits of {name} differ by {worst:.1e} between a tree "
            f"and its rows (at most {tolerance:g}): it does not attend by the tree, or "
            f"mixes tokens by other means; {remedy}"
        )


def is_enabled(model: Any) -> bool:
    """Return whether `enable` was called on the model."""
    return bool(model.config.get_text_config()._attn_implementation == TREE_ATTENTION)


def _has_tower(model: Any) -> bool:
    return "vision_config" in model.config.sub_configs


def _set_attention(model: Any, name: str) -> None:
    """Set the decoder's attention alone: a vision tower attends without a tree, in kernels that die
    of one."""
    model.set_attn_implementation({"text_config": name} if _has_tower(model) else name)


@torch.no_grad()
def _probe(model: Any, dtype: torch.dtype) -> float:
    """Largest difference of logits between a small tree and its rows, over their largest size."""
    weights = {name: p.to(dtype) for name, p in model.named_parameters() if p.is_floating_point()}
    device = _device(model)
    vocab = model.get_input_embeddings().num_embeddings
    draw = np.random.default_rng(0)
    stem, *leaves = (draw.integers(0, vocab, n).astype(np.int32) for n in (9, 5, 4, 6, 3))
    fork = np.concatenate([stem, leaves[0]])
    rows = [np.concatenate([fork, leaf]) for leaf in leaves[1:3]]
    rows.append(np.concatenate([stem, leaves[3]]))
    # Two pictures of one size: their ids are the same, what the decoder gets is not.
    pictures = [np.concatenate([stem, np.full(4, i), leaves[1]]) for i in (-1, -2)]
    table: Tensor | None = None
    if _has_tower(model):
        rows += pictures
        embeds = model.get_input_embeddings().weight.detach().to(dtype)
        drawn = torch.randn(2, embeds.shape[1], generator=torch.Generator().manual_seed(0))
        table = torch.cat([embeds, (drawn * embeds.float().std().cpu()).to(embeds)])
    tree = pack(rows, min_shared=1)

    def logits(ids: npt.NDArray[Any], **kwargs: Any) -> Tensor:
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(device)
        own = {"input_ids": tokens} if table is None else {"inputs_embeds": table[tokens]}
        kwargs |= {**own, "use_cache": False}
        found: Tensor = functional_call(model, weights, kwargs=kwargs).logits[0]
        return found.float()

    position_ids = torch.from_numpy(tree.position_ids)[None].to(device)
    together = logits(tree.ids, position_ids=position_ids, tree=tree)
    worst = torch.zeros(())
    for row, where in zip(rows, tree.where, strict=True):
        alone = logits(row)
        size = alone.abs().max().clamp_min(1e-6)
        difference = (together[where] - alone).abs().max() / size
        worst = torch.maximum(worst, difference.cpu())
    return float(worst)


def _device(model: Any) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns of what `enable` raises."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
