"""`POST /v1/responses/compact`: the conversation as the policy's own summary of it.

    input ──Responses──► messages + the request to summarise ──► a call, recorded as any other
                                                                   │
    user's messages, then {"type": "compaction", "encrypted_content": seal(summary)} ◄─┘

An agent sends that output as the input of its next response, where a compaction is a message of the
user's with the summary (`response_items.py`). Nothing is remembered. Owns: the request to
summarise and the shape of the answer. Does not own: items and fields (`openai_responses.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.base import NOTHING, Dialect, Exchange, Known, Parsed, StreamWriter
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.dialects.params import wrong
from stepwell.gateway.dialects.response_answer import usage_of
from stepwell.gateway.dialects.response_items import is_summary, seal
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.trajectory.calls import LiveCall

SUMMARISE = """\
Your context is nearly full. Write a summary of this conversation, from which you can go on \
without it: what the user asked for, what has been done and found, decisions and their reasons, \
files, commands and values that are needed again, and what is left to do. Write the summary \
alone."""


class OpenAICompact(Dialect):
    """Compacts conversations of the Responses dialect."""

    name = "openai_compact"

    def __init__(self, responses: OpenAIResponses) -> None:
        self._responses = responses

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        """See `Dialect.parse`."""
        if body.get("stream"):
            raise wrong("stream", body["stream"], "leave it out: a compaction is one answer")
        given = body.get("input")
        if given is None or given == []:
            if body.get("previous_response_id") is None:
                raise RequestError("input is missing; send text or a list of items", "input")
            given = []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise wrong("input", given, "send text or a list of items")
        ask = {"role": "user", "content": SUMMARISE}
        fields = {name: value for name, value in body.items() if name != "image"}
        asked = {**fields, "input": [*items, ask], "tool_choice": "none", "store": False}
        return self._responses.parse(asked, reader)

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `CompactedResponse`."""
        (reply,) = replies
        parsed, uid = exchange.parsed, exchange.uid
        *conversation, _ = parsed.call.messages[parsed.n_outside :]
        said = [_text(message["content"]) for message in conversation if message["role"] == "user"]
        users = [text for text in said if not is_summary(text)]
        output: list[dict[str, Any]] = [
            {
                "id": f"msg_{uid}{i:02x}",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
            for i, text in enumerate(users)
        ]
        summary = (reply.text.content or reply.text.reasoning or "").strip()
        output.append(
            {"id": f"cmp_{uid}", "type": "compaction", "encrypted_content": seal(summary)}
        )
        return {
            "id": f"resp_{uid}",
            "object": "response.compaction",
            "created_at": exchange.created,
            "output": output,
            "usage": usage_of(reply, exchange.tokenizer),
        }

    def writer(self, exchange: Exchange) -> StreamWriter:
        """None is asked for: `parse` refuses streams."""
        return self._responses.writer(exchange)

    def error(self, e: GatewayError) -> dict[str, Any]:
        """Return the error in the Responses dialect's words."""
        return self._responses.error(e)


def _text(content: Any) -> str:
    """A user's words; their pictures are in the summary, if anywhere."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
