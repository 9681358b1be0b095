"""SGLang's ways to replace weights: from a directory, in buckets over a process group or from
shared memory, as a LoRA adapter; and the checksum over what is loaded.

    begin_weight_update ─► update_weights_from_distributed or …_from_tensor, bucket by bucket
                        ─► end_weight_update: loaded, whole, between two generation steps

Tensors are taken within a session only, as SGLang does, but while requests run: they wait until the
session ends with the name of a version. One that ends without, or of which a bucket failed, brings
nothing.

Owns these routes. Does not own what an update does to requests (`scheduler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import Body, FastAPI, Response
from torch import Tensor

from stepwell.backends.engines.api import Bucket, Meeting
from stepwell.backends.engines.embedded.adapters import WeightLoadError
from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.weights.buckets import size_of, views
from stepwell.backends.weights.collective import Member
from stepwell.backends.weights.delta import since
from stepwell.backends.weights.digest import overall_hash
from stepwell.backends.weights.ipc import read_shared

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


class _Session:
    """Tensors that a session brought so far."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.has_failed = False


class Updates:
    """State between requests: the open session and the process groups. Its methods are the routes
    of their names."""

    def __init__(self, loop: GenerationLoop) -> None:
        self._loop = loop
        self._session: _Session | None = None
        self._groups: dict[str, Member] = {}

    async def update_weights_from_disk(
        self,
        model_path: Annotated[str, Field],
        weight_version: Annotated[str | None, Field] = None,
        abort_all_requests: Annotated[bool, Field] = False,
    ) -> Response:
        """`flush_cache` is ignored: prefixes of the old weights are always dropped."""

        def load(scheduler: Scheduler) -> int:
            try:
                before = since(Path(model_path))
            except (OSError, ValueError) as e:
                raise WeightLoadError(f"Failed to load weights from {model_path!r}: {e}") from e
            if before not in (None, scheduler.weight_version):
                raise WeightLoadError(
                    f"{model_path} has what changed since version {before}, and version "
                    f"{scheduler.weight_version} is loaded; load a whole version"
                )
            scheduler.update_weights(model_path, weight_version)
            return scheduler.held

        try:
            held = await self._loop.call(load, is_update=True, abort_all=abort_all_requests)
        except WeightLoadError as e:
            return _answer(False, message=str(e), num_paused_requests=0)
        message = f"Succeeded to update model weights.{_named(weight_version)}"
        return _answer(True, message=message, num_paused_requests=held)

    # -- sessions -----------------------------------------------------------------------------

    async def begin_weight_update(self) -> Response:
        if self._session is not None:
            return _refused(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._session = _Session()
        return _answer(True, message="Success")

    async def end_weight_update(
        self, weight_version: Annotated[str | None, Field] = None
    ) -> Response:
        session, self._session = self._session, None
        if session is None:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        if weight_version is not None:
            if session.has_failed:
                return _refused("a bucket of the session failed")
            try:
                await self._loop.call(
                    lambda s: s.update_tensors(session.tensors, weight_version), is_update=True
                )
            except WeightLoadError as e:
                return _refused(e)
        return _answer(True, message=f"Success{_named(weight_version)}")

    async def update_weights_from_distributed(
        self,
        names: Annotated[list[str], Field],
        dtypes: Annotated[list[str], Field],
        shapes: Annotated[list[list[int]], Field],
        group_name: Annotated[str, Field],
        load_format: Annotated[str | None, Field] = None,
    ) -> Response:
        if load_format != "flattened_bucket":
            return _refused(f"load_format is {load_format!r}; send a flattened_bucket")
        bucket = Bucket(tuple(names), tuple(dtypes), tuple(map(tuple, shapes)))

        def receive() -> dict[str, Tensor]:
            group = self._groups.get(group_name)
            if group is None:
                raise ValueError(f"group {group_name} does not exist")
            return dict(views(bucket, group.receive(size_of(bucket))))

        return await self._take("update_weights_from_distributed", receive)

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Annotated[list[str], Field]
    ) -> Response:
        return await self._take(
            "update_weights_from_tensor", lambda: read_shared(serialized_named_tensors[0])
        )

    async def _take(self, route: str, receive: Callable[[], dict[str, Tensor]]) -> Response:
        session = self._session
        if session is None:
            return _refused(
                f"{route} must run between begin_weight_update() and end_weight_update()"
            )
        try:
            session.tensors |= await asyncio.to_thread(receive)
        except Exception as e:  # noqa: BLE001 - whatever arrived
            session.has_failed = True
            return _refused(f"Failed to receive weights: {e}")
        return _answer(True, message="Success")

    # -- process groups -----------------------------------------------------------------------

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
        meeting = Meeting(
            group_name, world_size, backend, master_address, master_port, GROUP_TIMEOUT_S
        )
        try:
            self._groups[group_name] = await asyncio.to_thread(Member, meeting, rank_offset)
        except (OSError, RuntimeError, ValueError) as e:
            return _refused(f"Failed to initialize custom process group: {e}.")
        return _answer(True, message="Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, group_name: Annotated[str, Field]) -> Response:
        group = self._groups.pop(group_name, None)
        if group is None:
            return _refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(group.close)
        return _answer(True, message="Succeeded to destroy custom process group.")

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
        updates.update_weights_from_tensor,
        updates.load_lora_adapter,
        updates.unload_lora_adapter,
        updates.update_weight_version,
        updates.weights_checker,
    ):
        app.post(f"/{route.__name__}")(route)
