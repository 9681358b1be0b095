"""A weight transport that cannot work is refused before anything starts."""

from __future__ import annotations

import pytest

from stepwell.backends.weights.transports import Ipc, Nccl
from stepwell.cluster.placement import Mode
from stepwell.config.load import load_config
from stepwell.run.trainer import shares_nothing, transport_of
from stepwell.trainer.errors import ConfigError
from tests.trainer.small_run import RecordingBackend


def test_adapters_are_published_only_of_a_backend_that_trains_one() -> None:
    with pytest.raises(ConfigError, match=r"weight_transport is 'lora', but backend\.lora"):
        load_config("quickstart", ["engine.weight_transport=lora"])
    config = load_config("quickstart", ["engine.weight_transport=lora", "backend.lora.rank=4"])
    assert config.engine.weight_transport == "lora"


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ConfigError, match=r"weight_transport.*pigeon|pigeon.*weight_transport"):
        load_config("quickstart", ["engine.weight_transport=pigeon"])


@pytest.mark.parametrize(
    ("overrides", "mode", "why"),
    [
        ([], "plain", None),
        ([], "colocated", None),
        ([], "disaggregated", "shares its GPU with one engine alone"),  # by cluster.placement=auto
        (["engine.kind=attach", "engine.urls=[http://a:1]"], "plain", "torch of"),
        (["cluster.engines=2"], "colocated", "shares its GPU with one engine alone"),
        (["engine.python=/bin/true"], "plain", "/bin/true none"),
    ],
)
def test_memory_is_shared_where_both_have_the_same_torch(
    overrides: list[str], mode: Mode, why: str | None
) -> None:
    config = load_config("quickstart", ["engine.weight_transport=ipc", *overrides])
    found = shares_nothing(config, mode)
    assert found is None if why is None else why in str(found)
    said: list[str] = []
    transport = transport_of(config, mode, RecordingBackend(), said.append)
    assert isinstance(transport, Ipc if why is None else Nccl)
    assert len(said) == (why is not None)
