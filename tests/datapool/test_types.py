"""A Step refuses what is no step, however its numbers come, and stays what it was made."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from stepwell.datapool import Step
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.types import VersionSpan, trusted_step


def step(**values):
    known = {"prompt_ids": [1, 2], "response_ids": [3, 4]}
    return Step(**known | {"trajectory_uid": "t", "prompt_uid": "p"} | values)


def ways(values, dtype):
    """The numbers as a list, an array that may change, and one that may not."""
    array = np.array(values, dtype)
    return values, array, np.frombuffer(array.tobytes(), dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0011, 0.002, 1.0])
def test_numbers_that_are_no_log_probabilities_are_refused(value):
    for log_probs in ways([-0.5, value], np.float32):
        with pytest.raises(
            InvalidStepError, match=r"'t'\[0\]: rollout_log_probs holds values that"
        ):
            step(rollout_log_probs=log_probs)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, 4.8e-4, 4.9e-4, 1e-3, -1e-45, -1.6e38, -1.8e38, -3.4e38]
)
def test_every_finite_log_probability_is_taken_and_a_hair_above_zero(value):
    for log_probs in ways([-0.5, value], np.float32):
        taken = step(rollout_log_probs=log_probs).rollout_log_probs
        assert taken.tolist() == np.array([-0.5, value], np.float32).tolist()


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_ids_lie_between_0_and_2_to_the_31(name):
    for ids in (*ways([0, 2**31 - 1, 255, 1 << 24], np.int32), np.array([7, 9], np.int64)):
        assert getattr(step(**{name: ids}), name).tolist() == list(ids)
    for ids in (*ways([5, -1], np.int32), [2**31], [1 << 70], np.array([-(2**40)])):
        with pytest.raises(InvalidStepError, match=name):
            step(**{name: ids})
    for ids in ([1.0], ["a"], [True], [[1]], []):
        with pytest.raises(InvalidStepError, match=name):
            step(**{name: ids})


def test_nobody_changes_a_step_nor_the_array_that_it_was_made_of():
    array = np.array([1, 2], np.int32)
    made = step(prompt_ids=array, rollout_log_probs=[-0.5, -1.0])
    array[0] = 9
    assert made.prompt_ids.tolist() == [1, 2]
    trusted = trusted_step(*(getattr(made, f.name) for f in fields(made)))
    for each in (made, trusted, pickle.loads(pickle.dumps(made))):
        assert type(each) is Step
        assert each == made
        for column in (each.prompt_ids, each.response_ids, each.rollout_log_probs):
            assert not column.flags.writeable
        with pytest.raises(FrozenInstanceError):
            each.reward = 1.0


def test_a_dictionary_that_lacks_fields_or_has_others_is_refused_by_their_names() -> None:
    whole = step().to_dict()
    lacking = {k: v for k, v in whole.items() if k not in ("response_ids", "prompt_uid")}
    with pytest.raises(InvalidStepError, match=r"a Step needs response_ids, prompt_uid, too"):
        Step.from_dict(lacking)
    with pytest.raises(InvalidStepError, match=r"a Step has no colour, size; see Step\.to_dict"):
        Step.from_dict({**whole, "size": 1, "colour": 2})


@pytest.mark.parametrize(
    "params",
    [
        ["hot"],
        {"temperature": "hot"},
        {"temperature": [1]},
        {"temperature": -1},
        {"temperature": math.nan},
    ],
)
def test_a_dictionary_whose_temperature_cannot_be_read_is_refused(params: object) -> None:
    """The trainer would fail on it, once in every process that is served the step."""
    whole = step().to_dict()
    with pytest.raises(InvalidStepError, match=r"sampling_params is .*temperature"):
        Step.from_dict({**whole, "metadata": {"sampling_params": params}})
    for known in ({}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": None}, None):
        made = Step.from_dict({**whole, "metadata": {"sampling_params": known}})
        assert made.temperature in (0.5, 1.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"version_spans": [VersionSpan("a", 0, 2)]}, "pass integers"),
        ({"version_spans": [VersionSpan(-1, 0, 2)]}, r"integers in \[0, 2\*\*63\)"),
        ({"version_spans": [VersionSpan(0, 0, 1)]}, r"do not cover \[0, 2\)"),
        ({"version_spans": [VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)]}, "do not cover"),
        ({"version_spans": [VersionSpan(4, 0, 2)]}, "the oldest span has version 4"),
        ({"trajectory_uid": ""}, "trajectory_uid is ''; pass a non-empty string"),
        ({"prompt_uid": 7}, "prompt_uid is 7; pass a non-empty string"),
        ({"step_index": -1}, "step_index is -1"),
        ({"policy_version": 1.5}, "policy_version is 1.5"),
        ({"is_last": 1}, "is_last is 1; pass True or False"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'"),
        ({"metadata": [1]}, "metadata is"),
        ({"step_index": 2, "parent_index": 2}, "parent_index is 2"),
    ],
)
def test_a_field_that_no_step_has_is_refused_by_its_name_and_value(values, said):
    with pytest.raises(InvalidStepError, match=said):
        step(**values)


def test_a_step_without_spans_may_be_of_any_version():
    assert step(version_spans=[], policy_version=3).version_spans == ()


def test_a_step_is_no_dictionary():
    assert step() != step().to_dict()
    assert step() == step()
