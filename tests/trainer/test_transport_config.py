"""A weight transport that cannot work is refused before anything starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepwell.backends.weights.transports import Disk, Ipc, Nccl
from stepwell.cluster.placement import Bundle, Mode, Node, Placement, Plan, Seat
from stepwell.config.load import load_config
from stepwell.run.checks import engine
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


def shared(mode: Mode = "colocated", *, engine_on_gpu: bool = True) -> Placement:
    """Rank 0 on a GPU, and an engine on that one or on another, or on none."""
    seats = (Seat(0 if mode == "colocated" else 1, 0.5),) if engine_on_gpu else ()
    bundles = (Bundle(0, "10.0.0.2", "a", ("0",)), Bundle(1, "10.0.0.2", "a", ("1",)))
    return Placement(Plan(mode, (1, 1), (Seat(0, 0.5),), (), seats), bundles)


HERE, THERE = Node("10.0.0.2", "a", 4, is_driver=True), Node("10.0.0.3", "b", 4)


@pytest.mark.parametrize(
    ("overrides", "plan", "why"),
    [
        ([], Plan("plain"), None),
        ([], Plan("colocated"), None),
        (["cluster.engines=2"], Plan("colocated"), None),
        ([], Plan("plain", cpu_engines=(HERE, THERE)), "on several machines"),
        (["engine.kind=attach", "engine.urls=[http://a:1]"], Plan("plain"), "torch of"),
        (["engine.python=/bin/true"], Plan("plain"), "/bin/true none"),
    ],
)
def test_memory_is_shared_on_a_machine_where_both_have_the_same_torch(
    overrides: list[str], plan: Plan, why: str | None
) -> None:
    config = load_config("quickstart", ["engine.weight_transport=ipc", *overrides])
    found = shares_nothing(config, Placement(plan))
    assert found is None if why is None else why in str(found)
    said: list[str] = []
    transport = transport_of(config, Placement(plan), RecordingBackend(), said.append)
    assert isinstance(transport, Ipc if why is None else Nccl)
    assert len(said) == (why is not None)


@pytest.mark.parametrize(
    ("overrides", "mode", "on_host"),
    [
        ([], "colocated", False),
        (["cluster.gpus_per_engine=2"], "colocated", True),
        (["cluster.engines=2"], "colocated", True),
        ([], "disaggregated", True),
    ],
)
def test_memory_of_a_gpu_is_shared_by_one_engine_on_it_and_the_machines_by_all(
    overrides: list[str], mode: Mode, on_host: bool
) -> None:
    config = load_config("quickstart", ["engine.weight_transport=ipc", *overrides])
    sender = Asked()
    transport = transport_of(config, shared(mode), sender, lambda _: None)
    assert isinstance(transport, Ipc)
    asyncio.run(transport._offer(0))
    assert sender.calls == [("use",), ("share", 0, 1, on_host)]


class Asked(RecordingBackend):
    """A backend that notes what its sender is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def lead(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))


def test_where_engines_share_gpus_with_ranks_nccl_gives_way_to_the_disk() -> None:
    """NCCL refuses two processes on one GPU, after a time-out at every publication."""
    said: list[str] = []
    colocated = shared()
    for overrides in (["nccl"], ["ipc", "engine.python=/bin/true"]):
        given = [f"engine.weight_transport={overrides[0]}", *overrides[1:]]
        config = load_config("quickstart", given)
        transport = transport_of(config, colocated, RecordingBackend(), said.append)
        assert isinstance(transport, Disk)
    assert "takes one process on each; disk is used" in said[0]
    assert said[1].endswith("/bin/true none; disk is used")


@pytest.mark.parametrize(
    "overrides", [[], ["engine.kind=attach", "engine.urls=[http://a:1]"]], ids=["cpu", "attached"]
)
def test_an_engine_that_is_on_no_gpu_of_the_run_shares_none(overrides: list[str]) -> None:
    """Although `cluster.placement` says so."""
    said: list[str] = []
    beside = shared(engine_on_gpu=False)
    for wanted, kind in (("nccl", Nccl), ("ipc", Nccl if overrides else Ipc)):
        config = load_config("quickstart", [f"engine.weight_transport={wanted}", *overrides])
        sender = Asked()
        transport = transport_of(config, beside, sender, said.append)
        assert isinstance(transport, kind)
        if isinstance(transport, Ipc):
            asyncio.run(transport._offer(0))
            assert sender.calls[-1] == ("share", 0, 1, True)
    assert len(said) == bool(overrides)  # of "ipc"


def test_vllm_takes_no_handles_and_says_why() -> None:
    config = load_config("quickstart", ["engine.kind=vllm", "engine.weight_transport=ipc"])
    with pytest.raises(ConfigError, match=r"takes disk and nccl.*VLLM_ALLOW_INSECURE"):
        engine(config)
