"""This module chooses the addresses that gateway and engines listen on, so that every part of a run
reaches those it needs and nobody else more than that.

    one node                   loopback, as configured by default
    several nodes, gateway     the address of the driver's node, where it runs: rollout workers may
                               be on any. With an admin key: one is made if none is configured
    several nodes, an engine   loopback if it is on the driver's node, as the gateway, the router
                               and the trainer are; otherwise its own node's address

A host that is configured and no loopback address stays as it is. Engines know no keys: what they
listen on beyond loopback must be reached by the run's machines alone.

Pure. Does not own what runs where (`placement.py`, `cluster.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import SecretStr

from backends.config import EngineConfig
from gateway.config import GatewayConfig, is_loopback
from trainer.placement import Node


@dataclass(frozen=True, slots=True)
class Network:
    """The nodes of a run."""

    nodes: Sequence[Node]

    @property
    def _driver(self) -> Node:
        return next(node for node in self.nodes if node.is_driver)

    def gateway(self, config: GatewayConfig) -> GatewayConfig:
        """With the address to listen on, and a key if others reach it."""
        update: dict[str, object] = {}
        if len(self.nodes) > 1 and _is_loopback(config.host):
            update["host"] = self._driver.ip
            if not config.admin_keys:
                update["admin_keys"] = (SecretStr(secrets.token_urlsafe(32)),)
        return config.model_copy(update=update)

    def engine(self, config: EngineConfig, gateway: GatewayConfig, ip: str | None) -> EngineConfig:
        """With the address to listen on.

        Args:
            ip: of its node; None: the driver's.
        """
        elsewhere = ip is not None and ip != self._driver.ip
        if (elsewhere or self._is_spread(gateway)) and _is_loopback(config.host):
            return config.model_copy(update={"host": ip or self._driver.ip})
        return config

    def _is_spread(self, gateway: GatewayConfig) -> bool:
        """Its replicas are on several nodes."""
        everywhere = gateway.host in ("0.0.0.0", "::")
        return len(self.nodes) > 1 and gateway.replicas > 1 and everywhere


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name: somebody chose it
        return False
