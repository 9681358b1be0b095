"""SGLang's ways to replace weights: from a directory, over a process group, as a LoRA adapter; and
the checksum over what is loaded.

    begin_weight_update ─► update_weights_from_distributed ─► end_weight_update

Tensors are taken within a session only, as SGLang does. A broadcast is validated whole before the
first weight is changed, and applied between two generation steps.

Owns these routes. Does not own what an update does to requests (`scheduler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import Body, FastAPI, Response

from stepwell.backends.engines.embedded.adapters import WeightLoadError
from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.weights.collective import Group
from stepwell.backends.weights.digest import overall_hash

GROUP_TIMEOUT_S = 60.0
"""For the others to join, and for each broadcast."""
Field = Body(embed=True)
"""A field of the body, beside which it may have others that are ignored."""


def _answer(ok: bool, **content: Any) -> Response:
    return Response(
        orjson.dumps({"success": ok, **content}),
        status_code=200 if ok else 400,
        media_type="application/json",
    )


def _refused(why: object) -> Response:
    return _answer(False, message=str(why))


class Updates:
    """State between requests: the open session and the process groups. Its methods are the routes
    of their names."""

    def __init__(self, loop: GenerationLoop) -> None:
        self._loop = loop
        self._session = False
        self._groups: dict[str, Group] = {}

    async def update_weights_from_disk(
        self,
        model_path: Annotated[str, Field],
        weight_version: Annotated[str | None, Field] = None,
        abort_all_requests: Annotated[bool, Field] = False,
    ) -> Response:
        """`flush_cache` is ignored: prefixes of the old weights are always dropped."""

        def load(scheduler: Scheduler) -> int:
            scheduler.update_weights(model_path, weight_version)
            return scheduler.held

        try:
            held = await self._loop.call(load, is_update=True, abort_all=abort_all_requests)
        except WeightLoadError as e:
            return _answer(False, message=str(e), num_paused_requests=0)
        message = f"Succeeded to update model weights.{_named(weight_version)}"
        return _answer(True, message=message, num_paused_requests=held)

    # -- process groups -----------------------------------------------------------------------

    async def begin_weight_update(self) -> Response:
        if self._session:
            return _refused(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._session = True
        return _answer(True, message="Success")

    async def end_weight_update(self) -> Response:
        if not self._session:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        self._session = False
        return _answer(True, message="Success")

    async def init_weights_update_group(
        self,
        master_address: Annotated[str, Field],
        master_port: Annotated[int, Field],
        rank_offset: Annotated[int, Field],
        world_size: Annotated[int, Field],
        group_name: Annotated[str, Field],
        backend: Annotated[str, Field] = "nccl",
    ) -> Response:
        if group_name in self._groups:
            return _refused(f"group {group_name} exists already")
        try:
            self._groups[group_name] = await asyncio.to_thread(
                Group.join,
                master_address,
                master_port,
                rank=rank_offset,
                world_size=world_size,
                name=group_name,
                backend=backend,
                timeout_s=GROUP_TIMEOUT_S,
            )
        except (OSError, RuntimeError, ValueError) as e:
            return _refused(f"Failed to initialize custom process group: {e}.")
        return _answer(True, message="Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, group_name: Annotated[str, Field]) -> Response:
        group = self._groups.pop(group_name, None)
        if group is None:
            return _refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(group.close)
        return _answer(True, message="Succeeded to destroy custom process group.")

    async def update_weights_from_distributed(
        self,
        names: Annotated[list[str], Field],
        dtypes: Annotated[list[str], Field],
        shapes: Annotated[list[list[int]], Field],
        group_name: Annotated[str, Field],
        weight_version: Annotated[str | None, Field] = None,
        abort_all_requests: Annotated[bool, Field] = False,
    ) -> Response:
        if not self._session:
            return _refused(
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        group = self._groups.get(group_name)
        if group is None:
            return _refused(f"Failed to receive weights: group {group_name} does not exist")
        try:
            tensors = await asyncio.to_thread(group.receive, names, dtypes, shapes)
        except (RuntimeError, ValueError, AttributeError) as e:
            return _refused(f"Failed to receive weights: {e}")
        try:
            await self._loop.call(
                lambda s: s.update_tensors(tensors, weight_version),
                is_update=True,
                abort_all=abort_all_requests,
            )
        except WeightLoadError as e:
            return _refused(e)
        return _answer(True, message=f"Success{_named(weight_version)}")

    # -- adapters and versions ----------------------------------------------------------------

    async def load_lora_adapter(
        self, lora_name: Annotated[str, Field], lora_path: Annotated[str, Field]
    ) -> Response:
        if self._loop.scheduler.runner.adapters.name == lora_name:
            return self._loaded(f"{lora_name} is already loaded")
        return await self._adapter(lambda s: s.load_adapter(lora_name, lora_path))

    async def unload_lora_adapter(self, lora_name: Annotated[str, Field]) -> Response:
        return await self._adapter(lambda s: s.unload_adapter(lora_name))

    async def _adapter(self, act: Callable[[Scheduler], None]) -> Response:
        try:
            await self._loop.call(act, is_update=True)
        except WeightLoadError as e:
            return self._loaded(str(e))
        return self._loaded("")

    def _loaded(self, error: str) -> Response:
        adapters = self._loop.scheduler.runner.adapters
        loaded = {} if adapters.name is None else {adapters.name: adapters.path}
        return _answer(not error, error_message=error, loaded_adapters=loaded)

    async def update_weight_version(
        self,
        new_version: Annotated[str, Field],
        abort_all_requests: Annotated[bool, Field] = True,
    ) -> Response:
        def apply(scheduler: Scheduler) -> None:
            if abort_all_requests:
                scheduler.abort(None)
            scheduler.weight_version = new_version

        await self._loop.call(apply)
        message = f"Weight version updated to {new_version}"
        return _answer(True, message=message, new_version=new_version)

    async def weights_checker(self, action: Annotated[str, Field] = "checksum") -> Response:
        if action != "checksum":
            return _refused(f"Unsupported action={action!r}")
        hashes = await self._loop.call(lambda s: s.runner.hashes())
        overall = overall_hash(hashes)
        one = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {
            "checksums": hashes,
            "per_gpu_checksum": overall,
            "parallelism_info": [{"role": "target", **one, **sizes}],
        }
        whole = overall_hash({"": overall})
        return _answer(True, message="Success.", ranks=[rank], per_engine_checksum=whole)


def _named(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."


def add_update_routes(app: FastAPI, loop: GenerationLoop) -> None:
    """Add the routes to the embedded engine's app."""
    updates = Updates(loop)
    for route in (
        updates.update_weights_from_disk,
        updates.begin_weight_update,
        updates.end_weight_update,
        updates.init_weights_update_group,
        updates.destroy_weights_update_group,
        updates.update_weights_from_distributed,
        updates.load_lora_adapter,
        updates.unload_lora_adapter,
        updates.update_weight_version,
        updates.weights_checker,
    ):
        app.post(f"/{route.__name__}")(route)
