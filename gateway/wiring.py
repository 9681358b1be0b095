"""This module records what a gateway is told at its start beside its configuration, so that no
option holds what only the start can know.

    the shell ── Wiring(engines) ──► replicas.py ── each one its number ──► create_app

Does not own: the options (`config.py`), which engine a call goes to (`fleet.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.gateway.config import TUNING, Tuning


@dataclass(frozen=True, slots=True)
class ChannelSampling:
    """Sampling parameters of all calls of a channel. None: as the agent asks."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 is no limit."""
    max_tokens: int | None = None
    """Longest response of one call; one that asks for less gets less."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response, beside those that the agent asks for; cut off alike."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that do."""
    max_response_tokens: int | None = None
    """Tokens of a conversation behind its first prompt."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which engines a gateway generates with and how it samples, and which of several gateways it
    is.
    """

    engine_urls: tuple[str, ...] = ()
    """SGLang servers (or embedded engines); a trajectory stays on one."""
    lora_path: str | None = None
    """Name of the LoRA adapter that generates; None: the engines' model itself."""
    sampling: Mapping[str, ChannelSampling] = field(default_factory=dict)
    """Sampling by channel; in a channel that is not named, agents choose."""
    canary_share: float = 0.0
    """Share of new trajectories that go to an engine whose version is not committed, while there is
    one."""
    replica: int = 0
    """Which of the gateways that share the work this one is."""
    replica_urls: tuple[str, ...] = ()
    """Origins of all of them."""
    run_dir: Path | None = None
    """Folder of the run, whose files the dashboard shows; None: there is none."""
    tuning: Tuning = TUNING
    read_only: bool = False
    """The run is over: the pool is only read."""

    def __post_init__(self) -> None:
        urls = tuple(dict.fromkeys(url.rstrip("/") for url in self.engine_urls))
        object.__setattr__(self, "engine_urls", urls)
