"""From logits to tokens and log-probs, for a batch of rows with different parameters.

Log-probs are taken after temperature and before top-k/top-p/min-p, as SGLang returns them: they
are the policy that a trainer can recompute. Pure; holds no state but the generator it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepwell.backends.engines.embedded.request import Request, SamplingParams, TopLogProbs


@dataclass(slots=True)
class Sampled:
    """One token per row."""

    ids: list[int]
    log_probs: list[float]
    top: list[TopLogProbs]
    """The `top_logprobs_num` most likely tokens of each row; empty lists where none were asked."""


def sample(logits: Tensor, requests: Sequence[Request], generator: torch.Generator) -> Sampled:
    """Sample one token per row. `logits`: float32 [rows, vocab], overwritten."""
    device = logits.device
    # Not infinite in float32: what has no probability would be NaN.
    hottest = torch.finfo(torch.float32).max
    temperatures = torch.tensor(
        [min(r.params.temperature, hottest) for r in requests], device=device
    )
    log_probs = torch.log_softmax(logits.div_(temperatures[:, None]), dim=-1)
    probs = log_probs.exp()
    filtered = [i for i, r in enumerate(requests) if r.params.filtered and not r.params.greedy]
    if filtered:
        probs[filtered] = _filter(probs[filtered], [requests[i].params for i in filtered])
    uniform = torch.rand(len(requests), generator=generator, dtype=torch.float64)
    for i, request in enumerate(requests):
        if (seed := request.params.sampling_seed) is not None:
            uniform[i] = _seeded(seed, request.length)
    ids = _draw(probs, uniform.to(device))
    greedy = [i for i, r in enumerate(requests) if r.params.greedy]
    if greedy:
        ids[greedy] = log_probs[greedy].argmax(dim=-1)
    chosen = log_probs.gather(1, ids[:, None])[:, 0]
    n_top = max(r.top_logprobs_num for r in requests)
    top: list[TopLogProbs] = [[] for _ in requests]
    if n_top:
        rows = [i for i, r in enumerate(requests) if r.top_logprobs_num]
        for i, best in zip(rows, top_log_probs(log_probs[rows], n_top), strict=True):
            top[i] = best[: requests[i].top_logprobs_num]
    return Sampled(ids.tolist(), chosen.tolist(), top)


def _seeded(seed: int, position: int) -> float:
    """A number in [0, 1) that follows from these two, as in SGLang: a response that goes on in
    another request, behind what it has, draws none of its numbers again."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def top_log_probs(log_probs: Tensor, n: int) -> list[TopLogProbs]:
    """The `n` most likely `(log-prob, id)` of each row, best first."""
    values, ids = log_probs.topk(min(n, log_probs.shape[-1]), dim=-1)
    pairs = zip(values.tolist(), ids.tolist(), strict=True)
    return [list(zip(v, i, strict=True)) for v, i in pairs]


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling. float64: in float32 the tail of a large vocabulary is lost."""
    cdf = probs.to(torch.float64).cumsum(dim=-1)
    total = cdf[:, -1:].contiguous()
    ids = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    # u * total may round up to total; the first index that reaches it has a positive probability.
    return torch.minimum(ids, torch.searchsorted(cdf, total))[:, 0]


def _filter(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what top-k, top-p and min-p exclude, in SGLang's order: one sort serves all three."""
    ordered, index = probs.sort(dim=-1, descending=True)
    vocab = probs.shape[-1]
    k = torch.tensor(
        [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], device=probs.device
    )
    top_p = torch.tensor([p.top_p for p in params], device=probs.device)
    min_p = torch.tensor([p.min_p for p in params], device=probs.device)
    before = ordered.cumsum(dim=-1) - ordered
    drop = torch.arange(vocab, device=probs.device)[None] >= k[:, None]
    drop |= before > top_p[:, None]
    drop |= ordered < min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(probs).scatter_(1, index, ordered.masked_fill(drop, 0.0))
