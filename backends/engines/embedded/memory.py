"""`/release_memory_occupation` and `/resume_memory_occupation`: memory lent to a trainer.

    has it ──release(weights, kv_cache)──► released: nothing is generated ──resume──► has it

As with SGLang's `--enable-memory-saver --enable-weights-cpu-backup`: the KV cache is dropped, the
weights wait in the host's memory and come back as they were. Only an idle engine releases; one that
is paused may have requests waiting, which go on waiting until it has its memory *and* is continued.

A real SGLang dies of what is refused here (400): a release with requests running, a resume of what
was not released; and of generating while released, which is a 503 here.

Does not own pausing (`scheduler.py`), or when memory is lent (`trainer/memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Response
from pydantic import BaseModel

from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.request import InvalidRequestError
from stepwell.backends.engines.embedded.scheduler import Scheduler

TAGS = ("weights", "kv_cache", "cuda_graph")
"""SGLang's. CUDA graphs it has none; the tag is accepted."""


class MemoryBody(BaseModel):
    tags: list[str] | None = None
    """None: all."""


def release(scheduler: Scheduler, tags: Sequence[str] | None) -> None:
    """Free the memory of `tags` (None: all).

    Raises:
        InvalidRequestError: requests run, or a tag is unknown or has been released.
    """
    tags = _known(tags)
    if scheduler.running or (scheduler.waiting and not scheduler.paused):
        raise InvalidRequestError(
            f"{len(scheduler.running)} requests run and {len(scheduler.waiting)} wait; "
            "release_memory_occupation is for an idle server: pause it with mode abort first"
        )
    if again := scheduler.released & set(tags):
        raise InvalidRequestError(f"tags {sorted(again)} have been released already")
    if "kv_cache" in tags:
        scheduler.cache.drop()
    if "weights" in tags:
        scheduler.runner.offload()
    scheduler.released |= set(tags)


def resume(scheduler: Scheduler, tags: Sequence[str] | None) -> None:
    """Take the memory of `tags` (None: all that SGLang knows) back.

    Raises:
        InvalidRequestError: a tag is unknown or has not been released.
    """
    tags = _known(tags)
    if missing := set(tags) - scheduler.released:
        raise InvalidRequestError(f"tags {sorted(missing)} have not been released")
    if "weights" in tags:
        scheduler.runner.reload()
    scheduler.released -= set(tags)


def _known(tags: Sequence[str] | None) -> tuple[str, ...]:
    if not tags:
        return TAGS
    if unknown := set(tags) - set(TAGS):
        raise InvalidRequestError(f"tags {sorted(unknown)} are not known; use {', '.join(TAGS)}")
    return tuple(tags)


def add_memory_routes(app: FastAPI, loop: GenerationLoop) -> None:
    """SGLang's two endpoints; both answer `null`."""

    @app.api_route("/release_memory_occupation", methods=["GET", "POST"])
    async def release_memory(body: MemoryBody) -> Response:
        await loop.call(lambda s: release(s, body.tags))
        return Response(b"null", media_type="application/json")

    @app.api_route("/resume_memory_occupation", methods=["GET", "POST"])
    async def resume_memory(body: MemoryBody) -> Response:
        await loop.call(lambda s: resume(s, body.tags))
        return Response(b"null", media_type="application/json")
