"""OpenAI completions: a prompt without a chat template, text or ids → text.

    prompt "Q: …"       ──► ids: the tokenizer's beginning of text (Llama's BOS, as vLLM and SGLang
                            add it), then the text; control tokens' text in it is control tokens
    prompt [1, 2, 3]    ──► these ids
    an earlier prompt and its whole reply (special tokens included), then more
                        ──► the earlier ids, then those of what is new

A list of prompts is as many calls: each belongs to the trajectory that it would belong to alone,
its samples are choices `i * n` to `i * n + n - 1`, and if one is refused, none is made.

The reply is the text of the sampled ids without special tokens; nothing in it is a tool call or a
thought. With `echo` the text of a choice begins with its prompt as it was sent; of ids, with their
text, special tokens included. Engines are not asked for a prompt's log-probs, so `logprobs` beside
it is refused. Owns this wire format; what it shares with chat completions is in `openai_chat.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from stepwell.datapool.types import TokenIds
from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.base import (
    NOTHING,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
)
from stepwell.gateway.dialects.openai_chat import (
    LEAST_LOGPROB,
    CompletionParams,
    CompletionWriter,
    head,
    usage,
)
from stepwell.gateway.dialects.params import TopLogprobs, wrong
from stepwell.gateway.errors import ContextLengthError, GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import ContentDelta, Delta
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.calls import REMEMBERED, LiveCall, SampledToken
from stepwell.gateway.web import error_body

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and so vLLM's and SGLang's."""


class CompletionsParams(CompletionParams):
    prompt: Any
    logprobs: TopLogprobs | None = None
    add_special_tokens: Literal[True] = True
    best_of: Literal[1] = 1
    echo: bool = False
    suffix: Literal[""] = ""


class OpenAICompletions(Dialect):
    """`POST /v1/completions`."""

    name = "openai_completions"

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        params = CompletionsParams.read(body)
        if params.echo and params.logprobs is not None:
            remedy = (
                "with echo it asks for the prompt's, which engines are not asked for; leave one out"
            )
            raise wrong("logprobs", params.logprobs, remedy)
        first, *more = [
            ChatRequest(
                messages=[],
                prompt_text=text,
                prompt_ids=ids,
                is_completion=True,
                parse_tools=False,
                max_tokens=params.max_tokens or DEFAULT_MAX_TOKENS,
                n_logprobs=params.logprobs,
                **params.sampling(),
            )
            for text, ids in _prompts(params.prompt, params.n)
        ]
        return Parsed(first, params, n=params.n, more=tuple(more))

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `Completion`."""
        choices = []
        echoed = _echoed(exchange)
        for i, (reply, call) in enumerate(zip(replies, exchange.calls, strict=True)):
            entries, text = _Logprobs(exchange).of(call.tokens), echoed[i] + reply.text.content
            choices.append(_choice(i, text, entries, reply.generation.finish_reason))
        return {
            **head(exchange, "cmpl", "text_completion"),
            "choices": choices,
            "usage": usage(exchange, replies),
        }

    def writer(self, exchange: Exchange) -> StreamWriter:
        """`Completion`s with what is new, and `[DONE]`. The first of each choice is its echo."""
        return _TextWriter(exchange, head(exchange, "cmpl", "text_completion"), self)

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object; the conversation is called `prompt` here."""
        return error_body(e, "prompt" if isinstance(e, ContextLengthError) else e.param)


class _TextWriter(CompletionWriter):
    def __init__(self, exchange: Exchange, head: dict[str, Any], dialect: Dialect) -> None:
        super().__init__(exchange, head, dialect)
        self._shown = [_Logprobs(exchange) for _ in exchange.calls]

    def begin(self) -> bytes:
        echoes = enumerate(_echoed(self._exchange))
        return b"".join(self.chunk([_choice(i, text, None, None)]) for i, text in echoes if text)

    def choice(
        self, sample: int, item: Delta | LiveCall, tokens: Sequence[SampledToken]
    ) -> dict[str, Any]:
        text = item.text if isinstance(item, ContentDelta) else ""
        finish_reason = item.generation.finish_reason if isinstance(item, LiveCall) else None
        return _choice(sample, text, self._shown[sample].of(tokens), finish_reason)


class _Logprobs:
    """The legacy object of a reply's tokens, in one piece or several."""

    def __init__(self, exchange: Exchange) -> None:
        self._wanted = exchange.parsed.options.logprobs is not None
        self._tokenizer: ChatTokenizer = exchange.tokenizer
        self._special = frozenset(exchange.tokenizer.special.values())
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        """Characters of the reply before the next token."""

    def of(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        """None: they are not wanted, or there are none."""
        if not self._wanted or not tokens:
            return None
        offsets, tops = [], []
        for token in tokens:
            offsets.append(self._offset)
            if token.token_id not in self._special:  # those are no text
                raw = self._tokenizer.token_bytes(token.token_id)
                self._offset += len(self._decoder.decode(raw))
            # The sampled token is always among them; of tokens that read alike, the likeliest is.
            sampled = (token.token_id, token.log_prob)
            top: dict[str, float] = {}
            for token_id, log_prob in (*token.alternatives, sampled):
                text = self._tokenizer.token_text(token_id)
                top[text] = max(top.get(text, LEAST_LOGPROB), log_prob)
            tops.append(top)
        return {
            "tokens": [self._tokenizer.token_text(t.token_id) for t in tokens],
            "token_logprobs": [max(t.log_prob, LEAST_LOGPROB) for t in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _choice(
    index: int, text: str, entries: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": entries, "finish_reason": finish_reason}


def _echoed(exchange: Exchange) -> list[str]:
    """The text that each choice begins with."""
    parsed = exchange.parsed
    calls, echo = (parsed.call, *parsed.more), parsed.options.echo
    texts = [_text(call, exchange.tokenizer) if echo else "" for call in calls]
    return [text for text in texts for _ in range(parsed.n)]


def _text(call: ChatRequest, tokenizer: ChatTokenizer) -> str:
    if call.prompt_ids is None:
        return call.prompt_text or ""
    return tokenizer.decode(call.prompt_ids.tolist())


def _prompts(prompt: Any, n: int) -> list[tuple[str | None, TokenIds | None]]:
    """Each prompt as text or as ids, whichever it is.

    Args:
        n: samples of each.
    """
    match prompt:
        case [str() | list(), *_]:
            if len(prompt) * n > REMEMBERED:
                raise RequestError(
                    f"prompt holds {len(prompt)} prompts for {n} samples each; a request may ask "
                    f"for {REMEMBERED} choices in all, send several requests",
                    "prompt",
                )
            if len(prompt) == 1:
                return [_prompt("prompt", prompt[0])]
            return [_prompt(f"prompt[{i}]", each) for i, each in enumerate(prompt)]
    return [_prompt("prompt", prompt)]


def _prompt(name: str, prompt: Any) -> tuple[str | None, TokenIds | None]:
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt:
        return None, token_ids(name, prompt)
    raise wrong(name, prompt, "send text or a list of token ids, or a list of such prompts")


def token_ids(name: str, ids: Any) -> TokenIds:
    """
    Raises:
        RequestError: it is no list of ids.
    """
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        raise wrong(name, ids, "send a list of token ids")
    try:
        array = np.asarray(ids, np.int32)
    except OverflowError:
        array = np.array([-1], np.int32)
    if array.min() < 0:
        raise RequestError(f"{name} holds ids outside [0, 2**31)", name)
    array.flags.writeable = False
    return array
