"""Rows and their micro-batches, for every form: what is trained, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.backends.rows import (
    RowForm,
    TokenRow,
    build_rows,
    common_prefix,
    computed_tokens,
    in_tree_order,
    micro_batches,
    select,
)
from stepwell.datapool.types import Step
from tests.builders import step

FORMS: tuple[RowForm, ...] = ("step", "merged", "tree")


def steps_of_group(
    rollouts: int = 4, turns: int = 3, prompt: int = 20, seed: int = 0
) -> list[Step]:
    """Trajectories of one prompt; each turn adds 4 response tokens and 3 of an environment."""
    draw = np.random.default_rng(seed)
    first = draw.integers(0, 50, prompt).tolist()
    steps = []
    for r in range(rollouts):
        context = first
        for t in range(turns):
            response = draw.integers(0, 50, 4).tolist()
            parent = t - 1 if t else None
            steps.append(step(context, response, f"r{r}", t, parent_index=parent))
            context = context + response + draw.integers(0, 50, 3).tolist()
    return steps


def trained(rows: list[TokenRow], steps: list[Step]) -> dict[int, list[int]]:
    """Step -> its prompt and response, as the rows have them."""
    return {i: row.ids[: steps[i].n_tokens].tolist() for row in rows for i in row.steps}


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1000), budget=st.integers(1, 200))
def test_every_step_is_trained_once_on_its_own_history_whatever_the_budget(
    form: RowForm, seed: int, budget: int
) -> None:
    steps = steps_of_group(seed=seed) + steps_of_group(rollouts=2, seed=seed + 1)
    steps = [step(s.prompt_ids.tolist(), s.response_ids.tolist(), f"{i // 3}", i % 3,
                  parent_index=s.parent_index) for i, s in enumerate(steps)]  # fmt: skip
    batches = list(micro_batches(build_rows(steps, form), budget, form))
    rows = [row for batch in batches for row in batch]
    assert sum(len(row.steps) for row in rows) == len(steps)
    assert trained(rows, steps) == {i: s.token_ids.tolist() for i, s in enumerate(steps)}
    for batch in batches:
        assert len(batch) == 1 or computed_tokens(batch, form) <= budget


@given(seed=st.integers(0, 1000), budget=st.integers(1, 200))
def test_packed_rows_fill_the_budget_without_padding(seed: int, budget: int) -> None:
    rows = build_rows(steps_of_group(seed=seed), "merged")
    batches = list(micro_batches(rows, budget, "packed"))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))
    sizes = [sum(row.n_inputs for row in batch) for batch in batches]
    assert sizes == [computed_tokens(batch, "packed") for batch in batches]
    assert all(len(b) == 1 or size <= budget for b, size in zip(batches, sizes, strict=True))
    assert len(batches) <= len(list(micro_batches(rows, budget, "merged")))


def test_the_forms_compute_fewer_and_fewer_tokens() -> None:
    steps = steps_of_group()
    computed = {form: computed_tokens(build_rows(steps, form), form) for form in FORMS}
    # 3 steps of 24, 31 and 38 tokens, 4 rollouts; the last token of a row is not fed.
    assert computed == {"step": 12 * 37, "merged": 4 * 37, "tree": 20 + 4 * 17}


def test_a_group_that_fits_is_one_micro_batch_with_its_prompt_once() -> None:
    rows = build_rows(steps_of_group(), "tree")
    (batch,) = micro_batches(rows, 20 + 4 * 17, "tree")
    assert len(batch) == 4
    two = list(micro_batches(rows, 20 + 4 * 17 - 1, "tree"))
    assert [computed_tokens(b, "tree") for b in two] in ([71, 37], [54, 54], [37, 71])


def test_a_full_micro_batch_is_cut_between_groups_rather_than_within_one() -> None:
    steps = [
        step(s.prompt_ids.tolist(), s.response_ids.tolist(), f"{g}-{s.trajectory_uid}")
        for g in range(3)
        for s in steps_of_group(turns=1, seed=g)
    ]
    rows = build_rows(steps, "tree")
    whole = 20 + 4 * 3
    # Room for one group and half of the next: the half would pay for its prompt twice.
    batches = list(micro_batches(rows, whole * 3 // 2 + 4, "tree"))
    groups_in = [{i // 4 for row in b for i in row.steps} for b in batches]
    assert sorted(map(len, groups_in)) == [1, 1, 1]


def test_a_rewritten_history_falls_back_to_a_row_of_its_own() -> None:
    kept = step([1, 2, 3], [4, 5])
    extended = step([1, 2, 3, 4, 5, 6], [7], index=1, parent_index=0)
    rewritten = step([1, 2, 3, 4, 9, 6], [7], index=1, parent_index=0)
    for form in ("merged", "tree"):
        assert len(build_rows([kept, extended], form)) == 1  # type: ignore[arg-type]
        assert len(build_rows([kept, rewritten], form)) == 2  # type: ignore[arg-type]
    # The tree shares what was not rewritten, and nothing behind it.
    assert computed_tokens(build_rows([kept, rewritten], "tree"), "tree") == 4 + 2


@pytest.mark.parametrize("form", FORMS)
def test_selected_steps_bring_their_rows_and_nothing_behind_them(form: RowForm) -> None:
    steps = steps_of_group()
    rows = select(build_rows(steps, form), steps, {0, 4})
    assert set(trained(rows, steps)) == {0, 4}
    assert sorted(len(row.ids) for row in rows) == [24, 31]


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), min_size=2, max_size=12))
def test_tree_order_puts_the_longest_common_prefix_next_to_each(lists: list[list[int]]) -> None:
    sequences = [np.array(ids, dtype=np.int32) for ids in lists]
    order = in_tree_order(sequences)
    assert [lists[i] for i in order] == sorted(lists)
    for place, i in enumerate(order):
        best = max(common_prefix(sequences[i], s) for j, s in enumerate(sequences) if j != i)
        beside = [order[p] for p in (place - 1, place + 1) if 0 <= p < len(order)]
        assert max(common_prefix(sequences[i], sequences[j]) for j in beside) == best
