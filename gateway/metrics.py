"""This module is what Prometheus reads at `/metrics`: the gateway's own counts, the engines as it
sees them, and the pool, which it asks.

    scrape ──► Services.statistics() ─┬─► families (`datapool/inspect/metrics.py`) ──► text
               pool.get_statistics() ─┘

Counts nothing: a call costs the same whether somebody scrapes or not. Every replica tells of the
same pool. Does not own the counts, or how a table becomes families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stepwell.datapool.inspect.metrics import COUNTER, GAUGE, POOL, Family, families


def _of_calls(name: str, help: str, key: str) -> Family:
    return Family(f"stepwell_gateway_{name}", COUNTER, help, lambda found: found["calls"].get(key))


def _of_engines(name: str, help: str, read: Callable[[Mapping[str, Any]], float | None]) -> Family:
    """A family that reads the statistics of each engine."""

    def of_each(found: Mapping[str, Any]) -> dict[str, float | None]:
        return {engine["url"]: read(engine) for engine in found["engine"]["engines"]}

    return Family(f"stepwell_engine_{name}", GAUGE, help, of_each, ("engine",))


def _latency(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Seconds by quantile."""
    latency = found["added_latency"]
    quantiles = {"0.5": latency["p50_ms"], "0.99": latency["p99_ms"]}
    return {q: ms if ms is None else ms / 1000 for q, ms in quantiles.items()}


GATEWAY: Final = (
    _of_calls("calls", "LLM calls that were begun; repeated ones are not", "calls"),
    _of_calls("calls_retried", "Calls that repeat another one, and got its answer", "retries"),
    _of_calls("calls_recalled", "Repeated calls answered from the pool", "recalled"),
    _of_calls("calls_failed", "Calls that were answered with an error", "failed"),
    _of_calls("calls_disconnected", "Calls whose client left before the answer", "disconnected"),
    _of_calls("steps_stored", "Steps that the pool has acknowledged", "stored"),
    _of_calls("response_tokens", "Tokens of these Steps' responses", "response_tokens"),
    _of_calls("fields_ignored", "Fields of requests that were left aside", "ignored_fields"),
    Family(
        "stepwell_gateway_calls_unrecorded",
        COUNTER,
        "Calls that were answered and not stored, by reason",
        lambda found: found["recording"]["unrecorded"],
        ("reason",),
    ),
    Family(
        "stepwell_gateway_rewards_not_kept",
        COUNTER,
        "Rewards, completions and feedback that are not kept: late; the trajectory was closed "
        "otherwise before; or it is unrecorded, without a Step",
        lambda found: found["rewards"]["not_kept"],
        ("reason",),
    ),
    Family(
        "stepwell_gateway_branches",
        COUNTER,
        "Calls whose prompt extends no earlier turn of its trajectory, by cause",
        lambda found: found["branches"],
        ("cause",),
    ),
    Family(
        "stepwell_gateway_trajectories_open",
        GAUGE,
        "Trajectories that are open here",
        lambda found: found["open_trajectories"],
    ),
    Family(
        "stepwell_gateway_calls_running",
        GAUGE,
        "Calls that are generating",
        lambda found: found["limits"]["running"],
    ),
    Family(
        "stepwell_gateway_calls_waiting",
        GAUGE,
        "Calls that wait for one of max_concurrent_calls",
        lambda found: found["limits"]["waiting"],
    ),
    Family(
        "stepwell_gateway_calls_refused",
        COUNTER,
        "Calls that waited too long for one of max_concurrent_calls",
        lambda found: found["limits"]["refused"],
    ),
    Family(
        "stepwell_gateway_added_latency_seconds",
        GAUGE,
        "What the gateway added to the last 4,096 calls, engine and pool left out",
        _latency,
        ("quantile",),
    ),
    Family(
        "stepwell_gateway_tokenizer_fast",
        GAUGE,
        "1: fastokens encodes texts; 0: tokenizers does, which is slower",
        lambda found: found["tokenizer"]["fast"],
    ),
    Family(
        "stepwell_gateway_aborts_owed",
        GAUGE,
        "Trajectories that the pool, which is away, is still to abort",
        lambda found: found["recording"]["owed_aborts"],
    ),
    Family(
        "stepwell_gateway_replica_up",
        GAUGE,
        "1: the gateway at this address answers",
        lambda found: {replica["url"]: replica["up"] for replica in found["replicas"]},
        ("url",),
    ),
)
ENGINES: Final = (
    _of_engines(
        "up",
        "1: it gets calls; 0: it is down, ailing, failing or has old weights",
        lambda engine: engine["state"] == "up",
    ),
    _of_engines(
        "calls", "Calls that it has from this gateway now", lambda engine: engine["in_flight"]
    ),
    _of_engines(
        "policy_version",
        "Newest policy version that it reported",
        lambda engine: engine["version"],
    ),
    _of_engines(
        "canary", "1: that version is being tried out on it", lambda engine: engine["canary"]
    ),
    Family(
        "stepwell_engines_policy_version",
        GAUGE,
        "Highest policy version of any of them, canaries' left out",
        lambda found: found["engine"]["version"],
    ),
    Family(
        "stepwell_engines_calls_resumed",
        COUNTER,
        "Calls that a weight update interrupted, and that went on",
        lambda found: found["engine"]["resumes"],
    ),
    Family(
        "stepwell_engines_calls_recovered",
        COUNTER,
        "Calls that went on with another engine",
        lambda found: found["engine"]["recoveries"],
    ),
    Family(
        "stepwell_engines_requests_retried",
        COUNTER,
        "Requests to an engine that were made again",
        lambda found: found["engine"]["retries"],
    ),
    Family(
        "stepwell_engines_used_behind",
        COUNTER,
        "Calls sent to an engine with old weights, for want of another",
        lambda found: found["engine"]["used_behind"],
    ),
)
POOL_UP: Final = Family(
    "stepwell_pool_up",
    GAUGE,
    "1: the pool answered this scrape",
    lambda pool: pool is not None,
)


class _Page(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


def exposition(
    accept: str, statistics: Mapping[str, Any], pool: Mapping[str, Mapping[str, Any]] | None
) -> tuple[bytes, str]:
    """The page, and its content type.

    Args:
        accept: of the request: Prometheus' text, or OpenMetrics.
        statistics: `Services.statistics`.
        pool: the answer to `GetStatistics`; None: the pool does not answer.
    """
    found = [
        *families((*GATEWAY, *ENGINES), statistics),
        *families([POOL_UP], pool),
        *families(POOL, pool or {}),
        *ProcessCollector(registry=None).collect(),
    ]
    encode, content_type = choose_encoder(accept)
    return encode(_Page(found)), content_type
