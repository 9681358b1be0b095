"""A weight transport that cannot work is refused before anything starts."""

from __future__ import annotations

import pytest

from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError


def test_adapters_are_published_only_of_a_backend_that_trains_one() -> None:
    with pytest.raises(ConfigError, match=r"weight_transport is 'lora', but backend\.lora"):
        load_config("quickstart", ["engine.weight_transport=lora"])
    config = load_config("quickstart", ["engine.weight_transport=lora", "backend.lora.rank=4"])
    assert config.engine.weight_transport == "lora"


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ConfigError, match=r"weight_transport.*pigeon|pigeon.*weight_transport"):
        load_config("quickstart", ["engine.weight_transport=pigeon"])
