"""The keys of sampling reach the gateway by channel."""

from __future__ import annotations

import pytest

from stepwell.cluster import channel_sampling
from stepwell.gateway.wiring import ChannelSampling
from stepwell.presets import load_config
from stepwell.trainer.errors import ConfigError


def test_validation_samples_as_rollouts_do_but_for_the_keys_of_its_own() -> None:
    config = load_config(
        "quickstart",
        [
            *("rollout.temperature=1.0", "rollout.top_p=0.9", "rollout.max_tokens=64"),
            *("validation.temperature=0", "validation.max_tokens=128"),
        ],
    )
    assert channel_sampling(config.rollout, config.validation) == {
        "train": ChannelSampling(1.0, 0.9, None, 64),
        "val": ChannelSampling(0.0, 0.9, None, 128),
    }


def test_without_keys_agents_choose() -> None:
    config = load_config("quickstart")
    chosen = channel_sampling(config.rollout, config.validation)
    assert set(chosen.values()) == {ChannelSampling()}


@pytest.mark.parametrize("section", ["rollout", "validation"])
def test_a_response_as_long_as_the_context_leaves_no_room_for_a_prompt(section: str) -> None:
    with pytest.raises(ConfigError, match=f"{section}.max_tokens is 64 but engine.context_length"):
        load_config("quickstart", ["engine.context_length=64", f"{section}.max_tokens=64"])
