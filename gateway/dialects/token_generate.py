"""Tokens in, tokens out: `POST /inference/v1/generate`, as vLLM serves it and as the train client
of verifiers (and so prime-rl) calls it.

    token_ids [1, 2, 3], sampling_params {…}  ──►  choices[i].token_ids, logprobs.content[j].logprob

The client renders its prompts itself; a prompt that begins with an earlier one and its reply goes
on from that, as with `/v1/completions`. Log-probs are of the tokens as sampled, whole. Owns this
wire format; sampling parameters are those of completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.base import (
    NOTHING,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
)
from stepwell.gateway.dialects.openai_chat import LEAST_LOGPROB, CompletionParams
from stepwell.gateway.dialects.openai_completions import token_ids
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.errors import ContextLengthError, GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.trajectory.calls import LiveCall
from stepwell.gateway.web import error_body


class TokenParams(Params):
    ignored = frozenset(("model", "request_id", "priority", "cache_salt"))
    token_ids: Any
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: Literal[False] = False


class TokenSampling(CompletionParams):
    ignored = CompletionParams.ignored | frozenset(
        (
            "detokenize",
            "include_stop_str_in_output",
            "logprobs",
            "routed_experts_prompt_start",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        )
    )


class TokenGenerate(Dialect):
    """`POST /inference/v1/generate`."""

    name = "token_generate"

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        params = TokenParams.read(body)
        try:
            sampling = TokenSampling.read(params.sampling_params)
        except RequestError as e:
            raise RequestError(f"sampling_params: {e}", f"sampling_params.{e.param}") from e
        if sampling.stream:
            raise RequestError("this route does not stream; leave stream out", "stream")
        call = ChatRequest(
            messages=[],
            prompt_ids=token_ids("token_ids", params.token_ids),
            is_completion=True,
            parse_tools=False,
            max_tokens=sampling.max_tokens,
            **sampling.sampling(),
        )
        return Parsed(call, params, n=sampling.n)

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        return {
            "request_id": exchange.uid,
            "choices": [_choice(i, reply) for i, reply in enumerate(replies)],
            "usage": {
                "prompt_tokens": replies[0].n_prompt,
                "completion_tokens": sum(reply.n_response for reply in replies),
                "total_tokens": replies[0].n_prompt + sum(r.n_response for r in replies),
            },
        }

    def writer(self, exchange: Exchange) -> StreamWriter:
        raise RequestError("this route does not stream; leave stream out", "stream")

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object; the conversation is called `token_ids` here."""
        is_prompt = isinstance(e, ContextLengthError) or e.param == "prompt"
        return error_body(e, "token_ids" if is_prompt else e.param)


def _choice(index: int, reply: LiveCall) -> dict[str, Any]:
    ids = reply.generation.response_ids.tolist()
    log_probs = reply.generation.log_probs.tolist()
    content = [
        {"token": f"token_id:{i}", "logprob": max(p, LEAST_LOGPROB), "top_logprobs": []}
        for i, p in zip(ids, log_probs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": reply.generation.finish_reason,
    }
