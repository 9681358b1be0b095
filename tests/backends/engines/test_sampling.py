"""Sampling: restricted where asked, unbiased, reproducible, scored before the filters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from stepwell.backends.engines.embedded.request import (
    GenerateBody,
    InvalidRequestError,
    Request,
    SamplingParams,
)
from stepwell.backends.engines.embedded.sampling import sample


def parse(params: dict[str, object]) -> SamplingParams:
    body = {"input_ids": [1], "sampling_params": params}
    return GenerateBody.parse(json.dumps(body).encode()).sampling_params


def request(**params: object) -> Request:
    return Request("r", [1], parse(params))


def draw(logits: torch.Tensor, params: dict[str, object], n: int = 2000) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    requests = [request(**params)] * n
    return np.array(sample(logits.repeat(n, 1), requests, generator).ids)


LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.07, 0.03]]))


def test_frequencies_follow_the_probabilities() -> None:
    found = np.bincount(draw(LOGITS, {}, 40_000), minlength=5) / 40_000
    np.testing.assert_allclose(found, LOGITS.exp()[0].numpy(), atol=0.01)


def test_temperature_sharpens_before_sampling() -> None:
    found = np.bincount(draw(LOGITS, {"temperature": 0.5}, 40_000), minlength=5) / 40_000
    expected = torch.softmax(LOGITS[0] / 0.5, -1).numpy()
    np.testing.assert_allclose(found, expected, atol=0.01)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 2**70}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"min_p": 0.45}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.35}, {0}),
        ({"temperature": 0}, {0}),
    ],
)
def test_filters_keep_exactly_the_likely_tokens(
    params: dict[str, object], allowed: set[int]
) -> None:
    assert set(draw(LOGITS, params)) == allowed


def test_log_probs_ignore_the_filters() -> None:
    out = sample(LOGITS.clone(), [request(top_k=1, temperature=0.5)], torch.Generator())
    expected = torch.log_softmax(LOGITS[0] / 0.5, -1)
    assert out.log_probs[0] == pytest.approx(float(expected[out.ids[0]]), abs=1e-6)


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    requests = [request(temperature=0), request(top_k=2), request(), request(top_p=0.3)]
    for seed in range(50):
        out = sample(LOGITS.repeat(4, 1), requests, torch.Generator().manual_seed(seed))
        assert out.ids[0] == 0
        assert out.ids[1] in (0, 1)
        assert out.ids[3] == 0


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    assert set(draw(logits, {}, 5000)) == {1, 3}
    assert set(draw(logits, {"temperature": 1e300}, 5000)) == {1, 3}


def test_unknown_and_unsupported_parameters_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.tempature: Extra"):
        parse({"tempature": 1})
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.regex: Extra"):
        parse({"regex": "a+"})
    assert parse({"frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": None})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"stop": [""]},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": "yes"},
        {"n": 2},
    ],
)
def test_values_out_of_bounds_are_refused_by_name(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(params))):
        parse(params)
