"""On several nodes every part listens where those that need it reach it, and with a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from stepwell.backends.config import EngineConfig
from stepwell.cluster.parts import Network
from stepwell.cluster.placement import Node
from stepwell.gateway.config import GatewayConfig

HERE = Node("10.0.0.1", "a", 0, is_driver=True)
THERE = Node("10.0.0.2", "b", 0)
ENGINE = EngineConfig(model_path=Path("model"))
KEY = "k" * 20
OWN = SecretStr("o" * 43)


def test_on_one_node_everything_stays_on_loopback() -> None:
    network, gateway = Network([HERE]), GatewayConfig()
    assert network.gateway(gateway, OWN) == gateway
    assert network.engine(ENGINE, gateway, None) == ENGINE
    assert network.engine(ENGINE, gateway, HERE.ip) == ENGINE


def test_on_several_nodes_the_gateway_is_reached_from_all_of_them_with_a_key_of_the_run() -> None:
    chosen = Network([THERE, HERE]).gateway(GatewayConfig(), OWN)
    assert chosen.host == "10.0.0.1"
    assert chosen.admin_keys == (OWN,)


@pytest.mark.parametrize("nodes", [[HERE], [HERE, THERE]])
def test_beside_keys_that_are_configured_a_run_has_one_of_its_own(nodes: list[Node]) -> None:
    network = Network(nodes)
    gateway = network.gateway(GatewayConfig.model_validate({"admin_keys": KEY}), OWN)
    assert [key.get_secret_value() for key in gateway.admin_keys] == [KEY, OWN.get_secret_value()]
    bot = {"bot": {"key": KEY}}
    assert network.gateway(GatewayConfig.model_validate({"agent_keys": bot}), OWN).admin_keys


def test_an_engine_beside_its_gateway_stays_on_loopback_and_one_elsewhere_does_not() -> None:
    network = Network([HERE, THERE])
    gateway = network.gateway(GatewayConfig(), OWN)
    assert network.engine(ENGINE, gateway, None).host == "127.0.0.1"
    assert network.engine(ENGINE, gateway, "10.0.0.1").host == "127.0.0.1"
    assert network.engine(ENGINE, gateway, "10.0.0.2").host == "10.0.0.2"


def test_engines_are_reached_by_gateways_that_are_spread() -> None:
    network = Network([HERE, THERE])
    spread = GatewayConfig.model_validate({"host": "0.0.0.0", "replicas": 2, "admin_keys": KEY})
    gateway = network.gateway(spread, OWN)
    assert gateway.host == "0.0.0.0"
    assert network.engine(ENGINE, gateway, None).host == "10.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.9"])
def test_a_host_that_is_configured_stays(host: str) -> None:
    network = Network([HERE, THERE])
    gateway = GatewayConfig.model_validate({"host": host, "admin_keys": KEY})
    assert network.gateway(gateway, OWN).host == host
    engine = ENGINE.model_copy(update={"host": host})
    assert network.engine(engine, GatewayConfig(), "10.0.0.2").host == host


def test_an_engine_host_that_is_a_name_stays() -> None:
    engine = ENGINE.model_copy(update={"host": "gpu-1.cluster"})
    assert Network([HERE, THERE]).engine(engine, GatewayConfig(), "10.0.0.2") == engine
