"""Routes of HTTP engines that a run asks, and what is lost without each.

    check_routes(engine, config)    at the start of a run: one line says what the server lacks

A route is looked for by `OPTIONS`, which changes nothing there. `stepwell doctor --engine` shows
the same routes one by one; `docs/design/engines.md` has them as a table. Has SGLang's; another
engine's stand with it (`Engine.routes`). Does not own the fields that are read of an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import Engine, HttpEngine, Routes
from stepwell.backends.errors import EngineStartError

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
    "engine.weight_transport=nccl": (
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_distributed",
    ),
    "engine.weight_transport=ipc": (
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_tensor",
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
    **{path: f"no {setting}" for setting, paths in [*_FEATURES.items()][::-1] for path in paths},
}
"""Routes of single features, and what is lost without each."""
SGLANG = Routes(READ, NEEDED, OPTIONAL, _FEATURES, f"SGLang {TESTED}", "/generate")


async def missing_routes(engine: Engine) -> list[str]:
    """Routes that the server does not have, in the order of the tables.

    Raises:
        EngineError: it cannot be asked.
    """
    if not isinstance(engine, HttpEngine):
        return []
    paths = [*_losses(engine)]
    there = await asyncio.gather(*map(engine.has_route, paths))
    return [path for path, is_there in zip(paths, there, strict=True) if not is_there]


async def check_routes(engine: Engine, config: EngineConfig, *, publishes: bool) -> None:
    """Log what the server lacks, in one line.

    Args:
        publishes: weights are sent to it, by the ways of `config`.

    Raises:
        EngineStartError: it lacks what that needs, or answers what cannot be trained on.
        EngineError: it cannot be asked.
    """
    if config.is_attached and (why := await engine.why_not_trainable()) is not None:
        raise EngineStartError(f"the engine at {engine.url} {why}")
    missing = await missing_routes(engine)
    if not missing:
        return
    name, tested = await engine.name(), engine.routes.tested
    if (reason := await why_no_ids(engine, name, missing)) is not None:
        why, remedy = reason
        raise EngineStartError(f"the engine at {engine.url}{name and f' ({name})'} {why}; {remedy}")
    needed = _needed(engine, config) if publishes else ()
    if fatal := [path for path in missing if path in needed]:
        if engine.routes is SGLANG and name.startswith("nvidia"):
            raise EngineStartError(
                f"the engine at {engine.url} is NVIDIA Dynamo's frontend, which has no routes of "
                "weights; set engine.kind=dynamo, engine.urls to the system servers of its "
                "workers, and its option `frontend` to this url (docs/engines.md)"
            )
        raise EngineStartError(
            f"the engine at {_lacks_text(engine, name, fatal)}; start {tested} or newer there; "
            "`stepwell doctor --engine URL` says all that it lacks"
        )
    log.warning("the engine at %s; tested is %s", _lacks_text(engine, name, missing), tested)


async def why_no_ids(engine: Engine, name: str, missing: Collection[str]) -> tuple[str, str] | None:
    """Reason that a server which lacks the engine's route of tokens cannot be used, and the remedy;
    None: it has the route.

    Args:
        missing: routes of the engine's that it does not have.
    """
    routes = engine.routes
    if routes.generate not in missing or not isinstance(engine, HttpEngine):
        return None
    if routes is SGLANG and name.startswith("vllm"):
        return "is vLLM, which has an API of its own", "set engine.kind=vllm, with the same urls"
    lacks = f"has no {routes.generate}"
    if not await engine.has_route("/v1/chat/completions"):
        return f"{lacks}: it is not {routes.tested}", f"start {routes.tested} there"
    return (
        f"{lacks}: it speaks OpenAI's API, which takes and gives text. Token ids and their "
        "log-probs are lost on the way, and what is tokenized again is not what was sampled, so it "
        "cannot be trained on",
        f"start {routes.tested} there, or write an engine for it (docs/engines.md)",
    )


def _losses(engine: Engine) -> dict[str, str]:
    routes = engine.routes
    return {**routes.read, **routes.needed, **routes.optional}


def _needed(engine: Engine, config: EngineConfig) -> Collection[str]:
    """Routes that training with `config` asks for; `/v1/models` only if no length is set."""
    routes = engine.routes
    settings = [f"engine.weight_transport={config.weight_transport}"]
    if config.release_memory:
        settings.append("engine.release_memory=true")
    chosen = {path for setting in settings for path in routes.features.get(setting, ())}
    return {*routes.read, *routes.needed, *chosen} - {"/v1/models"}


def _lacks_text(engine: Engine, name: str, missing: Iterable[str]) -> str:
    """Return text: each missing route, and what its loss costs the run."""
    losses, by_loss = _losses(engine), dict[str, list[str]]()
    for path in missing:
        by_loss.setdefault(losses[path], []).append(path)
    lost = "; ".join(f"{', '.join(paths)} ({loss})" for loss, paths in by_loss.items())
    return f"{engine.url}{name and f' ({name})'} lacks {lost}"
