"""Steps as slime's samples and train data: what is trained where, and what each group's rewards
become. Expectations are written out, or restate slime's formulas; `test_slime_itself.py` asks
slime."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.backends.base import BACKENDS
from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.slime.backend import SlimeBackend, post_process_rewards, train_data
from stepwell.backends.slime.images import train_inputs
from stepwell.backends.slime.sample import PrefixCacheInfo, SlimeSample, SpecInfo
from stepwell.backends.slime.samples import (
    NO_LOG_PROBS,
    OTHER_TEMPERATURE,
    SUPERSEDED,
    groups_of,
    not_trained,
    settle_log_probs,
    to_samples,
)
from stepwell.datapool.types import GREEDY, SUPERSEDES, Group, Step, VersionSpan
from tests.backends.models import qwen3, save_model
from tests.backends.random_groups import properties, random_groups, steps_of
from tests.backends.test_vision_training import Album
from tests.builders import group, step_of
from tests.vision_model import make_vision_model

SLIMES_FIELDS: dict[str, Any] = {
    "group_index": None,
    "index": None,
    "rollout_id": None,
    "prompt": "",
    "tokens": [],
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "multimodal_train_input_id": None,
    "apply_chat_template_kwargs": {},
    "response": "",
    "response_length": 0,
    "label": None,
    "reward": None,
    "loss_mask": None,
    "weight_versions": [],
    "rollout_log_probs": None,
    "rollout_top_p_token_ids": None,
    "rollout_top_p_token_offsets": None,
    "rollout_routed_experts": None,
    "remove_sample": False,
    "teacher_log_probs": None,
    "status": "pending",
    "metadata": {},
    "generate_function_path": None,
    "custom_rm_path": None,
    "train_metadata": None,
    "session_id": None,
    "non_generation_time": 0.0,
    "spec_info": {
        "spec_accept_token_num": 0,
        "spec_draft_token_num": 0,
        "spec_verify_ct": 0,
        "completion_token_num": 0,
    },
    "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
}
"""`Sample().to_dict()` of THUDM/slime at commit 624b824 (`slime/utils/types.py`), in its order;
`test_slime_itself.py` compares it with slime's source."""


def branching(uid: str = "t", reward: float = 1.0, **fields: Any) -> list[Step]:
    """P R0 tool R1, a branch P R0 R2, and a side call Q R3."""
    return [
        step_of(
            uid, index=0, prompt_ids=[1, 2], response_ids=[3], rollout_log_probs=[-0.1], **fields
        ),
        step_of(
            uid,
            index=1,
            parent_index=0,
            prompt_ids=[1, 2, 3, 9],
            response_ids=[4, 5],
            rollout_log_probs=[-0.2, -0.3],
            policy_version=2,
            version_spans=(VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)),
            **fields,
        ),
        step_of(
            uid,
            index=2,
            parent_index=0,
            prompt_ids=[1, 2, 3],
            response_ids=[6],
            rollout_log_probs=[-0.4],
            **fields,
        ),
        step_of(
            uid,
            index=3,
            prompt_ids=[7],
            response_ids=[8, 8],
            rollout_log_probs=[-0.6, -0.7],
            reward=reward,
            finish_reason="length",
            **fields,
        ),
    ]


def flat(*groups: Group, **kwargs: Any) -> list[SlimeSample]:
    return to_samples(groups, **kwargs).flat


# -- samples -----------------------------------------------------------------------------------


def test_a_trajectory_with_branches_is_one_rollout_of_several_samples() -> None:
    main, branch, side = flat(group(branching()))
    assert (main.tokens, main.response_length) == ([1, 2, 3, 9, 4, 5], 4)
    assert main.loss_mask == [1, 0, 1, 1]  # the tool's token is not trained
    assert main.rollout_log_probs == pytest.approx([-0.1, 0, -0.2, -0.3])
    assert main.weight_versions == ["0", "2", "3"]
    # R0 was trained on the main row: the branch has it as its prompt.
    assert (branch.tokens, branch.response_length) == ([1, 2, 3, 6], 1)
    assert branch.loss_mask == [1]
    assert (side.tokens, side.loss_mask) == ([7, 8, 8], [1, 1])
    assert [s.rollout_id for s in (main, branch, side)] == [0, 0, 0]
    assert [s.reward for s in (main, branch, side)] == [1.0, 1.0, 1.0]
    assert [s.status for s in (main, branch, side)] == ["completed", "completed", "truncated"]
    assert main.metadata == {
        "prompt_uid": "p",
        "trajectory_uid": "t",
        "source_name": "unknown",
        "step_indices": [0, 1],
    }


def test_every_sampled_token_of_random_groups_is_trained_exactly_once() -> None:
    groups = random_groups()
    assert all(properties(groups)[k] for k in ("branches", "side_calls", "spans", "truncated"))
    converted = to_samples(groups)
    assert not converted.untrained
    trained: Counter[tuple[str, int, float]] = Counter()
    for sample in converted.flat:
        response = sample.tokens[-sample.response_length :]
        values = zip(response, sample.loss_mask or [], sample.rollout_log_probs or [], strict=True)
        for token, mask, log_prob in values:
            if mask:
                trained[sample.metadata["trajectory_uid"], token, log_prob] += 1
            else:
                assert log_prob == 0
    sampled: Counter[tuple[str, int, float]] = Counter()
    for s in steps_of(groups):
        assert s.rollout_log_probs is not None
        pairs = zip(s.response_ids.tolist(), s.rollout_log_probs.tolist(), strict=True)
        sampled.update((s.trajectory_uid, token, log_prob) for token, log_prob in pairs)
    assert trained == sampled


def test_ids_go_on_over_groups_and_start_where_they_are_told_to() -> None:
    one = group([step_of("a", reward=1.0)], [step_of("b", reward=0.0)])
    two = group(branching("c"), uid="q")
    samples = flat(one, two, first_group=10, first_rollout=20)
    assert [s.group_index for s in samples] == [10, 10, 11, 11, 11]
    assert [s.rollout_id for s in samples] == [20, 21, 22, 22, 22]
    assert [s.index for s in samples] == [20, 21, 22, 22, 22]


def test_tokens_without_behaviour_log_probs_are_masked_and_counted_never_given_zero() -> None:
    trajectory = [
        step_of(index=0, rollout_log_probs=None),
        step_of(
            index=1, parent_index=0, prompt_ids=[1, 2, 3, 4, 5, 9], response_ids=[6], reward=1.0
        ),
    ]
    converted = to_samples([group(trajectory)])
    assert [s.loss_mask for s in converted.flat] == [[0, 0, 0, 1]]
    assert converted.untrained == {NO_LOG_PROBS: 2}


def test_text_only_rollouts_are_trained_without_a_correction_and_have_no_log_probs() -> None:
    """Items of messages alone in slime's Rollout Buffer: slime recomputes."""
    text = [step_of(rollout_log_probs=None, reward=1.0)]
    converted = to_samples([group(text)], group_size=2)
    assert [s.loss_mask for s in converted.flat] == [[1, 1], [0, 0]]
    assert [s.rollout_log_probs for s in converted.flat] == [None, None]
    assert not converted.untrained
    assert "rollout_log_probs" not in SlimeBackend().convert(text)
    assert settle_log_probs(Namespace(use_tis=False), converted.flat) == 0
    with pytest.raises(BatchError, match="use_tis is set, and no sample has rollout_log_probs"):
        settle_log_probs(Namespace(use_tis=True), converted.flat)
    mixed = [*converted.flat, *flat(group([step_of(reward=1.0)]))]
    assert settle_log_probs(Namespace(), mixed) == 2
    assert [s.remove_sample for s in mixed] == [True, True, False]


def test_steps_of_another_temperature_are_masked_since_slime_scores_all_at_one() -> None:
    cold = {"sampling_params": {"temperature": 0.5}}
    trajectory = [
        step_of(index=0, metadata=cold),
        step_of(
            index=1, parent_index=0, prompt_ids=[1, 2, 3, 4, 5, 9], response_ids=[6], reward=1.0
        ),
    ]
    converted = to_samples([group(trajectory)], temperature=1.0)
    assert [s.loss_mask for s in converted.flat] == [[0, 0, 0, 1]]
    assert converted.untrained == {OTHER_TEMPERATURE: 2}
    assert not to_samples([group(trajectory)]).untrained


def test_a_sample_with_nothing_to_train_goes_unless_it_is_its_rollouts_only_one() -> None:
    side_call = [
        step_of(index=0),
        step_of(index=1, prompt_ids=[7], response_ids=[8], rollout_log_probs=None, reward=1.0),
    ]
    lost = [step_of("lost", rollout_log_probs=None, reward=0.0)]
    kept, removed = flat(group(side_call, lost))
    assert (kept.loss_mask, kept.remove_sample) == ([1, 1], False)
    assert (removed.loss_mask, removed.remove_sample, removed.rollout_id) == ([0, 0], True, 1)


def test_a_short_group_is_filled_with_rollouts_that_train_nothing() -> None:
    short = group([step_of("a", reward=1.0)], branching("b", reward=0.0))
    converted = to_samples([short], group_size=4)
    assert converted.padded == 2
    assert [len(rollouts) for rollouts in converted.samples[0]] == [1, 3, 1, 1]
    for (sample,) in converted.samples[0][2:]:
        assert sample.loss_mask == [0, 0]
        assert sample.remove_sample
        assert sample.reward == 0.5  # so that slime's mean reward stays what it is
    data = train_data(SlimeBackend(), converted.flat)
    # The mean and std are those of the two that were rolled out.
    assert data["rewards"] == pytest.approx([0.7071058, *3 * [-0.7071058], 0, 0], abs=1e-6)
    assert data["rollout_mask_sums"] == [2, 6, 6, 6, 0, 0]
    assert data["rollout_ids"] == [0, 1, 1, 1, 2, 3]


def test_a_group_larger_than_slime_counts_on_is_refused_and_not_cut() -> None:
    large = group([step_of("a", reward=1.0)], [step_of("b", reward=0.0)])
    with pytest.raises(BatchError, match="'p' has 2 rollouts, slime trains 1"):
        to_samples([large], group_size=1)


def test_a_greedy_baseline_rollout_is_not_trained() -> None:
    whole = group([step_of("a", reward=1.0)], [step_of("b", reward=0.0)])
    greedy = replace(whole.trajectories[1], metadata={GREEDY: True})
    samples = flat(replace(whole, trajectories=(whole.trajectories[0], greedy)))
    assert [s.metadata["trajectory_uid"] for s in samples] == ["a"]


@pytest.mark.parametrize("unseen", [0, 2], ids=["first", "last"])
def test_a_reply_that_nobody_saw_trains_nothing_and_its_trajectory_keeps_its_reward(
    unseen: int,
) -> None:
    """Tries of one request say 4 5 and 6. The agent went on from 4 5."""
    lost = step_of(index=unseen, response_ids=[6], reward=0.5)
    read = step_of(index=1 if unseen == 0 else 0)
    on = step_of(
        index=2 if unseen == 0 else 1,
        prompt_ids=[1, 2, 3, 4, 5, 9],
        response_ids=[8],
        parent_index=read.step_index,
        reward=0.25,
        metadata={SUPERSEDES: [unseen]},
    )
    steps = sorted([lost, read, on], key=lambda s: s.step_index)
    converted = to_samples([group(steps)])
    (sample,) = converted.flat
    assert sample.tokens == [1, 2, 3, 4, 5, 9, 8]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.reward == 0.75
    assert converted.untrained == {SUPERSEDED: 1}


def test_a_reply_that_nobody_saw_and_that_was_gone_on_from_is_trained() -> None:
    read = step_of(index=0)
    on = step_of(
        index=1,
        prompt_ids=[1, 2, 3, 4, 5, 9],
        response_ids=[8],
        parent_index=0,
        reward=1.0,
        metadata={SUPERSEDES: [0]},
    )
    converted = to_samples([group([read, on])])
    assert [s.loss_mask for s in converted.flat] == [[1, 1, 0, 1]]
    assert not converted.untrained


def test_a_trajectory_without_a_reward_is_refused() -> None:
    with pytest.raises(BatchError, match="'t' has no reward"):
        to_samples([group([step_of()])])


def test_the_data_set_is_found_where_its_producer_wrote_it() -> None:
    sources = [
        group([step_of(reward=1.0)], metadata={"data_source": "gsm8k"}),
        group([step_of(reward=1.0)], metadata={"task": {"data_source": "aime"}}),
    ]
    assert [s.metadata["source_name"] for s in flat(*sources)] == ["gsm8k", "aime"]


def test_routing_is_that_of_the_call_that_sampled_the_token() -> None:
    def routed(n: int, expert: int) -> Any:
        return np.full((n, 2, 1), expert)

    trajectory = [
        step_of(index=0, routed_experts=routed(4, 1)),
        step_of(
            index=1,
            parent_index=0,
            prompt_ids=[1, 2, 3, 4, 5, 9],
            response_ids=[6],
            routed_experts=routed(6, 2),
            reward=1.0,
        ),
    ]
    (sample,) = flat(group(trajectory))
    # Inputs 2 and 3 predict tokens 4 and 5, which the first call sampled.
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [2, 2, 1, 1, 2, 2]
    with pytest.raises(BatchError, match="routed_experts has 5 rows for 5 tokens"):
        to_samples([group([step_of(routed_experts=routed(5, 1), reward=1.0)])])
    mixed = group(
        [step_of("a", routed_experts=routed(4, 1), reward=1.0)], [step_of("b", reward=1.0)]
    )
    with pytest.raises(BatchError, match="for all or none"):
        to_samples([mixed])


def test_media_are_refused_by_name() -> None:
    media = [step_of(multi_modal_data={"pixel_values": np.ones(3)}, reward=1.0)]
    with pytest.raises(BatchError, match="multi_modal_data; slime is given text and"):
        to_samples([group(media)])


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


def scored(steps: list[Step]) -> list[Step]:
    """The steps with a reward on the last one of each trajectory."""
    last = {s.trajectory_uid: s for s in steps}
    return [replace(s, reward=1.0) if s is last[s.trajectory_uid] else s for s in steps]


def test_samples_have_the_inputs_of_their_own_pictures(vision: Path) -> None:
    album = Album(vision)
    steps = scored(album.conversations())
    inputs = train_inputs(vision, steps, album.pngs)
    samples = to_samples(groups_of(steps), inputs=inputs).flat
    shown = {tuple(s.token_ids): s.pictures for s in steps}
    n = []
    for sample in samples:
        pictures = shown[tuple(sample.tokens)]
        n.append(len(pictures))
        if not pictures:
            assert sample.multimodal_train_inputs is None
            continue
        wanted = album.processor.features([album.pngs[p.digest] for p in pictures])
        found = sample.multimodal_train_inputs
        assert found is not None
        assert found.keys() == wanted.keys() == {"pixel_values", "image_grid_thw"}
        for name, value in wanted.items():
            assert torch.equal(found[name], torch.from_numpy(value))
        rows = int(sum(p.n_tokens for p in pictures)) * album.processor.merge_size**2
        assert found["pixel_values"].shape[0] == rows
    assert sorted(n) == [0, 2, 2, 2, 3, 3, 3]
    a, _, c = (s.multimodal_train_inputs for s in samples if len(shown[tuple(s.tokens)]) == 3)
    assert a is not None
    assert c is not None
    assert a["pixel_values"] is c["pixel_values"], "rows of equal pictures share them"
    data = SlimeBackend(hf_checkpoint=vision).convert_with_pictures(steps, album.pngs)
    found = [None if m is None else m["image_grid_thw"] for m in data["multimodal_train_inputs"]]
    for sample, grid in zip(samples, found, strict=True):
        own = sample.multimodal_train_inputs
        assert grid is None if own is None else torch.equal(grid, own["image_grid_thw"])


def test_a_stand_in_of_a_rollout_with_pictures_has_them_too(vision: Path) -> None:
    album = Album(vision)
    step = album.step("a", 0, 40, album.picture(1), 41, response=[50])
    steps = scored([step])
    inputs = train_inputs(vision, steps, album.pngs)
    first, padding = to_samples(groups_of(steps), group_size=2, inputs=inputs).flat
    assert padding.tokens == first.tokens
    assert padding.multimodal_train_inputs == first.multimodal_train_inputs is not None


def test_pictures_that_slime_cannot_be_given_are_refused_by_name(
    vision: Path, tmp_path: Path
) -> None:
    album = Album(vision)
    steps = scored([album.step("a", 0, 40, album.picture(1), 41, response=[50])])
    with pytest.raises(BatchError, match=r"'a'\[0\] has pictures; set hf_checkpoint"):
        SlimeBackend().convert_with_pictures(steps, album.pngs)
    with pytest.raises(BatchError, match=r"bytes of .* are not there"):
        SlimeBackend(hf_checkpoint=vision).convert(steps)
    text_only = save_model(qwen3(vocab_size=300), tmp_path)
    with pytest.raises(BackendConfigError, match=r"hf_checkpoint is set, but .* reads text only"):
        SlimeBackend(hf_checkpoint=text_only).convert_with_pictures(steps, album.pngs)
    text = to_samples(groups_of(steps), inputs=not_trained).flat
    assert text[0].multimodal_train_inputs is None, "rewards and filters read tokens and text"


# -- train data --------------------------------------------------------------------------------


def test_a_sample_has_every_field_of_slimes_own() -> None:
    assert SlimeSample().to_dict() == SLIMES_FIELDS
    assert list(SlimeSample().to_dict()) == list(SLIMES_FIELDS)  # positions, too


def test_a_dictionary_of_slimes_comes_back_with_all_that_was_in_it() -> None:
    given = SLIMES_FIELDS | {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "tokens": [1, 2, 3],
        "response": "4",
        "response_length": 2,
        "reward": {"score": 1.0, "format": 0.5},
        "loss_mask": [1, 0],
        "status": "truncated",
        "session_id": "s",
        "train_metadata": {"loss": "sft"},
        "spec_info": {**SLIMES_FIELDS["spec_info"], "spec_draft_token_num": 4},
        "start_rollout_id": 7,  # slime's functions set attributes of their own
    }
    sample = SlimeSample.from_dict(given)
    assert sample.to_dict() == given
    assert sample.status is SlimeSample.Status.TRUNCATED
    assert vars(sample)["start_rollout_id"] == 7
    assert sample.get_reward_value(SimpleNamespace(reward_key="format")) == 0.5
    assert sample.get_reward_value(SimpleNamespace(reward_key=None)) == given["reward"]
    assert (sample.response_length, sample.effective_response_length) == (2, 1)
    with pytest.raises(ValueError, match="'lost' is not a valid"):
        SlimeSample.from_dict(given | {"status": "lost"})


def test_an_engines_counts_have_slimes_rates() -> None:
    assert SpecInfo(3, 4, 2, 5).spec_accept_rate == 0.75
    assert SpecInfo(3, 4, 2, 5).spec_accept_length == 2.5
    assert PrefixCacheInfo(1, 4).prefix_cache_hit_rate == 0.25
    assert SpecInfo().spec_accept_rate == PrefixCacheInfo().prefix_cache_hit_rate == 0.0


def test_the_train_data_of_two_rollouts_is_what_slime_splits_over_its_ranks() -> None:
    steps = [*branching("a", reward=1.0), step_of("b", response_ids=[6], reward=0.0)]
    data = SlimeBackend().convert(steps)
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert data["rewards"] == pytest.approx([a, a, a, -a], abs=1e-12)
    del data["rewards"]
    assert data.pop("rollout_log_probs")[0] == pytest.approx([-0.1, 0, -0.2, -0.3])
    assert data == {
        "tokens": [[1, 2, 3, 9, 4, 5], [1, 2, 3, 6], [7, 8, 8], [1, 2, 3, 6]],
        "response_lengths": [4, 1, 2, 1],
        "raw_reward": [1.0, 1.0, 1.0, 0.0],
        "truncated": [0, 0, 1, 0],
        "sample_indices": [0, 0, 0, 1],
        "rollout_ids": [0, 0, 0, 1],
        "loss_masks": [[1, 0, 1, 1], [1], [1, 1], [1]],
        "rollout_mask_sums": [6, 6, 6, 1],
        "source_names": ["unknown"] * 4,
        "weight_versions": [["0", "2", "3"], ["0"], ["0"], ["0"]],
    }


def test_steps_may_come_in_any_order() -> None:
    steps = steps_of(random_groups(8))
    straight, turned = SlimeBackend().convert(steps), SlimeBackend().convert(steps[::-1])
    key = "tokens", "rewards", "loss_masks", "rollout_mask_sums"

    def rows(data: dict[str, list[Any]]) -> list[Any]:
        return sorted(zip(*(data[k] for k in key), strict=True))

    assert [r[0] for r in rows(straight)] == [r[0] for r in rows(turned)]
    assert [r[2:] for r in rows(straight)] == [r[2:] for r in rows(turned)]
    assert [r[1] for r in rows(straight)] == pytest.approx([r[1] for r in rows(turned)])


def test_nothing_to_train_is_an_error_that_says_why() -> None:
    with pytest.raises(BatchError, match="no steps"):
        SlimeBackend().convert([])


# -- rewards -----------------------------------------------------------------------------------


def rewards_of(groups: list[Group], **args: Any) -> dict[str, float]:
    """Normalised reward by trajectory."""
    samples = to_samples(groups).flat
    _, rewards = post_process_rewards(SlimeBackend(**args), samples)
    found: dict[str, float] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        assert found.setdefault(sample.metadata["trajectory_uid"], reward) == reward
    return found


def test_a_trajectory_counts_once_in_its_group_however_many_samples_it_has() -> None:
    bushy = group(
        branching("a", reward=1.0), [step_of("b", reward=0.0)], [step_of("c", reward=0.0)]
    )
    plain = group(
        [step_of("a", reward=1.0)], [step_of("b", reward=0.0)], [step_of("c", reward=0.0)]
    )
    assert len(flat(bushy)) == 5
    assert rewards_of([bushy]) == rewards_of([plain])
    # By samples the mean would be 3/5.
    assert rewards_of([bushy], grpo_std_normalization=False)["a"] == pytest.approx(2 / 3)


def test_groups_of_different_sizes_are_each_normalised_within_themselves() -> None:
    two = group([step_of("a", reward=10.0)], [step_of("b", reward=12.0)])
    three = group(
        [step_of("c", reward=0.0)], [step_of("d", reward=0.0)], [step_of("e", reward=3.0)], uid="q"
    )
    found = rewards_of([two, three], grpo_std_normalization=False)
    assert found == pytest.approx({"a": -1, "b": 1, "c": -1, "d": -1, "e": 2})


def test_an_agents_word_for_its_padding_makes_no_stand_in_of_its_rollout() -> None:
    both = group([step_of("a", reward=1.0)], [step_of("b", reward=0.0)])
    said = tuple(replace(t, metadata={"padding": "left"}) for t in both.trajectories)
    found = rewards_of([replace(both, trajectories=said)], grpo_std_normalization=False)
    assert found == {"a": 0.5, "b": -0.5}


def test_equal_rewards_give_exactly_zero_and_a_group_of_one_keeps_its_own() -> None:
    same = group(*([step_of(str(i), reward=0.1)] for i in range(3)))
    alone = group([step_of("alone", reward=0.7)], uid="q")
    assert rewards_of([same, alone]) == {"0": 0, "1": 0, "2": 0, "alone": 0.7}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, 0.5),
        ({"advantage_estimator": "ppo"}, 1.0),
        ({"advantage_estimator": "reinforce_plus_plus"}, 1.0),
        ({"rewards_normalization": False}, 1.0),
        ({"advantage_estimator": "gspo"}, 0.7071058),
    ],
)
def test_what_is_normalised_depends_on_slimes_arguments(
    args: dict[str, Any], expected: float
) -> None:
    both = group([step_of("a", reward=1.0)], [step_of("b", reward=0.0)])
    assert rewards_of([both], **args)["a"] == pytest.approx(expected, abs=1e-6)


def test_samples_of_one_rollout_with_different_rewards_are_refused() -> None:
    samples = flat(group(branching()))
    samples[1].reward = 0.0
    with pytest.raises(BatchError, match=r"rollout 0 have rewards 1.0 and 0.0"):
        post_process_rewards(SlimeBackend(), samples)


def test_samples_of_slimes_own_rollouts_are_rollouts_of_their_own() -> None:
    samples = [SlimeSample(group_index=0, reward=r) for r in (1.0, 1.0, 0.0, 0.0)]
    _, rewards = post_process_rewards(SlimeBackend(grpo_std_normalization=False), samples)
    assert rewards == [0.5, 0.5, -0.5, -0.5]


# -- slime's loss ------------------------------------------------------------------------------


def slime_loss(data: dict[str, list[Any]], values: list[torch.Tensor], n_rollouts: int) -> Any:
    """Per-token `values` as slime reduces them; cp_utils.get_sum_of_sample_mean with
    `sample_denoms=rollout_mask_sums`, then loss.loss_function over `step_global_batch_size`."""
    terms = [
        (x * torch.tensor(mask)).sum() / max(denominator, 1)
        for x, mask, denominator in zip(
            values, data["loss_masks"], data["rollout_mask_sums"], strict=True
        )
    ]
    return torch.stack(terms).sum() / n_rollouts


def test_each_trajectory_weighs_the_same_in_slimes_loss_whatever_its_shape() -> None:
    steps = steps_of(random_groups(8))
    data = SlimeBackend().convert(steps)
    uids = sorted({s.trajectory_uid for s in steps})
    weights = [
        torch.ones(n, dtype=torch.float64, requires_grad=True) for n in data["response_lengths"]
    ]
    slime_loss(data, weights, len(uids)).backward()
    by_rollout: Counter[int] = Counter()
    for rollout_id, w in zip(data["rollout_ids"], weights, strict=True):
        by_rollout[rollout_id] += float(w.grad.sum())  # type: ignore[union-attr]
    assert len(by_rollout) == len(uids)
    assert list(by_rollout.values()) == pytest.approx([1 / len(uids)] * len(uids))


# -- the backend -------------------------------------------------------------------------------


def test_the_backend_is_found_by_name_and_says_how_it_is_used() -> None:
    found = BACKENDS.load("slime")
    assert found is SlimeBackend
    assert isinstance(found.build(grpo_std_normalization=False), SlimeBackend)
    with pytest.raises(BackendConfigError, match="--rollout-function-path"):
        found.build("config", "model")


def test_groups_of_steps_are_those_of_the_pool() -> None:
    groups = random_groups(8)
    again = groups_of(steps_of(groups))
    assert [(g.prompt_uid, [t.steps for t in g.trajectories]) for g in again] == [
        (g.prompt_uid, [t.steps for t in g.trajectories]) for g in groups
    ]
