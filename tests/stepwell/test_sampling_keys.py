"""The keys of sampling reach the gateway by channel."""

from __future__ import annotations

import pytest

from stepwell.cluster.parts import channel_sampling
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.gateway.config import ChannelSampling
from stepwell.trainer.errors import ConfigError


def chosen(config: RunConfig) -> dict[str, ChannelSampling]:
    return channel_sampling(config.rollout, config.validation, config.gateway.channels)


def test_validation_samples_as_rollouts_do_but_for_the_keys_of_its_own() -> None:
    config = load_config(
        "quickstart",
        [
            "rollout.temperature=1.0",
            "rollout.top_p=0.9",
            "rollout.max_tokens=64",
            "rollout.max_response_tokens=256",
            "validation.temperature=0",
            "validation.max_tokens=128",
        ],
    )
    assert chosen(config) == {
        "train": ChannelSampling(1.0, 0.9, None, 64, max_response_tokens=256),
        "val": ChannelSampling(0.0, 0.9, None, 128, max_response_tokens=256),
    }


def test_one_text_or_id_that_ends_responses_needs_no_list() -> None:
    config = load_config(
        "quickstart",
        ["rollout.stop=</search>", "rollout.stop_token_ids=7", "validation.stop=[end, fin]"],
    )
    assert chosen(config) == {
        "train": ChannelSampling(stop=("</search>",), stop_token_ids=(7,)),
        "val": ChannelSampling(stop=("end", "fin"), stop_token_ids=(7,)),
    }


def test_agents_that_come_by_themselves_are_sampled_as_rollouts_are() -> None:
    keys = ["gateway.channel=collected", "rollout.temperature=0.7", "validation.temperature=0"]
    sampling = chosen(load_config("quickstart", keys))
    assert {name: channel.temperature for name, channel in sampling.items()} == {
        "train": 0.7,
        "collected": 0.7,
        "val": 0.0,
    }


def test_without_keys_agents_choose() -> None:
    assert set(chosen(load_config("quickstart")).values()) == {ChannelSampling()}


@pytest.mark.parametrize("part", ["engine", "gateway"])
@pytest.mark.parametrize("section", ["rollout", "validation"])
def test_a_response_as_long_as_the_context_leaves_no_room_for_a_prompt(
    section: str, part: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{section}.max_tokens is 64 but {part}.context_length"):
        load_config("quickstart", [f"{part}.context_length=64", f"{section}.max_tokens=64"])
