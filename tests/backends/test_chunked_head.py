"""The chunked LM head: same scores and gradients, and no tensor as large as all the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    OPTConfig,
    Qwen3Config,
)

from stepwell.backends.torch.chunked_head import chunk_tokens, chunked
from stepwell.backends.torch.model import only_positions, score
from tests.backends.models import SMALL, SMALL_GPT2

VOCAB = 97
FORM = SMALL | {"vocab_size": VOCAB, "initializer_range": 0.3, "attn_implementation": "eager"}
FAMILIES = {
    "qwen3": Qwen3Config(**FORM, head_dim=8, tie_word_embeddings=True),
    "gemma2-soft-cap": Gemma2Config(**FORM, head_dim=8, final_logit_softcapping=2.0),
    "granite-logits-scaling": GraniteConfig(**FORM, logits_scaling=3.0),
    "cohere-logit-scale": CohereConfig(**FORM, logit_scale=0.3, eos_token_id=1, bos_token_id=1),
    "gpt2": GPT2Config(**SMALL_GPT2, vocab_size=VOCAB),
    "opt": OPTConfig(**FORM, word_embed_proj_dim=32, ffn_dim=48),
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


class Problem:
    """Two rows of 30 tokens, 41 of whose positions are scored."""

    def __init__(self, entropy: bool = True) -> None:
        g = torch.Generator().manual_seed(3)
        self.kwargs = {"input_ids": torch.randint(VOCAB, (2, 30), generator=g), "use_cache": False}
        self.positions = torch.randperm(60, generator=g)[:41].sort().values
        self.targets = torch.randint(VOCAB, (41,), generator=g)
        self.temperature = 0.5 + torch.rand(41, generator=g)
        self.weights = torch.randn(2, 41, generator=g)
        self.entropy = entropy

    def score(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        return score(logits, self.targets[part], self.temperature[part], entropy=self.entropy)

    def whole(self, model: Any) -> tuple[Tensor, Tensor | None]:
        with only_positions(model, self.positions):
            logits = model(**self.kwargs).logits[0]
        return self.score(logits, slice(None))

    def in_chunks(self, model: Any, chunk: int) -> tuple[Tensor, Tensor | None]:
        return chunked(model, self.kwargs, self.positions, self.score, chunk=chunk)

    def backward(self, model: Any, scored: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        model.zero_grad()
        loss = (self.weights[0] * scored[0]).sum()
        if scored[1] is not None:
            loss = loss + (self.weights[1] * scored[1]).sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]


class LargestTensor(TorchDispatchMode):
    """Watches every tensor that any operation makes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("chunk", [1, 10, 41, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_scores_and_gradients_of_the_whole(family: str, chunk: int) -> None:
    model, problem = build(FAMILIES[family]), Problem()
    expected = problem.whole(model)
    expected_grads = problem.backward(model, expected)
    got = problem.in_chunks(model, chunk)
    for a, b in zip(got, expected, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for a, b in zip(problem.backward(model, got), expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_without_entropy_none_is_computed() -> None:
    log_probs, entropy = Problem(entropy=False).in_chunks(build(FAMILIES["qwen3"]), 10)
    assert log_probs.shape == (41,)
    assert entropy is None


def test_the_model_is_itself_again_afterwards() -> None:
    model, problem = build(FAMILIES["qwen3"]), Problem()
    before = problem.whole(model)[0]
    problem.backward(model, problem.in_chunks(model, 7))
    assert torch.equal(problem.whole(model)[0], before)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "scoring"])
def test_the_logits_of_all_positions_never_exist_at_once(grad: bool) -> None:
    # A vocabulary so large that logits dwarf everything else but the embedding matrix.
    config = Qwen3Config(**{**SMALL, "vocab_size": 4096, "hidden_size": 8}, head_dim=8)
    model, problem = build(config), Problem()

    def largest(run: Any) -> int:
        with torch.set_grad_enabled(grad), LargestTensor() as watch:
            scored = run(model)
            if grad:
                problem.backward(model, scored)
        return watch.numel

    weights = max(p.numel() for p in model.parameters())
    assert largest(problem.whole) == 41 * 4096
    assert largest(lambda m: problem.in_chunks(m, 10)) == max(10 * 4096, weights)


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    config = Qwen3Config(**{**SMALL, "vocab_size": 4096, "hidden_size": 8}, head_dim=8)
    model, problem = build(config), Problem()

    def kept(run: Any) -> int:
        sizes: list[int] = []
        weights = {p.data_ptr() for p in model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run(model)
        return sum(sizes)

    # What is left is the decoder's.
    assert kept(problem.whole) - kept(lambda m: problem.in_chunks(m, 10)) > 41 * 4096


def test_a_chunk_is_as_many_tokens_as_fit_the_limit_and_never_none() -> None:
    assert chunk_tokens(256, vocab=151_936) == 421
    assert chunk_tokens(1, vocab=1_000_000) == 1
