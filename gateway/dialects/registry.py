"""Which dialect speaks at which path below `/v1/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import Response

from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages
from stepwell.gateway.dialects.base import Dialect
from stepwell.gateway.dialects.openai_chat import OpenAIChat
from stepwell.gateway.dialects.openai_completions import OpenAICompletions
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.web import OrjsonResponse

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "chat/completions": OpenAIChat,
    "completions": OpenAICompletions,
    "messages": AnthropicMessages,
    "responses": OpenAIResponses,
}
"""Each gateway makes its own: a dialect may remember its answers."""

_WORDING = {path: make() for path, make in DIALECTS.items()}
_DEFAULT = OpenAIChat()


def error_response(url_path: str, e: GatewayError) -> Response:
    """An error in the shape of the path's dialect; OpenAI's elsewhere."""
    _, _, below = url_path.partition("/v1/")
    dialect = next(
        (d for path, d in _WORDING.items() if below == path or below.startswith(path + "/")),
        _DEFAULT,
    )
    return OrjsonResponse(dialect.error(e), status_code=e.status, headers=e.headers())
