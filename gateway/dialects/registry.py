"""Dialect of each path, or of the client, where dialects share a path."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response

from stepwell.gateway.access import is_gemini
from stepwell.gateway.config import CallStyle
from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages
from stepwell.gateway.dialects.base import Dialect
from stepwell.gateway.dialects.gemini import Gemini, Stream
from stepwell.gateway.dialects.openai_chat import OpenAIChat
from stepwell.gateway.dialects.openai_compact import OpenAICompact
from stepwell.gateway.dialects.openai_completions import OpenAICompletions
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.dialects.token_generate import TokenGenerate
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.web import OrjsonResponse


def make_dialects(chat_template: str, responses: OpenAIResponses) -> dict[str, Dialect]:
    """All dialects by path. `responses` is the gateway's own: it remembers its answers."""
    return {
        "chat/completions": OpenAIChat(chat_template),
        "completions": OpenAICompletions(),
        "messages": AnthropicMessages(),
        "responses": responses,
        "responses/compact": OpenAICompact(responses),
    }


def make_gemini(chat_template: str, style: CallStyle) -> dict[str, Gemini]:
    """Gemini's dialect by its method, and by the form of its stream (`alt`)."""
    forms: dict[str, Stream | None] = {
        "generateContent": None,
        "streamGenerateContent": "array",
        "streamGenerateContent?alt=sse": "sse",
    }
    return {method: Gemini(chat_template, form, style) for method, form in forms.items()}


_CALLS = make_dialects("", OpenAIResponses())
PATHS = tuple(_CALLS)
_WORDING = {**_CALLS, "generate": TokenGenerate()}  # below /inference/v1/
_GEMINI = Gemini()
_OF_HEADERS: Mapping[str, Dialect] = {
    "x-goog-api-client": _GEMINI,
    "x-goog-api-key": _GEMINI,
    "anthropic-version": _CALLS["messages"],
}
"""Dialects by the headers of their SDKs, which share paths (`/v1/models`)."""


def error_response(url_path: str, headers: Headers, e: GatewayError) -> Response:
    """An error in the shape of the path's dialect, else of the client's; OpenAI's elsewhere."""
    _, _, below = url_path.rpartition("/v1/")  # the last one: a uid may be `v1`
    dialect = next(
        (d for path, d in _WORDING.items() if below == path or below.startswith(path + "/")), None
    )
    if dialect is None and is_gemini(url_path):
        dialect = _GEMINI
    if dialect is None:
        named = (d for name, d in _OF_HEADERS.items() if name in headers)
        dialect = next(named, _CALLS["chat/completions"])
    return OrjsonResponse(dialect.error(e), status_code=e.status, headers=e.headers())
