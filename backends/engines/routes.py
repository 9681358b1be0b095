"""Routes of SGLang's HTTP API that a run asks of an engine, and what is lost without each.

    check_routes(engine, config)    at the start of a run: one line says what the server lacks

A route is looked for by `OPTIONS`, which changes nothing there. `stepwell doctor --engine` shows
the same routes one by one; `docs/design/engines.md` has them as a table. Does not own the fields
that are read of an answer (`client.py`, the gateway's `answers.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineError, EngineStartError

log = logging.getLogger(__name__)

TESTED = "0.5.23"
"""SGLang's version that `make test-sglang` runs; the extra `sglang` asks for it or a newer one."""

READ: Mapping[str, str] = {
    "/health": "the engine gets no calls",
    "/model_info": "weights cannot be published",
    "/v1/models": "gateway.context_length and engine.context_length have to be set",
    "/server_info": "weights cannot be published",
    "/generate": "no call is answered",
}
"""Routes whose answers are read, and what is lost without each."""
NEEDED: Mapping[str, str] = {
    "/abort_request": "calls that nobody waits for are sampled to their end",
    "/pause_generation": "weights cannot be published",
    "/continue_generation": "weights cannot be published",
    "/update_weights_from_disk": "weights cannot be published",
}
"""Routes of commands without which a run does not train, and what is lost."""
_FEATURES: Mapping[str, tuple[str, ...]] = {
    "engine.weight_transport=distributed": (
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_distributed",
    ),
    "engine.weight_transport=lora": (
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/update_weight_version",
    ),
    "engine.release_memory=true": ("/release_memory_occupation", "/resume_memory_occupation"),
}
"""Setting -> the routes that it needs."""
OPTIONAL: Mapping[str, str] = {
    "/weights_checker": "publications do not verify the weights that an engine has",
    "/v1/loads": "`stepwell top` shows no load",
    **{path: f"no {setting}" for setting, paths in _FEATURES.items() for path in paths},
}
"""Routes of single features, and what is lost without each."""
_LOST: Mapping[str, str] = {**READ, **NEEDED, **OPTIONAL}


async def missing_routes(engine: EngineClient) -> list[str]:
    """Routes that the server does not have, in the order of the tables.

    Raises:
        EngineError: it cannot be asked.
    """
    paths = [*_LOST]
    there = await asyncio.gather(*map(engine.has_route, paths))
    return [path for path, is_there in zip(paths, there, strict=True) if not is_there]


async def check_routes(engine: EngineClient, config: EngineConfig, *, publishes: bool) -> None:
    """Log what the server lacks, in one line.

    Args:
        publishes: weights are sent to it, by the ways of `config`.

    Raises:
        EngineStartError: it lacks what that needs.
        EngineError: it cannot be asked.
    """
    missing = await missing_routes(engine)
    if not missing:
        return
    name = await server_name(engine)
    needed = _needed(config) if publishes else ()
    if fatal := [path for path in missing if path in needed]:
        raise EngineStartError(
            f"the engine at {_told(engine, name, fatal)}; start SGLang {TESTED} or newer there; "
            "`stepwell doctor --engine URL` says all that it lacks"
        )
    log.warning("the engine at %s; tested is SGLang %s", _told(engine, name, missing), TESTED)


def _needed(config: EngineConfig) -> Collection[str]:
    """Routes that training with `config` asks for; `/v1/models` only if no length is set."""
    settings = [f"engine.weight_transport={config.weight_transport}"]
    if config.release_memory:
        settings.append("engine.release_memory=true")
    chosen = {path for setting in settings for path in _FEATURES.get(setting, ())}
    return {*READ, *NEEDED, *chosen} - {"/v1/models"}


def _told(engine: EngineClient, name: str, missing: Iterable[str]) -> str:
    """Return text: each missing route, and what its loss costs the run."""
    by_loss: dict[str, list[str]] = {}
    for path in missing:
        by_loss.setdefault(_LOST[path], []).append(path)
    lost = "; ".join(f"{', '.join(paths)} ({loss})" for loss, paths in by_loss.items())
    return f"{engine.url}{name and f' ({name})'} lacks {lost}"


async def server_name(engine: EngineClient) -> str:
    """Return the server's name for itself, e.g. "sglang 0.5.9" or "vllm"; empty if it has none."""
    words: list[object] = []
    with suppress(EngineError):
        words.append((await engine.served_model()).get("owned_by"))
    with suppress(EngineError):
        words.append((await engine.server_info()).get("version"))
    return " ".join(word for word in words if isinstance(word, str))
