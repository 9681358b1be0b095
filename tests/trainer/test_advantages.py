"""Advantages: verl's values, closed forms, and what holds for every group."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from stepwell.datapool.types import GREEDY, Group, Step, Trajectory
from stepwell.trainer.algorithms.advantages.base import (
    GREEDY_REWARD,
    Array,
    Batch,
    Returns,
    baselined,
    to_go,
    whiten,
)
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.advantages.gae import gae
from stepwell.trainer.algorithms.advantages.greedy import remax
from stepwell.trainer.algorithms.advantages.group import dr_grpo, gpg, grpo, opo, rloo
from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.algorithms.registry import ESTIMATORS as REGISTRY
from stepwell.trainer.config import AdvantageConfig, AlgorithmConfig
from stepwell.trainer.errors import ColumnError, RewardError
from stepwell.trainer.scoring import EXTRA
from tests.builders import step
from tests.trainer.golden.advantages import (
    GAMMA,
    KINDS,
    LAM,
    PART_WEIGHTS,
    RECORDED,
    Case,
    moved,
    random_case,
    verl_results,
)

rewards = st.lists(st.floats(-10, 10).map(lambda r: round(r, 3)), min_size=2, max_size=12)
GROUP_BASELINES = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo")
NAMES = tuple(n for n in REGISTRY.names.built_in if n != "reinforce_running")
ESTIMATORS = tuple(n for n in NAMES if n != "gae")
"""Estimators that verl has too (`NAMES`), and those of them that need no critic."""


def batch_of(returns: Array, tokens: Array, rewards: Array | None = None) -> Batch:
    """Each value a trajectory of one unit, all of one group."""
    n = np.arange(len(returns))
    rewards = returns if rewards is None else rewards
    return Batch(rewards, returns, tokens, trajectory=n, group=np.zeros_like(n))


def within_group(name: str, rewards: Sequence[float]) -> Array:
    values = np.array(rewards)
    config = AdvantageConfig(adv_estimator=name)
    batch = batch_of(values, np.ones(len(values)))
    return config.estimator.estimate(batch, config.adv_options).advantages


def trajectory(
    uid: str,
    *step_rewards: float | None,
    prompt_uid: str = "p",
    tokens: Sequence[int] | None = None,
    **metadata: Any,
) -> Trajectory:
    steps = tuple(
        step(
            [1], [2] * (1 if tokens is None else tokens[i]), uid, i, prompt_uid=prompt_uid, reward=r
        )
        for i, r in enumerate(step_rewards)
    )
    return Trajectory(uid, prompt_uid, steps, metadata)


def advantages(groups: Sequence[Group], name: str, **options: Any) -> list[float]:
    config = AdvantageConfig.model_validate({"adv_estimator": name, **options})
    values = torch.zeros(sum(len(s.response_ids) for g in groups for s in g.steps))
    result = compute_advantages(groups, config, values=values if name == "gae" else None)
    return [float(a) for a in result.columns["advantages"]]


# --- verl -----------------------------------------------------------------------------------------

PARTS = {"reward_keys": list(PART_WEIGHTS), "reward_weights": list(PART_WEIGHTS.values())}
LOST_BY_VERL = ("reinforce_plus_plus", "remax", "gae")
"""verl drops a reward on a masked token here; a step's reward is never dropped by us."""
AGREEING = dict.fromkeys(KINDS, NAMES) | {"tool": tuple(n for n in NAMES if n not in LOST_BY_VERL)}


def recorded() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(RECORDED.read_text())
    assert [e["case"]["kind"] for e in entries] == list(KINDS)
    return entries


def test_every_estimator_agrees_with_the_values_recorded_from_verl() -> None:
    for entry in recorded():
        assert_agrees(entry["case"], entry["verl"], AGREEING[entry["case"]["kind"]])


def test_a_reward_that_verl_loses_on_a_tools_token_is_earned_by_the_step_before() -> None:
    (entry,) = (e for e in recorded() if e["case"]["kind"] == "tool")
    assert_agrees(entry["case"], entry["verl_moved"], NAMES)
    for name in LOST_BY_VERL:
        with pytest.raises(AssertionError, match="Mismatched elements"):
            assert_agrees(entry["case"], entry["verl"], [name])


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the [verl] extra")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 110))
def test_every_estimator_agrees_with_verl_run_live(kind: str, seed: int) -> None:
    case = random_case(kind, seed)
    assert_agrees(case, verl_results(case), AGREEING[kind])
    assert_agrees(case, verl_results(moved(case)), NAMES)


def assert_agrees(
    case: Case, found_by_verl: dict[str, list[list[float]]], names: Sequence[str]
) -> None:
    groups, rows, at = as_groups(case)
    inner = np.array(case["mask"], bool)
    dense = case["kind"] == "dense"

    def in_rows(column: Tensor) -> np.ndarray:
        out = np.zeros(inner.shape)
        out[rows, at] = column.double().numpy()
        return out

    values = torch.tensor(case["values"])[rows, at]
    token_rewards = torch.tensor(case["rewards"])[rows, at] if dense else None
    for name in names:
        # verl discounts tokens and sums process rewards to go in these three.
        config = AdvantageConfig.model_validate(
            {"adv_estimator": name}
            | ({"credit": "token"} if name in LOST_BY_VERL else {})
            | ({"gamma": GAMMA} if name in ("gae", "reinforce_plus_plus") else {})
            | ({"lam": LAM} if name == "gae" else {})
            | ({"adv_options": PARTS} if name == "gdpo" else {})
        )
        ours = compute_advantages(groups, config, token_rewards=token_rewards, values=values)
        wanted = np.array(found_by_verl[name])
        np.testing.assert_allclose(
            in_rows(ours.columns["advantages"]), wanted, rtol=1e-6, atol=1e-6, err_msg=name
        )
        if "returns" in ours.columns:
            np.testing.assert_allclose(
                in_rows(ours.columns["returns"]),
                np.array(found_by_verl["gae_returns"]),
                rtol=1e-6,
                atol=1e-6,
            )


def as_groups(case: Case) -> tuple[list[Group], np.ndarray, np.ndarray]:
    """A case as Stepwell has it, and the (row, position) of every response token.

    A run of sampled tokens is a step; what the tool wrote after it belongs to the next prompt, and
    a reward there to the step before.
    """
    members: dict[int, list[Trajectory]] = {}
    places: dict[int, list[tuple[int, int]]] = {}
    for row, (mask, earned, g) in enumerate(
        zip(case["mask"], case["rewards"], case["group"], strict=True)
    ):
        steps: list[Step] = []
        starts = [t for t, m in enumerate(mask) if m and (t == 0 or not mask[t - 1])]
        for k, start in enumerate(starts):
            length = next(n for n in range(1, len(mask)) if not mask[start + n])
            following = starts[k + 1] if k + 1 < len(starts) else len(mask)
            steps.append(
                Step(
                    prompt_ids=[1],
                    response_ids=[2] * length,
                    # Dense rewards come as a column instead; the sum is there to be "scored".
                    reward=0.0 if case["kind"] == "dense" else sum(earned[start:following]),
                    trajectory_uid=f"row{row}",
                    prompt_uid=f"prompt{g}",
                    step_index=k,
                )
            )
            places.setdefault(g, []).extend((row, start + t) for t in range(length))
        parts = {EXTRA: {key: values[row] for key, values in case["parts"].items()}}
        members.setdefault(g, []).append(Trajectory(f"row{row}", f"prompt{g}", tuple(steps), parts))
    groups = [
        Group(f"prompt{g}", tuple(ts), metadata={GREEDY_REWARD: case["greedy"][g]})
        for g, ts in members.items()
    ]
    rows, at = np.array([place for g in members for place in places[g]]).T
    return groups, rows, at


# --- closed forms ---------------------------------------------------------------------------------


def test_grpo_divides_by_the_unbiased_std_of_the_group() -> None:
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert grpo(Returns.of([1.0, 0.0, 0.0, 1.0])) == pytest.approx([a, -a, -a, a], abs=1e-12)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert dr_grpo(Returns.of([1.0, 0.0, 0.0, 0.0])) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_pass_at_k_teaches_the_best_alone_by_its_lead() -> None:
    assert within_group("grpo_passk", [1.0, 4.0, 3.0]).tolist() == pytest.approx(
        [0.0, 1 / (math.sqrt(7 / 3) + 1e-6), 0.0]
    )
    assert not within_group("grpo_passk", [4.0, 1.0, 4.0]).any()
    group = Group("p", (trajectory("a", 1.0, 3.0), trajectory("b", 0.5)))
    plain = {"adv_options": {"norm_adv_by_std": False}}
    assert advantages([group], "grpo_passk", **plain) == [3.5, 3.5, 0.0]
    # By step the returns of "a" are 4 and 3: it counts once, by their mean.
    assert advantages([group], "grpo_passk", credit="step", **plain) == [3.0, 3.0, 0.0]


def test_gdpo_gives_each_part_of_the_reward_the_same_say() -> None:
    """One part is a hundred times the other, and both tell the first from the second."""
    parts = [{"loud": 100.0, "quiet": 0.0}, {"loud": 0.0, "quiet": 1.0}, {"loud": 0.0, "quiet": 0}]
    group = Group("p", tuple(trajectory(f"t{i}", 0.5, **{EXTRA: p}) for i, p in enumerate(parts)))
    loud, quiet, neither = advantages(
        [group], "gdpo", adv_options={"reward_keys": ["loud", "quiet"]}
    )
    assert loud == pytest.approx(quiet, abs=1e-5)
    assert neither < loud
    assert advantages([group], "gdpo") == [0.0, 0.0, 0.0], "the reward itself is the same"
    with pytest.raises(
        RewardError, match=r"'style', which is no number within ±1e\+09 in the reward of 3 of 3"
    ):
        advantages([group], "gdpo", adv_options={"reward_keys": ["style"]})
    for broken in (math.nan, math.inf, 1e300, 10**400):
        one = trajectory("t3", 0.5, **{EXTRA: {"loud": broken, "quiet": 0.0}})
        with pytest.raises(RewardError, match=r"'loud', which is no number .* of 1 of 4"):
            advantages(
                [Group("p", (*group.trajectories, one))],
                "gdpo",
                adv_options={"reward_keys": ["loud", "quiet"]},
            )
    with pytest.raises(ValidationError, match="2 numbers for 1 reward_keys"):
        AdvantageConfig.model_validate(
            {"adv_estimator": "gdpo", "adv_options": PARTS | {"reward_keys": ["loud"]}}
        )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kl": {"place": "reward"}}, "set kl.place to 'loss'"),
        ({"credit": "step"}, "leave credit at 'trajectory'"),
        ({"credit": "token", "gamma": 0.9}, "leave credit at 'trajectory'"),
    ],
)
def test_what_gdpos_parts_leave_out_is_refused(keys: dict[str, Any], said: str) -> None:
    """Parts take the place of the reward, so a penalty on it, or its discount, would be lost."""
    AlgorithmConfig.model_validate({"adv_estimator": "gdpo", **keys})
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig.model_validate({"adv_estimator": "gdpo", "adv_options": PARTS, **keys})


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    assert rloo(Returns.of([3.0, 0.0, 6.0])) == pytest.approx([0.0, -4.5, 4.5])


def test_opo_weighs_the_baseline_by_length() -> None:
    assert opo(Returns.of([1.0, 0.0], tokens=[30, 10])) == pytest.approx([0.25, -0.75])
    assert opo(Returns.of([1.0, 0.0], tokens=[30, 0])) == pytest.approx([0.0, -1.0])


def test_remax_subtracts_the_greedy_reward_even_from_a_single_rollout() -> None:
    assert remax(Returns.of([1.0, 0.0], greedy=0.75)) == pytest.approx([0.25, -0.75])
    assert remax(Returns.of([1.0], greedy=0.75)) == pytest.approx([0.25])


def test_whitening_counts_a_unit_as_often_as_it_has_tokens() -> None:
    expected = np.array([1.0, 1.0, 1.0, 0.0])
    expected = (expected - 0.75) / np.sqrt(expected.var(ddof=1) + 1e-8)
    got = whiten(np.array([1.0, 0.0]), np.array([3.0, 1.0]))
    assert got == pytest.approx(expected[[0, 3]])


@pytest.mark.parametrize("tokens", [[1.0], [3.0, 5.0]])
def test_whitening_one_token_or_equal_values_gives_zero(tokens: list[float]) -> None:
    n = len(tokens)
    assert not whiten(np.full(n, 1 / 3), np.array(tokens)).any()


def test_gpg_makes_up_for_trajectories_without_reward() -> None:
    """One in four of [1, 0, 0, 0] is not zero: α = 4."""
    found = gpg(batch_of(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4)), Options()).advantages
    assert found == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert gpg(batch_of(np.zeros(2), np.ones(2)), Options()).advantages == pytest.approx([0.0, 0.0])


def test_gae_with_lambda_one_is_the_return_minus_the_value_and_with_zero_the_td_error() -> None:
    r, v = np.array([0.0, 0.0, 1.0, 5.0]), np.array([0.5, 0.25, 2.0, 3.0])
    of = np.array([0, 0, 0, 1])  # a trajectory of three, one of one
    monte_carlo, returns = gae(r, v, of, gamma=0.5, lam=1.0)
    assert monte_carlo == pytest.approx([0.25 - 0.5, 0.5 - 0.25, 1.0 - 2.0, 5.0 - 3.0])
    assert returns == pytest.approx([0.25, 0.5, 1.0, 5.0])
    td, _ = gae(r, v, of, gamma=0.5, lam=0.0)
    assert td == pytest.approx([0.125 - 0.5, 1.0 - 0.25, 1.0 - 2.0, 5.0 - 3.0])


@given(
    units=st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=6), min_size=1, max_size=5),
    discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_returns_to_go_are_discounted_sums_within_a_trajectory(
    units: list[list[float]], discount: float
) -> None:
    of = np.repeat(np.arange(len(units)), [len(u) for u in units])
    expected = [
        sum(discount**j * x for j, x in enumerate(own[k:]))
        for own in units
        for k in range(len(own))
    ]
    assert to_go(np.concatenate(units), of, discount) == pytest.approx(expected, abs=1e-9)


# --- what holds for every group -------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_a_group_of_one_keeps_its_raw_score(name: str) -> None:
    assert advantages([Group("p", (trajectory("a", 0.25, 0.5),))], name) == [0.75, 0.75]


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    assert not within_group(name, [reward] * 7).any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rewards=rewards, shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(
    name: str, rewards: list[float], shift: float
) -> None:
    result = within_group(name, rewards)
    assert math.fsum(result) == pytest.approx(0, abs=1e-6)
    shifted = within_group(name, [r + shift for r in rewards])
    assert shifted == pytest.approx(result, abs=1e-5)


@given(rewards=rewards)
def test_grpo_ignores_the_scale_of_the_rewards(rewards: list[float]) -> None:
    scaled = grpo(Returns.of([1000 * r for r in rewards]), epsilon=0.0)
    assert scaled == pytest.approx(grpo(Returns.of(rewards), epsilon=0.0), abs=1e-6)


trajectories_of_steps = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


def group_of(trajectories: list[list[tuple[int, int]]], *, outcome: bool) -> Group:
    return Group(
        "p",
        tuple(
            trajectory(
                f"t{i}",
                *([None] * (len(steps) - 1) + [float(steps[-1][1])] if outcome else map(_r, steps)),
                tokens=[n for n, _ in steps],
            )
            for i, steps in enumerate(trajectories)
        ),
        metadata={GREEDY_REWARD: 0.5},
    )


def _r(step: tuple[int, int]) -> float:
    return float(step[1])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(trajectories=trajectories_of_steps)
def test_with_one_reward_at_the_end_every_credit_gives_the_same(
    name: str, trajectories: list[list[tuple[int, int]]]
) -> None:
    group = group_of(trajectories, outcome=True)
    whole = advantages([group], name, credit="trajectory")
    for credit in ("step", "token"):
        assert advantages([group], name, credit=credit) == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(trajectories=trajectories_of_steps)
def test_credit_by_trajectory_only_sees_the_sum_of_the_step_rewards(
    name: str, trajectories: list[list[tuple[int, int]]]
) -> None:
    summed = [
        [*((n, 0) for n, _ in steps[:-1]), (steps[-1][0], sum(r for _, r in steps))]
        for steps in trajectories
    ]
    assert advantages([group_of(trajectories, outcome=False)], name) == pytest.approx(
        advantages([group_of(summed, outcome=False)], name), abs=1e-6
    )


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "remax"])
@given(trajectories=trajectories_of_steps)
def test_a_step_is_credited_with_nothing_that_was_earned_before_it(
    name: str, trajectories: list[list[tuple[int, int]]]
) -> None:
    """Under credit "step" the last step's return is its own reward alone."""
    group = group_of(trajectories, outcome=False)
    plain = AdvantageConfig(adv_estimator="reinforce_plus_plus", credit="step", whiten=False)
    at = np.cumsum([len(s.response_ids) for s in group.steps]) - 1
    per_step = compute_advantages([group], plain).columns["advantages"][torch.from_numpy(at)]
    expected = [
        sum(s.reward or 0.0 for s in t.steps[k:])
        for t in group.trajectories
        for k in range(len(t.steps))
    ]
    assert per_step.tolist() == pytest.approx(expected)
    # And whatever the baseline, it moves all steps of a trajectory alike, or scales them.
    config = AdvantageConfig.model_validate(
        {"adv_estimator": name, "credit": "step", "whiten": False}
    )
    shifted = (
        compute_advantages([group], config).columns["advantages"][torch.from_numpy(at)].tolist()
    )
    start = 0
    for t in group.trajectories:
        own, mine = expected[start:][: len(t.steps)], shifted[start:][: len(t.steps)]
        for k in range(1, len(own)):
            if own[k] == own[0]:
                assert mine[k] == pytest.approx(mine[0], abs=1e-5)
        start += len(t.steps)


def test_credit_by_step_discounts_per_step_and_by_token_per_token() -> None:
    group = Group("p", (trajectory("a", 0.0, 1.0, tokens=[2, 2]),))
    plain = {"name": "reinforce_plus_plus", "whiten": False, "gamma": 0.5}
    assert advantages([group], **plain, credit="step") == pytest.approx([0.5, 0.5, 1, 1])
    assert advantages([group], **plain, credit="token") == pytest.approx([0.125, 0.25, 0.5, 1])


def test_rloo_by_step_leaves_the_own_trajectory_out_whatever_its_steps() -> None:
    group = Group("p", (trajectory("a", 1.0, 3.0), trajectory("b", 2.0)))
    # a: returns to go 4 and 3 against b's 2; b: 2 against a's mean of 3.5.
    assert advantages([group], "rloo", credit="step") == pytest.approx([2.0, 1.0, -1.5])


def test_a_trajectory_is_worth_the_sum_of_its_steps_and_all_its_steps_get_that_advantage() -> None:
    groups = [
        Group("p", (trajectory("a", None, 1.0), trajectory("b", 0.5, 0.25, -0.75))),
        Group("q", (trajectory("c", 2.0), trajectory("d", 1.0), trajectory("e", None, 0.0))),
    ]
    # p: rewards 1 and 0; q: 2, 1 and 0, normalised by itself.
    h = 0.5
    assert advantages(groups, "dr_grpo") == pytest.approx([h, h, -h, -h, -h, 1, 0, -1, -1])


@pytest.mark.parametrize("name", GROUP_BASELINES)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), data=st.data())
def test_groups_do_not_touch_each_other(name: str, sizes: list[int], data: st.DataObject) -> None:
    groups = [
        Group(
            str(g),
            tuple(trajectory(f"{g}.{i}", float(data.draw(st.integers(-3, 3)))) for i in range(n)),
        )
        for g, n in enumerate(sizes)
    ]
    alone = [a for g in groups for a in advantages([g], name)]
    assert advantages(groups, name) == pytest.approx(alone)


def test_gae_over_steps_values_a_step_at_its_first_token_and_trains_the_critic_there() -> None:
    group = Group("p", (trajectory("a", 0.0, 1.0, tokens=[2, 3]), trajectory("b", 4.0)))
    values = torch.tensor([0.5, 9.0, 0.25, 9.0, 9.0, 3.0])
    config = AdvantageConfig(adv_estimator="gae", credit="step", gamma=0.5, lam=0.0, whiten=False)
    result = compute_advantages([group], config, values=values)
    first, second = 0.5 * 0.25 - 0.5, 1 - 0.25
    assert result.columns["advantages"].tolist() == pytest.approx(
        [first] * 2 + [second] * 3 + [1.0]
    )
    nan = math.nan
    assert result.columns["returns"].tolist() == pytest.approx(
        [0.125, nan, 1.0, nan, nan, 4.0], nan_ok=True
    )


def test_metrics_tell_mean_and_spread_over_tokens() -> None:
    groups = [
        Group("p", (trajectory("a", 1.0), trajectory("b", 1.0))),
        Group("q", (trajectory("c", 1.0), trajectory("d", 0.0))),
    ]
    metrics = compute_advantages(groups, AdvantageConfig(adv_estimator="dr_grpo")).metrics
    assert metrics["advantage/mean"] == 0
    assert metrics["advantage/std"] == pytest.approx(math.sqrt(2 * 0.25 / 4))


# --- ReMax's greedy rollout -----------------------------------------------------------------------


def test_the_greedy_rollout_is_the_baseline_and_is_not_trained() -> None:
    group = Group(
        "p",
        (trajectory("a", 1.0), trajectory("g", 0.75, **{GREEDY: True}), trajectory("b", 0.0)),
    )
    (kept,) = baselined([group], REGISTRY.load("remax"))
    assert [t.trajectory_uid for t in kept.trajectories] == ["a", "b"]
    assert advantages([kept], "remax") == pytest.approx([0.25, -0.75])
    (other,) = baselined([group], REGISTRY.load("grpo"))
    assert [t.trajectory_uid for t in other.trajectories] == ["a", "b"]


def test_a_group_whose_greedy_rollout_failed_is_left_out_not_compared_with_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = REGISTRY.load("remax")
    whole = Group("p", (trajectory("a", 1.0), trajectory("g", 0.0, **{GREEDY: True})))
    broken = Group("q", (trajectory("b", 1.0),), metadata={GREEDY: True})
    with caplog.at_level(logging.WARNING):
        assert [g.prompt_uid for g in baselined([whole, broken], config)] == ["p"]
    assert "q is left out: its greedy rollout failed" in caplog.text
    nobody = Group("r", (trajectory("b", 1.0),))
    with pytest.raises(RewardError, match=r"group 'r' has no greedy rollout.*greedy_baseline"):
        baselined([whole, nobody], config)
    with pytest.raises(RewardError, match="baselined"):
        advantages([broken], "remax")


# --- bad input ------------------------------------------------------------------------------------


def test_an_unknown_estimator_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValidationError, match=r"'gpro'.*did you mean grpo.*grpo, dr_grpo, rloo"):
        AdvantageConfig.model_validate({"adv_estimator": "gpro"})


def test_credit_goes_by_the_estimator() -> None:
    assert AdvantageConfig(adv_estimator="gae").unit == "token"
    assert AdvantageConfig(adv_estimator="grpo").unit == "trajectory"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adv_estimator": "gae", "credit": "trajectory"}, "choose 'step' or 'token'"),
        (
            {"adv_estimator": "grpo", "gamma": 0.9},
            "gamma is 0.9 but a trajectory's rewards are summed",
        ),
        ({"adv_estimator": "rloo", "lam": 0.9}, "lam is 0.9 but adv_estimator is 'rloo'"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        AdvantageConfig.model_validate(options)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
def test_tokens_that_are_not_trained_are_in_no_moment_over_tokens(name: str) -> None:
    groups = [
        Group(
            "p",
            (
                trajectory("a", 1.0, tokens=[10]),
                trajectory("b", 1.0, tokens=[10]),
                trajectory("c", 0.0, tokens=[10]),
                trajectory("long", 0.0, tokens=[1000]),
            ),
        )
    ]
    mask = torch.cat([torch.ones(30), torch.zeros(1000)])
    config = AdvantageConfig(adv_estimator=name)
    found = compute_advantages(groups, config, values=torch.zeros(1030), mask=mask)
    trained = found.columns["advantages"][:30]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(trained.std()) == pytest.approx(1.0, abs=1e-3)
    assert found.metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    if name == "gae":
        assert found.columns["returns"].isfinite().tolist() == [True] * 30 + [False] * 1000


@pytest.mark.parametrize("credit", ["step", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_are_not_trained_discount_nothing_of_those_that_are(
    name: str, credit: str
) -> None:
    """Titles, probes and replies that nobody saw lie between a call and its reward."""
    options = {"credit": credit, "gamma": 0.9} | ({"lam": 0.8} if name == "gae" else {})
    config = AdvantageConfig.model_validate({"adv_estimator": name, **options})
    lengths, trained = (2, 40, 3, 7, 5), (True, False, True, False, True)
    mask = torch.tensor(trained).float().repeat_interleave(torch.tensor(lengths)).repeat(2)
    values = torch.where(mask > 0, torch.linspace(-1.0, 1.0, len(mask)), 50.0)

    def found(kept: Sequence[int], **columns: Tensor) -> tuple[Tensor, Tensor | None]:
        of = {"a": (0.5, None, 0.0, None, 1.0), "b": (0.0, None, -1.0, None, 0.25)}
        own = [lengths[i] for i in kept]
        group = Group(
            "p",
            tuple(trajectory(uid, *(r[i] for i in kept), tokens=own) for uid, r in of.items()),
            metadata={GREEDY_REWARD: 0.5},
        )
        result = compute_advantages([group], config, **columns).columns
        return result["advantages"], result.get("returns")

    alone, targets_alone = found([0, 2, 4], values=values[mask > 0])
    among, targets_among = found(range(5), values=values, mask=mask)
    torch.testing.assert_close(among[mask > 0], alone)
    if targets_alone is not None and targets_among is not None:
        torch.testing.assert_close(targets_among[mask > 0], targets_alone, equal_nan=True)
        assert targets_among[mask == 0].isnan().all()


def test_a_reward_of_a_call_that_is_not_trained_is_earned_by_the_call_before() -> None:
    group = Group("p", (trajectory("a", 0.0, 1.0, 0.0, tokens=[2, 3, 2]),))
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    config = AdvantageConfig(adv_estimator="gae", whiten=False, gamma=0.5)
    found = compute_advantages([group], config, values=torch.zeros(7), mask=mask)
    assert found.columns["advantages"][mask > 0].tolist() == [0.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_batch_of_which_nothing_is_trained_every_advantage_is_finite(name: str) -> None:
    groups = [
        Group("p", (trajectory("a", 1.0), trajectory("b", 0.0)), metadata={GREEDY_REWARD: 0.5})
    ]
    config = AdvantageConfig(adv_estimator=name)
    found = compute_advantages(groups, config, values=torch.zeros(2), mask=torch.zeros(2))
    assert found.columns["advantages"].isfinite().all()


def test_a_trajectory_without_a_reward_is_an_error_not_a_zero() -> None:
    group = Group("p", (trajectory("a", 1.0), trajectory("b", None, None)))
    with pytest.raises(RewardError, match=r"'b' of prompt 'p' has reward None") as e:
        compute_advantages([group], AdvantageConfig())
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert isinstance(e.value, ValueError)


def test_columns_of_the_wrong_length_and_gae_without_values_are_refused() -> None:
    group = Group("p", (trajectory("a", 1.0), trajectory("b", 0.0)))
    with pytest.raises(ColumnError, match=r"token_rewards has shape \(3,\) for 2"):
        compute_advantages([group], AdvantageConfig(), token_rewards=torch.zeros(3))
    with pytest.raises(ColumnError, match="gae has no values"):
        compute_advantages([group], AdvantageConfig(adv_estimator="gae"))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -2.1e9])
def test_a_reward_that_would_make_its_group_nan_is_refused_by_the_name_of_its_trajectory(
    reward: float,
) -> None:
    with pytest.raises(ValueError, match=r"'t-7'.*reward is .*; pass a number within ±1e\+09"):
        trajectory("t-7", reward)


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "remax"])
def test_the_largest_rewards_still_have_finite_advantages(name: str) -> None:
    group = Group("p", tuple(trajectory(f"t{i}", r) for i, r in enumerate((1e9, -1e9, 0.0))))
    columns = compute_advantages([group], AdvantageConfig(adv_estimator=name)).columns
    assert columns["advantages"].isfinite().all()


def test_a_trajectory_without_steps_is_an_error_that_names_it() -> None:
    group = Group("p", (trajectory("t0", 1.0), Trajectory("t1", "p", ())))
    with pytest.raises(RewardError, match="'t1' of prompt 'p' has no steps"):
        compute_advantages([group], AdvantageConfig())


# --- singles with a running baseline --------------------------------------------------------------


def singles(*rewards: float, source: str = "", tokens: int = 1) -> list[Group]:
    """Groups of one trajectory, as traffic has them."""
    return [
        Group(
            f"{source}{i}",
            (trajectory(f"{source}{i}", r, prompt_uid=f"{source}{i}", tokens=[tokens]),),
            metadata={"task": {"data_source": source}} if source else {},
        )
        for i, r in enumerate(rewards)
    ]


RUNNING = AdvantageConfig(adv_estimator="reinforce_running")


def test_singles_get_their_reward_minus_the_running_mean_over_the_batchs_spread() -> None:
    """By hand. Batch 1, rewards 1 0 1 0: a new source, so m = 0.5, s² = 0.25: ±1. Then m = 0.5,
    v = 0.25, n = 4. Batch 2, rewards 1 1: A = 0.5, mean A² = 0.25, v = 0.25, s = 0.5: 1 each.
    Then m = 0.6, n = 5, v = 0.24; m = 2/3, n = 6, v = 2/9."""
    first = compute_advantages(singles(1, 0, 1, 0), RUNNING)
    assert first.columns["advantages"].tolist() == pytest.approx([1, -1, 1, -1], abs=1e-6)
    assert first.baselines[""] == pytest.approx((4, 0.5, 0.25))
    second = compute_advantages(singles(1, 1), RUNNING, baselines=first.baselines)
    assert second.columns["advantages"].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert second.baselines[""] == pytest.approx((6, 2 / 3, 2 / 9))
    assert second.metrics["advantage/baseline"] == pytest.approx(2 / 3)


def test_a_batch_of_equal_rewards_near_the_running_mean_is_not_blown_up() -> None:
    """m = 0.99, v = 0.0099: A = 0.01 / 0.0995."""
    known = compute_advantages(singles(*[1.0] * 99, 0.0), RUNNING).baselines
    result = compute_advantages(singles(1, 1), RUNNING, baselines=known)
    assert result.columns["advantages"].tolist() == pytest.approx([0.1005] * 2, abs=1e-4)
    new = compute_advantages(singles(1, 1), RUNNING)
    assert new.columns["advantages"].tolist() == [0, 0], "a new source with equal rewards"


def test_each_data_source_has_a_baseline_of_its_own() -> None:
    """Rewards 10 and 12 of one, 0 and 2 of the other: ±1 about each mean, s = 1."""
    groups = singles(10, 12, source="easy") + singles(0, 2, source="hard")
    result = compute_advantages(groups, RUNNING)
    assert result.columns["advantages"].tolist() == pytest.approx([-1, 1, -1, 1])
    assert [b.mean for b in result.baselines.values()] == [11, 1]


def test_the_spread_counts_tokens_as_whitening_does() -> None:
    """Rewards 1 0 0 on 3, 1 and 1 tokens: m = 1/3, A = 2/3, -1/3, -1/3, s² = (3·4/9 + 2·1/9)/5."""
    groups = singles(1, tokens=3) + singles(0, 0)
    result = compute_advantages(groups, RUNNING).columns["advantages"]
    scale = math.sqrt(14 / 45)
    expected = [2 / 3 / scale] * 3 + [-1 / 3 / scale] * 2
    assert result.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_running_baseline_follows_the_policy() -> None:
    known = compute_advantages(singles(*[0.0] * 400), RUNNING).baselines
    later = compute_advantages(singles(*[1.0] * 256), RUNNING, baselines=known).baselines
    assert known[""].n == later[""].n == 256
    assert later[""].mean == pytest.approx(1 - (255 / 256) ** 256)
