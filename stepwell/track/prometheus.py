"""This module lets Prometheus read the trainer's metrics at a port of its own: what it scrapes is
the last line of metrics.jsonl, under names that stay.

    MetricsWriter ──record──► PrometheusTracker ◄──scrape── http://{gateway.host}:{port}/metrics

Owns the names. Does not own the figures (`trainer/metrics.py`), or the gateway's page
(`gateway/metrics.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stepwell.datapool.inspect.metrics import COUNTER, GAUGE, Family, families
from stepwell.gateway.address import bind
from stepwell.gateway.errors import GatewayError
from stepwell.trainer.errors import ConfigError

MOST_KEYS: Final = 500
"""Most keys exported of one record: a key may contain a data source's or a tool's name."""


def _gauge(name: str, help: str, key: str) -> Family:
    return Family(f"stepwell_trainer_{name}", GAUGE, help, lambda record: record.get(key))


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    return {m[1]: v for k, v in record.items() if (m := re.fullmatch(r"time/(\w+)_s", k))}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: record[key] for key in list(record)[:MOST_KEYS]}


TRAINER: Final = (
    Family(
        "stepwell_trainer_optimizer_steps",
        COUNTER,
        "Optimizer steps done",
        lambda record: record.get("step"),
    ),
    _gauge("policy_version", "Policy versions published", "policy_version"),
    _gauge("reward_mean", "Mean reward of the last step's trajectories", "reward/mean"),
    _gauge("reward_std", "Their standard deviation", "reward/std"),
    _gauge("no_signal_ratio", "Share of groups whose rewards are all equal", "groups/no_signal"),
    _gauge(
        "response_length_tokens", "Mean length of a trajectory's responses", "response_length/mean"
    ),
    _gauge(
        "truncated_ratio", "Share of trajectories that were cut off", "response_length/clip_ratio"
    ),
    _gauge("loss", "Value that was minimised", "loss"),
    _gauge("sft_loss_nats", "Mean loss of the step's conversations", "sft/loss"),
    _gauge("grad_norm", "Norm of the gradient before it was cut", "grad_norm"),
    _gauge("entropy_nats", "Mean entropy of trained tokens", "policy/entropy"),
    _gauge("kl_nats", "KL from the policy before the update, k3", "policy/kl_k3"),
    _gauge("reference_kl_nats", "KL to the reference policy", "kl/ref"),
    _gauge("learning_rate", "Learning rate", "lr"),
    _gauge("lag_versions", "Mean lag of the trained steps, in weight updates", "staleness/mean"),
    _gauge("log_prob_gap_nats", "Largest difference of engine and trainer", "log_prob_gap"),
    _gauge("tokens_per_second", "Tokens of the last step over its wall time", "tokens_per_s"),
    _gauge("starved_ratio", "Share of its time that the trainer waits", "wait/trainer_starved"),
    _gauge(
        "generation_saturated_ratio",
        "Share of generation's capacity that waits for the trainer",
        "wait/generation_saturated",
    ),
    Family(
        "stepwell_trainer_phase_seconds",
        GAUGE,
        "Wall time of the last step, by phase; step is all of it",
        _phases,
        ("phase",),
    ),
    Family(
        "stepwell_trainer_metric",
        GAUGE,
        "Every number of the last line of metrics.jsonl, by its name there (docs/metrics.md)",
        _numbers,
        ("key",),
    ),
)
"""Metric families of a record of metrics.jsonl."""


class PrometheusTracker(Collector):
    """Serves the newest figures; a `trainer.metrics.Tracker`."""

    def __init__(self, host: str, port: int) -> None:
        """
        Raises:
            ConfigError: the address cannot be used.
        """
        self._record: dict[str, Any] = {}
        check_address(host, port)
        self._server, self._thread = start_http_server(port, host, self)

    def __str__(self) -> str:
        return "Prometheus"

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        # Replaced, never changed: a scrape may read it. An evaluation may be of an earlier step.
        newest = max(step, int(self._record.get("step", 0)))
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float)}
        self._record = {**self._record, **numbers, "step": newest}

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Prometheus has none."""

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape."""
        yield from families(TRAINER, self._record, most=MOST_KEYS)
        yield from ProcessCollector(registry=None).collect()


def check_address(host: str, port: int) -> None:
    """
    Raises:
        ConfigError: nobody can listen there.
    """
    try:
        bind(host, port).close()
    except GatewayError as e:
        raise ConfigError(
            f"logging.prometheus_port is {port}, which cannot be used on {host} "
            f"({getattr(e.__cause__, 'strerror', e)}); choose another port, or null"
        ) from e
