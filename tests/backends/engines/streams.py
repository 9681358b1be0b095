"""A streamed `/generate`, as tests of an engine read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import orjson

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.connections import ConnectionPool


async def streamed(
    client: EngineClient, input_ids: Sequence[int], params: Mapping[str, Any], **fields: Any
) -> AsyncGenerator[dict[str, Any]]:
    """The cumulative chunks. Leaving early closes the connection, which aborts the request."""
    fields |= {"input_ids": input_ids, "sampling_params": params, "stream": True}
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    def on_data(data: bytes) -> bool:
        pieces.put_nowait(data)
        return False

    asking = asyncio.create_task(
        ConnectionPool().request(
            "POST", f"{client.url}/generate", [orjson.dumps(fields)], on_data=on_data
        )
    )
    asking.add_done_callback(lambda _: pieces.put_nowait(b""))
    rest = b""
    try:
        while data := await pieces.get():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if (payload := event.removeprefix(b"data: ")) != b"[DONE]":
                    yield orjson.loads(payload)
        assert (await asking)[0] == 200
    finally:
        asking.cancel()
