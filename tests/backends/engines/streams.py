"""A streamed `/generate`, as tests of an engine read it."""

from __future__ import annotations

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
    url, rest = f"{client.url}/generate", b""
    async with ConnectionPool().request("POST", url, orjson.dumps(fields)) as answer:
        assert answer.status == 200
        async for data in answer.chunks():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if (payload := event.removeprefix(b"data: ")) != b"[DONE]":
                    yield orjson.loads(payload)
