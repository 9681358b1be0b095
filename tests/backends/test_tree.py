"""Prefix-tree packing and its attention against rows on their own and a dense mask."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stepwell.backends.base import TokenBatch
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.rows import RowForm, build_rows, computed_tokens, micro_batches
from stepwell.backends.torch.model import forward, prepare
from stepwell.backends.torch.tree import Node, Tree, _TreeAttention, enable, is_enabled, pack
from stepwell.datapool.types import Step, TokenIds
from tests.backends.models import SMALL, SMALL_GPT2, VOCAB, plain_forward

FORM = SMALL | {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
EXPERTS |= {"topk_group": 1, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 8, "num_key_value_heads": 4}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "qwen3": Qwen3Config(**FORM, head_dim=8, initializer_range=0.2),
    "llama": LlamaConfig(**FORM, initializer_range=0.2),
    "qwen3-moe": Qwen3MoeConfig(
        **FORM, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt2": GPT2Config(
        **SMALL_GPT2, vocab_size=VOCAB, bos_token_id=1, eos_token_id=1, initializer_range=0.2,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    # A copy: `enable` writes the attention it sets into the config.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()


def branching(seed: int) -> list[Step]:
    """Two groups whose trajectories go on, branch, repeat each other or rewrite their history."""
    draw = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return draw.integers(0, VOCAB, draw.integers(low, high)).tolist()

    steps = []
    system = tokens(9, 14)
    for g in range(2):
        prompt = system + tokens(8, 14)
        said = tokens(1, 9)
        for r in range(3):
            contexts = [prompt]
            for i in range(draw.integers(1, 4)):
                context = contexts[draw.integers(max(0, len(contexts) - 2), len(contexts))]
                if draw.random() < 0.2:
                    place = draw.integers(0, len(context))
                    context = [
                        *context[:place],
                        (context[place] + 1) % VOCAB,
                        *context[place + 1 :],
                    ]
                # Rollouts of a group now and then say the same: shared tokens that are trained.
                response = said if draw.random() < 0.4 else tokens(1, 9)
                steps.append(
                    Step(
                        prompt_ids=context,
                        response_ids=response,
                        trajectory_uid=f"g{g}r{r}",
                        prompt_uid=f"g{g}",
                        step_index=i,
                        metadata={"sampling_params": {"temperature": float(draw.choice([0.7, 1]))}},
                    )
                )
                contexts.append(context + response + tokens(0, 12))
    return steps


def trained(
    policy: Any, steps: list[Step], form: RowForm, budget: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log π and entropy of every response token, and the gradient of a weighted sum of both."""
    batch = TokenBatch.of(steps)
    weights = torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(1))
    log_probs, entropies = torch.empty(batch.n_tokens), torch.empty(batch.n_tokens)
    policy.zero_grad()
    for rows in micro_batches(build_rows(steps, form), budget, form):
        got, h, tokens = forward(policy, batch, rows, device=torch.device("cpu"), entropy=True)
        assert h is not None
        (((got + 0.3 * h) * weights[tokens]).sum() / batch.n_tokens).backward()  # type: ignore[no-untyped-call]
        log_probs[tokens], entropies[tokens] = got.detach(), h.detach()
    return log_probs, entropies, [p.grad.clone() for p in policy.parameters()]


def plain(policy: Any, steps: list[Step]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same, one step at a time and without any code of ours."""
    n = sum(len(s.response_ids) for s in steps)
    weights = torch.randn(n, generator=torch.Generator().manual_seed(1))
    policy.zero_grad()
    got, h = plain_forward(policy, steps)
    (((got + 0.3 * h) * weights).sum() / n).backward()
    return got.detach(), h.detach(), [p.grad.clone() for p in policy.parameters()]


# --- rows end to end


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3-moe", "gpt2"])
def test_packed_rows_score_and_train_as_rows_on_their_own(name: str) -> None:
    policy = model(FAMILIES[name])
    steps = branching(5)
    expected = plain(policy, steps)
    enable(policy)
    batch = TokenBatch.of(steps)
    weights = torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(1))
    policy.zero_grad()
    cpu, n = torch.device("cpu"), 0
    for rows in micro_batches(build_rows(steps, "merged"), 150, "packed"):
        inputs = prepare(batch, rows, cpu, as_tree=True, share=False)
        assert inputs.ids.shape == (1, computed_tokens(rows, "packed"))
        got, h, at = forward(policy, batch, rows, device=cpu, entropy=True, share=False)
        assert h is not None
        torch.testing.assert_close(got, expected[0][at], atol=1e-5, rtol=1e-4)
        (((got + 0.3 * h) * weights[at]).sum() / batch.n_tokens).backward()  # type: ignore[no-untyped-call]
        n += len(at)
    assert n == batch.n_tokens
    grads = [p.grad for p in policy.parameters()]
    torch.testing.assert_close(grads, expected[2], atol=1e-5, rtol=1e-3)


def test_the_edges_of_packed_rows_are_where_they_lie() -> None:
    rows = [np.array(ids, dtype=np.int32) for ids in ([7, 2, 3], [5], [7, 2])]
    packed = pack(rows, share=False)
    assert packed.ids.tolist() == [5, 7, 2, 7, 2, 3]
    assert packed.position_ids.tolist() == [0, 0, 1, 0, 1, 2]
    assert packed.edges(torch.device("cpu")).tolist() == [0, 1, 3, 6]
    assert [w.tolist() for w in packed.where] == [[3, 4, 5], [0], [1, 2]]


# --- FlexAttention's mask


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), share=st.booleans())
def test_the_block_mask_is_the_one_that_every_token_would_give(seed: int, share: bool) -> None:
    draw = np.random.default_rng(seed)
    stem = draw.integers(0, 9, draw.integers(1, 300)).astype(np.int32)
    rows = [
        np.concatenate([stem[: draw.integers(1, len(stem) + 1)], draw.integers(0, 9, n)])
        for n in draw.integers(1, 300, draw.integers(1, 5))
    ]
    tree = pack([row.astype(np.int32) for row in rows], min_shared=1, share=share)
    n, reach = tree.n_tokens, tree.reach()

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < reach[k])

    got = tree.block_mask(torch.device("cpu"))
    expected = create_block_mask(sees, None, None, n, n, device="cpu")
    assert torch.equal(got.to_dense(), expected.to_dense())
    assert torch.equal(got.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(got.kv_num_blocks, expected.kv_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_by_that_mask_is_the_attention_of_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    stem = np.arange(150, dtype=np.int32)
    rows = [np.concatenate([stem, np.full(k, k, np.int32)]) for k in (60, 130, 7)]
    tree = pack(rows)
    q, k, v = (torch.randn(1, heads, tree.n_tokens, 16, generator=g) for heads in (4, 2, 2))
    expected = _TreeAttention.apply(q, k, v, tree.nodes, None)  # type: ignore[no-untyped-call]
    mask = tree.block_mask(torch.device("cpu"))
    got = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


# --- the packing


def test_what_rows_begin_with_is_laid_out_once() -> None:
    rows = [np.array(ids, dtype=np.int32) for ids in ([7, 1], [7, 2, 3], [7, 2, 4])]
    packed = pack(rows, min_shared=1)
    assert packed.ids.tolist() == [7, 1, 2, 3, 4]
    assert packed.position_ids.tolist() == [0, 1, 1, 2, 2]
    assert [w.tolist() for w in packed.where] == [[0, 1], [0, 2, 3], [0, 2, 4]]
    assert packed.nodes == (Node(0, 1, 5), Node(1, 2, 2), Node(2, 3, 5), Node(3, 4, 4),
                                 Node(4, 5, 5))  # fmt: skip


def test_a_chance_agreement_of_few_tokens_makes_no_node() -> None:
    rows = [np.array(ids, dtype=np.int32) for ids in ([7, 8, 1], [7, 8, 2])]
    assert len(pack(rows, min_shared=3).nodes) == 2
    assert len(pack(rows, min_shared=2).nodes) == 3


@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=9).map(
            lambda ids: np.array(ids, dtype=np.int32)
        ),
        min_size=1,
        max_size=8,
    ),
    min_shared=st.integers(1, 4),
)
def test_a_token_sees_exactly_what_came_before_it_in_its_row(
    rows: list[TokenIds], min_shared: int
) -> None:
    packed = pack(rows, min_shared)
    n = len(packed.ids)
    reach = packed.reach()
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    sees = (k <= q) & (q < reach[None, :])
    for row, where in zip(rows, packed.where, strict=True):
        assert packed.ids[where].tolist() == row.tolist()
        assert packed.position_ids[where].tolist() == list(range(len(row)))
        for depth, place in enumerate(where):
            assert sees[place].nonzero().flatten().tolist() == sorted(where[: depth + 1])
    if min_shared == 1:
        prefixes = {tuple(row[:i]) for row in rows for i in range(1, len(row) + 1)}
        assert n == len(prefixes)


# --- the attention


def dense(q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float) -> Tensor:
    """Attention by a mask over all pairs."""
    n = tree.n_tokens
    i = torch.arange(n)
    sees = (i[None, :] <= i[:, None]) & (i[:, None] < tree.reach()[None, :])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)
    return scores.softmax(-1) @ v


def assert_attends_densely(tree: Tree, heads: tuple[int, int], seed: int) -> None:
    """Output and gradients are those of the mask over all pairs."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, h, tree.n_tokens, 8, generator=g, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    )
    grad = torch.randn(q.shape, generator=g)
    out = _TreeAttention.apply(q, k, v, tree.nodes, 0.3)  # type: ignore[no-untyped-call]
    expected = dense(q, k, v, tree, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


# Each example runs a model.
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_attention_by_nodes_is_attention_by_a_dense_mask(seed: int, heads: tuple[int, int]) -> None:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, draw.integers(1, 40)).astype(np.int32) for _ in range(6)]
    tree = pack(rows, min_shared=1)
    assert_attends_densely(tree, heads, seed)


def test_long_nodes_are_cut_and_attend_alike() -> None:
    draw = np.random.default_rng(1)
    stem = draw.integers(0, 9, 300)
    rows = [np.concatenate([stem, draw.integers(0, 9, n)]).astype(np.int32) for n in (520, 30)]
    tree = pack(rows)
    assert [node.end - node.start for node in tree.nodes].count(150) == 2  # the stem
    assert len(tree.nodes) == 2 + 3 + 1
    assert tree.n_tokens == 850
    assert_attends_densely(tree, (2, 1), 0)


def test_flex_attention_is_given_the_same_mask() -> None:
    """The GPU's form. Its kernel is PyTorch's; what is ours is which blocks it sees."""
    draw = np.random.default_rng(3)
    stem = draw.integers(0, 9, 150)
    rows = [np.concatenate([stem, draw.integers(0, 9, n)]).astype(np.int32) for n in (90, 140)]
    tree = pack(rows)
    mask = tree.block_mask(torch.device("cpu"))
    assert tree.block_mask(torch.device("cpu")) is mask
    n = tree.n_tokens
    i = torch.arange(n)
    sees = mask.mask_mod(0, 0, i[:, None], i[None, :])
    assert torch.equal(sees, (i[None, :] <= i[:, None]) & (i[:, None] < tree.reach()[None, :]))
    blocks = torch.zeros(3, 3)
    for q in range(0, n, 128):
        for k in range(0, n, 128):
            blocks[q // 128, k // 128] = float(sees[q : q + 128, k : k + 128].any())
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.bool())


# --- the model


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_gradient_are_those_of_plain_rows(family: str) -> None:
    policy = model(FAMILIES[family])
    steps = branching(7)
    expected = plain(policy, steps)
    enable(policy)
    for budget in (10_000, 60, 1):
        got = trained(policy, steps, "tree", budget)
        torch.testing.assert_close(got[:2], expected[:2], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got[2], expected[2], atol=1e-5, rtol=1e-4)


# Each example runs a model.
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 400))
def test_every_form_and_split_has_the_gradient_of_one_row_per_step(seed: int, budget: int) -> None:
    steps = branching(seed)
    expected = plain(model(FAMILIES["qwen3"]), steps)
    forms: tuple[RowForm, ...] = ("step", "merged", "tree")
    for form in forms:
        policy = model(FAMILIES["qwen3"])
        if form == "tree":
            enable(policy)
        got = trained(policy, steps, form, budget)
        torch.testing.assert_close(got[:2], expected[:2], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got[2], expected[2], atol=1e-5, rtol=1e-4)


def test_a_response_token_that_two_rollouts_share_is_computed_once_and_trained_twice() -> None:
    prompt, reply = list(range(10)), list(range(10, 20))
    steps = [
        Step(
            prompt_ids=prompt,
            response_ids=reply,
            trajectory_uid=f"r{i}",
            prompt_uid="p",
            step_index=0,
        )
        for i in range(2)
    ]
    rows = build_rows(steps, "tree")
    inputs = prepare(TokenBatch.of(steps), rows, torch.device("cpu"), as_tree=True)
    assert inputs.ids.shape == (1, 19)
    assert inputs.positions.tolist() == [*range(9, 19)] * 2
    assert inputs.tokens.tolist() == [*range(20)]
    policy = model(FAMILIES["qwen3"])
    expected = plain(policy, steps)
    enable(policy)
    torch.testing.assert_close(trained(policy, steps, "tree", 1000), expected, atol=1e-5, rtol=1e-4)


def test_under_gradient_checkpointing_the_gradient_is_the_same() -> None:
    policy = model(FAMILIES["qwen3"])
    steps = branching(3)
    expected = plain(policy, steps)
    enable(policy)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()  # it has no dropout
    got = trained(policy, steps, "tree", 10_000)
    torch.testing.assert_close(got[:2], expected[:2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[2], expected[2], atol=1e-5, rtol=1e-4)


def test_a_model_with_tree_attention_still_runs_without_a_tree() -> None:
    policy = model(FAMILIES["llama"])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = policy(input_ids=ids).logits
        enable(policy)
        assert is_enabled(policy)
        torch.testing.assert_close(policy(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Gemma2Config(**FORM, head_dim=8),
            "asks for attention with sliding_window.*set backend.rows to 'merged'",
        ),
        (
            DeepseekV3Config(**FORM | EXPERTS | LATENT),
            "asks for attention with values of another width.*set backend.rows to 'merged'",
        ),
        (
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
            "does not attend through transformers' AttentionInterface",
        ),
        (
            MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8),
            "logits of MambaForCausalLM differ by .* mixes tokens by other means",
        ),
    ],
    ids=["sliding-window", "latent", "own-attention", "recurrence"],
)
def test_a_model_that_cannot_attend_by_tree_is_refused_and_left_as_it_was(
    config: Any, reason: str
) -> None:
    policy = model(config)
    before = policy.config._attn_implementation
    with pytest.raises(BackendConfigError, match=reason) as e:
        enable(policy)
    assert "\n" not in str(e.value)
    assert policy.config._attn_implementation == before


class OwnArguments(LlamaForCausalLM):
    """A model that came with its code, which passes nothing on."""

    def forward(  # type: ignore[override]  # that is what is tried
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache)


def test_a_model_that_fails_at_a_tree_is_refused_by_name_and_left_as_it_was() -> None:
    policy = OwnArguments(copy.deepcopy(FAMILIES["llama"])).eval()
    before = policy.config._attn_implementation
    wanted = r"OwnArguments does not take \(TypeError: .*'tree'\); set backend.rows to 'merged'"
    with pytest.raises(BackendConfigError, match=wanted):
        enable(policy)
    assert policy.config._attn_implementation == before
