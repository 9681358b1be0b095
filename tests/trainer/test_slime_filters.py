"""slime's filter functions in a run: whole samples, and refusals before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.slime.sample import sample_class
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.types import TRAIN, Group, Trajectory
from stepwell.trainer.config import SamplingConfig
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.sampling import GroupFilter
from stepwell.trainer.slime.filters import DynamicFilterOutput
from tests.builders import group, step
from tests.trainer.small_run import small_config, small_run

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
seen: list[Any] = []


def record(args: Any, samples: list[Any]) -> bool:
    seen.append((args, samples))
    return True


def record_all(args: Any, samples: list[list[Any]], **kwargs: Any) -> list[list[Any]]:
    seen.append((args, samples))
    return samples[::-1]


def not_truncated(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    """A filter as slime's are written: it looks at the status of samples."""
    cut = sum(sample.status == type(sample).Status.TRUNCATED for sample in samples)
    return DynamicFilterOutput(keep=cut == 0, reason=f"{cut}_truncated")


def rejected_if_others_come(args: Any, samples: list[Any]) -> Any:
    return DynamicFilterOutput(keep=False, keep_when_insufficient=True)


def reads_an_unknown_argument(args: Any, samples: list[Any]) -> bool:
    return bool(args.rollout_num_gpus)


def takes_one(samples: list[Any]) -> bool:
    return True


async def keeps_none(args: Any, samples: list[Any]) -> bool:
    return False


def with_tools(*rewards: float, finish: str = "stop") -> Group:
    """Each trajectory has two turns, with a tool's answer between them."""
    trajectories = []
    for i, reward in enumerate(rewards):
        last: dict[str, Any] = {"policy_version": 3, "finish_reason": finish, "is_last": True}
        steps = (
            step([65, 66], [67], f"t{i}"),
            step(
                [65, 66, 67, 68],
                [69, 70],
                f"t{i}",
                1,
                rollout_log_probs=[-0.25, -0.125],
                parent_index=0,
                reward=reward,
                **last,
            ),
        )
        trajectories.append(Trajectory(f"t{i}", "p", steps, {"tool_calls": i}))
    task = {"question": "A?", "answer": "7", "metadata": {"level": 2}, "data_source": "gsm8k"}
    return group(*trajectories, n_rollouts=len(rewards), metadata={"task": task})


def rules(function: Any, **given: Any) -> GroupFilter:
    config = SamplingConfig(filters=[f"slime_filter({__name__}:{function.__name__})"])
    return GroupFilter(config, MODEL, given)


def check_whole(sample: Any, index: int, reward: float) -> None:
    text = _decoded([67, 68, 69, 70])
    assert type(sample) is sample_class()
    assert (sample.index, sample.rollout_id, sample.reward) == (index, index, reward)
    assert sample.tokens == [65, 66, 67, 68, 69, 70]
    assert (sample.response_length, sample.loss_mask) == (4, [1, 0, 1, 1])
    assert sample.rollout_log_probs == [-0.5, 0.0, -0.25, -0.125]
    assert sample.status == sample_class().Status.COMPLETED
    assert (sample.prompt, sample.response, sample.label) == ("A?", text, "7")
    assert sample.weight_versions == ["0", "3"]
    assert sample.metadata == {
        "level": 2,
        "tool_calls": index % 2,
        "prompt_uid": "p",
        "trajectory_uid": f"t{index % 2}",
        "step_indices": [0, 1],
        "source_name": "gsm8k",
    }


def _decoded(ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(MODEL).decode(ids))


def test_a_dynamic_filter_sees_whole_samples_and_the_runs_arguments() -> None:
    seen.clear()
    whole = with_tools(1.0, 0.5)
    assert rules(record, n_samples_per_prompt=2).keep([whole]) == [whole]
    ((args, samples),) = seen
    for index, reward in enumerate((1.0, 0.5)):
        check_whole(samples[index], index, reward)
        assert samples[index].group_index == 0
    assert (args.n_samples_per_prompt, args.reward_key) == (2, None)


def test_what_an_agent_says_of_its_sample_names_no_code_and_changes_no_field() -> None:
    """As a generate function does: its text, its status and attributes of its own are shown."""
    seen.clear()
    said = {
        "response": "an answer",
        "prompt": 5,
        "status": "won",
        "n_searches": 3,
        "custom_rm_path": "os:abort",
        "reward": 9.0,
        "tokens": [1],
        "label": "an answer",
        "get_reward_value": None,
        "to_dict": None,
    }
    (one, other), whole = with_tools(1.0, 0.5).trajectories, with_tools(1.0, 0.5)
    marked = [replace(t, metadata={"slime_sample": s}) for t, s in ((one, said), (other, "mine"))]
    assert rules(record).keep([replace(whole, trajectories=tuple(marked))])
    ((args, (sample, second)),) = seen
    assert (sample.response, sample.n_searches, sample.prompt) == ("an answer", 3, "A?")
    assert (sample.custom_rm_path, sample.reward, sample.label) == (None, 1.0, "7")
    assert sample.tokens == second.tokens == [65, 66, 67, 68, 69, 70]
    assert sample.status == sample_class().Status.COMPLETED
    assert sample.get_reward_value(args) == sample.to_dict()["reward"] == 1.0


def test_an_over_sampling_filter_sees_whole_samples_of_every_group() -> None:
    seen.clear()
    path = f"{__name__}:record_all"
    config = SamplingConfig(over_sampling_batch_size=2, over_sampling_filter=path)
    groups = [with_tools(1.0, 0.5), with_tools(0.0, 0.25)]
    assert GroupFilter(config, MODEL).best(groups, 1) == [groups[1]]
    ((_, samples),) = seen
    for number, rewards in enumerate(((1.0, 0.5), (0.0, 0.25))):
        for index, reward in enumerate(rewards):
            check_whole(samples[number][index], 2 * number + index, reward)
            assert samples[number][index].group_index == number


def test_a_filter_of_what_samples_are_drops_by_its_reason() -> None:
    judge = rules(not_truncated)
    whole = with_tools(1.0, 0.0)
    assert judge.keep([with_tools(1.0, 0.0, finish="length"), whole]) == [whole]
    assert judge.dropped == {"2_truncated": 1}


def test_a_rejected_group_that_another_round_would_replace_is_kept() -> None:
    whole = with_tools(1.0, 0.0)
    assert rules(rejected_if_others_come).keep([whole]) == [whole]


def test_an_argument_that_a_run_does_not_have_is_named() -> None:
    said = r"reads_an_unknown_argument.* failed .*args\.rollout_num_gpus is not known here"
    with pytest.raises(SelectionError, match=said):
        rules(reads_an_unknown_argument).keep([with_tools(1.0, 0.0)])


@pytest.mark.parametrize("name", ["takes_one", "nowhere", "keeps_none"])
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(name: str) -> None:
    path = f"{__name__}:{name}"
    for config in (
        SamplingConfig(filters=[f"slime_filter({path})"]),
        SamplingConfig(over_sampling_batch_size=4, over_sampling_filter=path),
    ):
        with pytest.raises(
            ConfigError, match=r"\(args, samples\)|has no attribute 'nowhere'|async"
        ):
            GroupFilter(config)


async def test_a_runs_groups_are_judged_with_their_samples(tmp_path: Path) -> None:
    path = f"{__name__}:not_truncated"
    config = small_config(
        tmp_path, f"sampling.filters=[nonzero_std,slime_filter({path})]", "trainer.total_steps=2"
    )

    def cut(task: Any, index: int) -> dict[str, Any]:
        return {"finish_reason": "length" if task["instance_id"] == "train1" else "stop"}

    async with small_run(config) as run:
        run.rollouts.step = cut
        records = await run.train()
        trained = {s.prompt_uid.rpartition("-")[0] for steps in run.backend.steps for s in steps}
        reasons = (await run.pool.get_statistics(TRAIN))["groups"]["drop_reasons"]
    assert trained == {"train0", "train2", "train3", "train4"}
    assert records[-1]["sampling/filtered/2_truncated"] == 1
    assert reasons == {}


def test_a_config_error_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.filters: selection\.filters\[0\] is 'slime_"):
        GroupFilter(SamplingConfig(filters=["slime_filter"]))
