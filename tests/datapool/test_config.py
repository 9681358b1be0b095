"""The `pool` section of a run's configuration."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from stepwell.datapool import ChannelConfig, PoolConfig


def test_a_channel_not_named_has_the_default():
    config = PoolConfig.model_validate(
        {"default": {"n_rollouts": 8}, "channels": {"val": {"max_queue_size": 3}}}
    )
    assert config.channel("train").n_rollouts == 8
    assert config.channel("val") == ChannelConfig(max_queue_size=3)


@pytest.mark.parametrize(
    "section",
    [
        {"default": {"n_rollouts": 0}},
        {"default": {"max_queue_size": 0}},
        {"default": {"lease_s": float("inf")}},
        {"default": {"group_deadline_s": 0}},
        {"remembered_uids": -1},
        {"durability": "none", "memory_limit_bytes": 1},
        {"durability": "none", "channels": {"val": {"overflow": "spill", "max_bytes": 1}}},
        {"chanels": {}},
        {"channels": {"val": {"n_rollout": 4}}},
    ],
)
def test_values_out_of_bounds_and_unknown_keys_are_refused(section):
    with pytest.raises(ValidationError):
        PoolConfig.model_validate(section)


@pytest.mark.parametrize("section", [PoolConfig, ChannelConfig])
def test_every_field_says_what_it_means(section):
    properties = section.model_json_schema()["properties"]
    assert all(properties[field]["description"] for field in section.model_fields)


def test_a_field_keeps_the_meaning_that_its_base_or_its_own_class_gives_it():
    class Longer(PoolConfig):
        shards: int = 2
        """Mine."""
        more: int = Field(default=0, description="In its field.")
        """Not this."""
        bare: int = 0

    properties = Longer.model_json_schema()["properties"]
    assert [properties[name].get("description") for name in ("shards", "more", "bare")] == [
        "Mine.",
        "In its field.",
        None,
    ]
    known = PoolConfig.model_json_schema()["properties"]["durability"]["description"]
    assert properties["durability"]["description"] == known
    assert known.startswith("Failures that an acknowledged change survives: `none`")
