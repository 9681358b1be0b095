"""slime's Rollout Buffer API over the DataPool: a slime trainer consumes from here unchanged.

What its `rollout_buffer_example.py` sends and reads (THUDM/slime, slime_plugins/rollout_buffer)::

    POST /start_rollout     {task_type, num_repeat_per_sample, skip_instance_ids, …} -> {message}
    POST /buffer/write      {instance_id, reward, …}     -> {success, message, data: {data: [item]}}
    POST /get_rollout_data  {}                           -> {success, message, data: {data: [item…],
                                                             meta_info: {total_samples, …}}}
    item                    {uid, instance_id, messages, reward, extra_info} and, beyond slime's
                            own, {tokens, response_length, loss_mask, rollout_log_probs,
                            weight_versions, branches}: fields of its `Sample`

One item is one trajectory, `num_repeat_per_sample` items of one `instance_id` are one group.

A delivery::

    lease ──► encode and send, group by group ──► ack ──► the last bytes
      │                     └── client gone: nack           └── only now is it complete JSON
      └── groups that cannot be served: nack all, drop those with a reason, lease again

The pool's ack comes before the bytes that close the JSON, so a body that a client can read was
acked: no group is delivered twice. A client that goes away before that, a gateway that dies, a
lease that expires: the groups go back and nothing is lost. What remains is a client that vanishes
in the round trip between ack and last bytes; HTTP cannot tell. A consumer that must not lose even
that sends `{"hold": true}` and acks itself (`POST /ack_rollout_data`), after its checkpoint.

Owns: these handlers, and the order of lease, bytes and ack. Does not own: what is served
(`buffer.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell.datapool.types import Lease
from stepwell.gateway.access import presented
from stepwell.gateway.dialects.params import Params, kind
from stepwell.gateway.errors import RequestError
from stepwell.gateway.services import services_of
from stepwell.gateway.slime_buffer.buffer import JSON_OPTIONS, RolloutBuffer, Served
from stepwell.gateway.web import OrjsonResponse


class GetRolloutData(Params):
    """Other fields are ignored, as slime's buffer ignores the whole body."""

    model_config = ConfigDict(extra="ignore")
    hold: Annotated[bool | None, kind(bool, "true or false")] = None
    num: Annotated[int | None, kind(int, "a number of items")] = None
    """-1 is all."""
    batch_size: Annotated[int | None, kind(int, "a number of items")] = None
    """`num` as slime's client sends it."""


class AckRolloutData(Params):
    lease_id: Annotated[str | None, kind(str, "meta_info.lease_id of the answer")] = None


async def start_rollout(request: Request, payload: dict[str, Any]) -> Response:
    """Run a generator of rollouts."""
    services = services_of(request)
    origin, keys = services.hosts.origin(request.scope), presented(request.headers)
    said = await services.rollout_buffer.start(payload, origin, keys[0] if keys else "")
    return OrjsonResponse({"message": said})


async def write(request: Request, item: dict[str, Any]) -> Response:
    """Store a rollout from outside."""
    await services_of(request).rollout_buffer.write(item)
    data = {"data": [item], "meta_info": "write to buffer"}
    return _answer("Data has been successfully written to buffer", data)


async def get_rollout_data(request: Request, body: GetRolloutData) -> Response:
    """Whole groups of items, which are consumed when they are sent."""
    buffer = services_of(request).rollout_buffer
    num = (body.batch_size if body.num is None else body.num) or -1
    taken = await buffer.take(num if num > 0 else None)
    if taken is None:
        why, meta = buffer.nothing()
        return _answer(why, {"data": [], "meta_info": meta}, success=False)
    delivery = _Delivery(buffer, *taken, hold=body.hold or False)
    await delivery.begin()
    return delivery


async def ack_rollout_data(request: Request, body: AckRolloutData) -> Response:
    """For consumers that sent `hold`: the groups of `meta_info.lease_id` are consumed for good."""
    if not body.lease_id:
        raise RequestError("lease_id is missing; send meta_info.lease_id of the answer", "lease_id")
    await services_of(request).rollout_buffer.ack_held(body.lease_id)
    return _answer("acked", None)


def _answer(message: str, data: Any, *, success: bool = True) -> Response:
    return OrjsonResponse({"success": success, "message": message, "data": data})


class _Delivery(Response):
    """An answer of `/get_rollout_data`, sent group by group; see the module for its end."""

    def __init__(
        self, buffer: RolloutBuffer, lease: Lease, groups: Sequence[Served], *, hold: bool
    ) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._buffer = buffer
        self._lease = lease
        self._groups = groups
        self._hold = hold
        self._beginning = b""

    async def begin(self) -> None:
        """Make what stands before the first group: what fails here is answered as an error."""
        try:
            self._beginning = await self._head()
        except BaseException:  # the consumer may have left, too: no `__call__` gives it back
            self._buffer.give_back(self._lease)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        gone = asyncio.create_task(_gone(receive))
        settled = False
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await write(self._beginning)
            separator = b""
            for served in self._groups:
                encoded = asyncio.ensure_future(self._buffer.encode(served))
                await asyncio.wait([encoded, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    encoded.cancel()
                    return
                if items := await encoded:  # none if the generator took all out
                    await write(separator + items)
                    separator = b","
            # Waits until what was written before has left for the network.
            await write(b"]")
            await asyncio.sleep(0)
            if gone.done():
                return
            if not self._hold and not await self._buffer.ack(self._lease, gone):
                return
            settled = True
            self._buffer.count_delivered(self._groups)
            await write(b"}}", more=False)
        finally:
            gone.cancel()
            if not settled:
                # Without its end the body is no JSON, and the connection is cut.
                self._buffer.give_back(self._lease)

    async def _head(self) -> bytes:
        meta = await self._buffer.meta_info(self._groups)
        if self._hold:
            meta |= {"lease_id": self._lease.lease_id, "expires_at": self._lease.expires_at}
        n = sum(len(served.trajectories) for served in self._groups)
        message = f"Successfully read {n} items"
        head = {"success": True, "message": message, "data": {"meta_info": meta, "data": []}}
        return orjson.dumps(head, option=JSON_OPTIONS).removesuffix(b"]}}")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
