"""SGLang's other ways to replace weights: tensors in the body, a process group, LoRA adapters; and
the checksum over what is loaded.

    begin_weight_update ─► update_weights_from_tensor | _from_distributed ─► end_weight_update

Tensors are taken within a session only, as SGLang does. A body or a broadcast is validated whole
before the first weight is changed, and applied between two generation steps.

Owns these routes. Does not own what an update does to requests (`scheduler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Response
from pydantic import BaseModel

from stepwell.backends.engines.embedded.adapters import WeightLoadError
from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.weights.collective import Group, deserialise
from stepwell.backends.weights.digest import overall_hash

T = TypeVar("T")

GROUP_TIMEOUT_S = 60.0
"""For the others to join, and for each broadcast."""


class TensorBody(BaseModel):
    serialized_named_tensors: list[str]
    load_format: None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class DistributedBody(BaseModel):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class GroupBody(BaseModel):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyBody(BaseModel):
    group_name: str = "weight_update_group"


class LoadAdapterBody(BaseModel):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapterBody(BaseModel):
    lora_name: str


class VersionBody(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class ChecksBody(BaseModel):
    action: str = "checksum"


def _answer(content: dict[str, Any], *, ok: bool = True) -> Response:
    return Response(
        orjson.dumps(content), status_code=200 if ok else 400, media_type="application/json"
    )


def _done(message: str = "Success") -> Response:
    return _answer({"success": True, "message": message})


def _refused(why: object) -> Response:
    return _answer({"success": False, "message": str(why)}, ok=False)


class Updates:
    """State between requests: the open session and the process groups."""

    def __init__(self, loop: GenerationLoop) -> None:
        self.loop = loop
        self.session = False
        self.groups: dict[str, Group] = {}

    # -- tensors ------------------------------------------------------------------------------

    async def begin(self) -> Response:
        if self.session:
            return _refused(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self.session = True
        return _done()

    async def end(self) -> Response:
        if not self.session:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _done()

    async def from_tensor(self, body: TensorBody) -> Response:
        if not self.session:
            return _refused(
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()"
            )
        if len(body.serialized_named_tensors) != 1:
            return _refused("this engine has one rank; send one payload")
        try:
            tensors = await asyncio.to_thread(deserialise, body.serialized_named_tensors[0])
        except ValueError as e:
            return _refused(e)
        return await self._apply(
            lambda s: s.update_tensors(tensors, body.weight_version),
            body.weight_version,
            abort_all=body.abort_all_requests,
        )

    # -- process groups -----------------------------------------------------------------------

    async def init_group(self, body: GroupBody) -> Response:
        if body.group_name in self.groups:
            return _refused(f"group {body.group_name} exists already")
        try:
            self.groups[body.group_name] = await asyncio.to_thread(
                Group.join,
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
                backend=body.backend,
                timeout_s=GROUP_TIMEOUT_S,
            )
        except (OSError, RuntimeError, ValueError) as e:
            return _refused(f"Failed to initialize custom process group: {e}.")
        return _done("Succeeded to initialize custom process group.")

    async def destroy_group(self, body: DestroyBody) -> Response:
        group = self.groups.pop(body.group_name, None)
        if group is None:
            return _refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(group.close)
        return _done("Succeeded to destroy custom process group.")

    async def from_distributed(self, body: DistributedBody) -> Response:
        if not self.session:
            return _refused(
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        group = self.groups.get(body.group_name)
        if group is None:
            return _refused(f"Failed to receive weights: group {body.group_name} does not exist")
        try:
            tensors = await asyncio.to_thread(group.receive, body.names, body.dtypes, body.shapes)
        except (RuntimeError, ValueError, AttributeError) as e:
            return _refused(f"Failed to receive weights: {e}")
        return await self._apply(
            lambda s: s.update_tensors(tensors, body.weight_version),
            body.weight_version,
            abort_all=body.abort_all_requests,
        )

    # -- adapters and versions ----------------------------------------------------------------

    async def load_adapter(self, body: LoadAdapterBody) -> Response:
        adapters = self.loop.scheduler.runner.adapters
        if adapters.name == body.lora_name:
            return _loaded(adapters.name, adapters.path, f"{body.lora_name} is already loaded")
        return await self._adapter(lambda s: s.load_adapter(body.lora_name, body.lora_path))

    async def unload_adapter(self, body: UnloadAdapterBody) -> Response:
        return await self._adapter(lambda s: s.unload_adapter(body.lora_name))

    async def _adapter(self, act: Callable[[Scheduler], None]) -> Response:
        error = None
        try:
            await self.loop.update_weights(act)
        except WeightLoadError as e:
            error = str(e)
        adapters = self.loop.scheduler.runner.adapters
        return _loaded(adapters.name, adapters.path, error)

    async def rename(self, body: VersionBody) -> Response:
        def apply(scheduler: Scheduler) -> None:
            if body.abort_all_requests:
                scheduler.abort(None)
            scheduler.weight_version = body.new_version

        await self.loop.call(apply)
        return _answer(
            {
                "success": True,
                "message": f"Weight version updated to {body.new_version}",
                "new_version": body.new_version,
            }
        )

    # -- checksum -----------------------------------------------------------------------------

    async def check(self, body: ChecksBody | None = None) -> Response:
        if body is not None and body.action != "checksum":
            return _refused(f"Unsupported action={body.action!r}")
        hashes = await self.loop.call(lambda s: s.runner.hashes())
        overall = overall_hash(hashes)
        one = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {
            "checksums": hashes,
            "per_gpu_checksum": overall,
            "parallelism_info": [{"role": "target", **one, **sizes}],
        }
        return _answer(
            {
                "success": True,
                "message": "Success.",
                "ranks": [rank],
                "per_engine_checksum": overall_hash({"": overall}),
            }
        )

    async def _apply(
        self, act: Callable[[Scheduler], None], version: str | None, *, abort_all: bool
    ) -> Response:
        try:
            await self.loop.update_weights(act, abort_all=abort_all)
        except WeightLoadError as e:
            return _refused(e)
        message = "Success"
        if version is not None:
            message += f" Weight version updated to {version}."
        return _done(message)


def _loaded(name: str | None, path: str | None, error: str | None) -> Response:
    adapters = {} if name is None else {name: path}
    return _answer(
        {"success": error is None, "error_message": error or "", "loaded_adapters": adapters},
        ok=error is None,
    )


def add_update_routes(app: FastAPI, loop: GenerationLoop) -> None:
    """Add the routes to the embedded engine's app."""
    updates = Updates(loop)
    app.post("/begin_weight_update")(updates.begin)
    app.post("/end_weight_update")(updates.end)
    app.post("/update_weights_from_tensor")(updates.from_tensor)
    app.post("/init_weights_update_group")(updates.init_group)
    app.post("/destroy_weights_update_group")(updates.destroy_group)
    app.post("/update_weights_from_distributed")(updates.from_distributed)
    app.post("/load_lora_adapter")(updates.load_adapter)
    app.post("/unload_lora_adapter")(updates.unload_adapter)
    app.post("/update_weight_version")(updates.rename)
    app.api_route("/weights_checker", methods=["GET", "POST"])(updates.check)
