"""The answer to one request, as SGLang's `/generate` words it.

A stream is cumulative: every chunk repeats all ids and log-probs so far. Their JSON is kept and
extended, so that a chunk costs what is new, not what is old. Text is only for people; ids are what
counts and are never derived from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from tokenizers.decoders import DecodeStream

from stepwell.backends.engines.embedded.request import Request

_CONTEXT = 5
"""Prompt tokens decoded along, so that a leading space depends on what precedes it."""


class Reply:
    """Builds the response of one request, once or chunk by chunk."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        """`tokenizer`: a fast one of transformers."""
        self.request = request
        self._text = Text(request, tokenizer)
        self._ids = bytearray()
        self._log_probs = bytearray()
        self._n = 0

    def body(self, weight_version: str, *, stream: bool = False) -> bytes | None:
        """The response so far as JSON; None if a stream has nothing new to say.

        Args:
            weight_version: told of a response without a token. Others name that of their last
                token, whatever was loaded since.
        """
        request = self.request
        finished = request.finished  # before the length: it is set after the last token
        n = len(request.output_ids)
        if stream and not finished and n == self._n:
            return None
        ids = request.output_ids[:n]
        for span in request.spans:
            if span.start < n:
                weight_version = span.version
        self._extend(n)
        body: dict[str, Any] = {
            "text": self._text.final(ids) if finished else self._text.so_far(ids),
            "output_ids": orjson.Fragment(bytes(b"[" + self._ids + b"]")),
            "meta_info": self._meta_info(n, weight_version, finished=finished, stream=stream),
        }
        return orjson.dumps(body)

    def _extend(self, n: int) -> None:
        request, old = self.request, self._n
        if n == old:
            return
        new = request.output_ids[old:n]
        comma = b"," if old else b""
        self._ids += comma + orjson.dumps(new)[1:-1]
        if request.return_logprob:
            triples = [
                (v, i, None) for v, i in zip(request.output_log_probs[old:n], new, strict=True)
            ]
            self._log_probs += comma + orjson.dumps(triples)[1:-1]
        self._n = n

    def _meta_info(
        self, n: int, weight_version: str, *, finished: bool, stream: bool
    ) -> dict[str, Any]:
        request, cached = self.request, self.request.cached_tokens
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish_reason if finished else None,
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": weight_version,
            "num_retractions": request.num_retractions,
        }
        if request.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = orjson.Fragment(bytes(b"[" + self._log_probs + b"]"))
            meta["output_token_logprobs_length"] = n
            if request.top_logprobs_num:
                top = [[(v, i, None) for v, i in best] for best in request.output_top[:n]]
                meta |= {"input_top_logprobs": [], "output_top_logprobs": top}
        meta |= {"reasoning_tokens": 0, "completion_tokens": n, "cached_tokens": cached}
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        meta["dp_rank"] = None
        if finished:
            meta["weight_versions"] = request.spans
            meta["e2e_latency"] = time.perf_counter() - request.received
        if not (finished and stream):
            meta["response_sent_to_client_ts"] = time.time()
        return meta


class Text:
    """The text of one request's output; what is streamed decodes only what is new."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._request = request
        self._tokenizer = tokenizer.backend_tokenizer
        self._context = request.prompt_ids[-_CONTEXT:]
        skips = request.params.skip_special_tokens
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skips)
        self._read = 0
        self._text = ""

    def so_far(self, output_ids: Sequence[int]) -> str:
        """Text so far, without a trailing incomplete character."""
        for token in output_ids[self._read :]:
            self._text += self._stream.step(self._tokenizer, token) or ""
        self._read = len(output_ids)
        return self._text

    def final(self, output_ids: Sequence[int]) -> str:
        """Text of a finished request, trimmed before what stopped it, unless `no_stop_trim`; a
        trailing incomplete character is shown as U+FFFD."""
        params = self._request.params
        matched = (self._request.finish_reason or {}).get("matched")
        if params.no_stop_trim:
            matched = None
        if isinstance(matched, int):
            output_ids = output_ids[:-1]
        before, text = (
            self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
            for ids in (self._context, [*self._context, *output_ids])
        )
        text = text[len(before) :]
        return str(text.partition(matched)[0] if isinstance(matched, str) else text)


class StopStrings:
    """Finds a stop string at the end of the output."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def match(self, output_ids: Sequence[int], stops: Sequence[str]) -> str | None:
        # Every token adds at least a byte unless it is invisible, so a stop string that ends in
        # the last token lies within as many tokens as it has bytes.
        reach = max(len(s.encode()) for s in stops) + 1
        tail = self._tokenizer.decode(list(output_ids[-reach:]), skip_special_tokens=False)
        return next((s for s in stops if s in tail), None)
