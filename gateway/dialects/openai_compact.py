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
from stepwell.gateway.pictures import RequestPictures
from stepwell.gateway.tokens.messages import Message, pictures_in
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
        parsed = self._responses.parse(asked, reader, known)
        brought = known.pictures
        for part in pictures_in(_of_users(parsed)):
            if brought is None or brought.name_of(part["digest"]) is None:
                raise RequestError(
                    "previous_response_id names a conversation in which the user shows pictures, "
                    "and no bytes of them are kept; send the conversation as input",
                    "previous_response_id",
                )
        return parsed

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `CompactedResponse`."""
        (reply,) = replies
        parsed, uid = exchange.parsed, exchange.uid
        output: list[dict[str, Any]] = [
            {
                "id": f"msg_{uid}{i:02x}",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": _content(message["content"], parsed.call.sources),
            }
            for i, message in enumerate(_of_users(parsed))
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


def _of_users(parsed: Parsed) -> list[Message]:
    """The user's messages, without the request to summarise and what compactions became."""
    *conversation, _ = parsed.call.messages[parsed.n_outside :]
    return [m for m in conversation if m["role"] == "user" and not is_summary(m["content"])]


def _content(content: str | list[Message], sources: RequestPictures | None) -> list[dict[str, Any]]:
    """The content of a user's message as an agent sends it, pictures as they came."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text" or sources is None
        else {"type": "input_image", "detail": "auto", "image_url": sources.json(part["digest"])}
        for part in parts
    ]
