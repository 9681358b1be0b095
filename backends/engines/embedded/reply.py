"""SGLang's `/generate` request and response bodies.

A stream is cumulative: every chunk repeats all ids and log-probs so far. Their JSON is kept and
extended, so that a chunk costs what is new, not what is old.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from stepwell.backends.engines.embedded.request import (
    InvalidRequestError,
    Request,
    SamplingParams,
    TopLogProbs,
)
from stepwell.backends.engines.embedded.text import Detokenizer

MAX_BATCH = 4096

# Fields of SGLang's GenerateReqInput that change what is generated or returned and that the
# embedded engine does not implement: set to anything but these values, they are refused.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "return_sampling_mask": (None, False),
    "return_entropy": (None, False),
    "session_params": (None,),
    "lora_id": (None,),
    "custom_logit_processor": (None,),
    "max_thinking_tokens": (None,),
}


def parse_generate(
    body: Any, tokenizer: Any, *, stream_interval: int = 1
) -> tuple[list[Request], bool]:
    """The requests of a `/generate` body, and whether it is a batch (answered with a list).

    Raises:
        InvalidRequestError: a field is missing, malformed, or not supported.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) not in neutral:
            raise InvalidRequestError(f"{name} is not supported by the embedded engine; use SGLang")
    prompts, batch = _prompts(body, tokenizer)
    columns = {
        name: _column(body.get(name), len(prompts), batch)
        for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    }
    params = [SamplingParams.parse(p) for p in columns["sampling_params"]]
    n = params[0].n
    if any(p.n != n for p in params):
        raise InvalidRequestError("sampling_params.n must be the same for every prompt of a batch")
    rids = _rids(body.get("rid"), len(prompts), n)
    requests: list[Request] = []
    for i, prompt in enumerate(prompts):
        start = columns["logprob_start_len"][i]
        for k in range(n):
            requests.append(
                Request(
                    rid=rids[i * n + k],
                    prompt_ids=prompt,
                    params=params[i],
                    return_logprob=bool(columns["return_logprob"][i]),
                    logprob_start_len=-1 if start is None else _integer("logprob_start_len", start),
                    top_logprobs_num=_integer(
                        "top_logprobs_num", columns["top_logprobs_num"][i] or 0
                    ),
                    stream=bool(body.get("stream")),
                    stream_interval=params[i].stream_interval or stream_interval,
                )
            )
    return requests, batch or n > 1


def _prompts(body: dict[str, Any], tokenizer: Any) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise InvalidRequestError("Either text or input_ids should be provided, and not both.")
    if text is not None:
        batch = isinstance(text, list)
        texts = text if batch else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidRequestError("text must be a string or a non-empty list of strings")
        return [list(tokenizer(t).input_ids) for t in texts], batch
    if not isinstance(ids, list) or not ids:
        raise InvalidRequestError("input_ids must be a non-empty list of token ids, or of such")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    if len(prompts) > MAX_BATCH:
        raise InvalidRequestError(f"a batch has at most {MAX_BATCH} prompts, got {len(prompts)}")
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
            raise InvalidRequestError("input_ids must hold integers")
    return prompts, batch


def _column(value: Any, n: int, batch: bool) -> list[Any]:
    """One value per prompt: SGLang takes a scalar for all, or a list in a batch."""
    if isinstance(value, list):
        if not batch or len(value) != n:
            raise InvalidRequestError(f"got a list of {len(value)} values for {n} prompt(s)")
        return value
    return [value] * n


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or value < -1:
        raise InvalidRequestError(f"{name} must be an integer >= -1, got {value!r:.80}")
    return value


def _rids(rid: Any, n_prompts: int, n: int) -> list[str]:
    total = n_prompts * n
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        return [rid] if total == 1 else [f"{rid}_{i}" for i in range(total)]
    if not isinstance(rid, list) or not all(isinstance(r, str) for r in rid):
        raise InvalidRequestError("rid must be a string, or a list of strings for a batch")
    if len(rid) != n_prompts or len(set(rid)) != n_prompts:
        raise InvalidRequestError(f"got {len(rid)} rids for {n_prompts} prompts; pass unique ones")
    return rid if n == 1 else [f"{r}_{k}" for r in rid for k in range(n)]


class Reply:
    """Builds the response of one request, once or chunk by chunk."""

    def __init__(self, request: Request, tokenizer: Any, *, text_in_logprobs: bool = False) -> None:
        self.request = request
        self._tokenizer = tokenizer if text_in_logprobs else None
        self._detokenizer = Detokenizer(tokenizer, request)
        self._ids = bytearray()
        self._log_probs = bytearray()
        self._n = 0

    def body(
        self, weight_version: str, *, stream: bool = False, index: int | None = None
    ) -> bytes | None:
        """The response so far as JSON; None if a stream has nothing new to say."""
        request = self.request
        finished = request.finished  # before the length: it is set after the last token
        n = len(request.output_ids)
        if stream and not finished and n == self._n:
            return None
        output_ids = request.output_ids[:n]
        self._extend(n)
        text = (
            self._detokenizer.final(output_ids)
            if finished
            else self._detokenizer.update(output_ids)
        )
        body: dict[str, Any] = {
            "text": text,
            "output_ids": orjson.Fragment(bytes(b"[" + self._ids + b"]")),
            "meta_info": self._meta_info(n, weight_version, finished=finished, stream=stream),
        }
        if index is not None:
            body["index"] = index
        return orjson.dumps(body)

    def _extend(self, n: int) -> None:
        request, old = self.request, self._n
        if n == old:
            return
        new = request.output_ids[old:n]
        triples = [
            [log_prob, token, self._token_text(token)]
            for log_prob, token in zip(request.output_log_probs[old:n], new, strict=True)
        ]
        comma = b"," if old else b""
        self._ids += comma + orjson.dumps(new)[1:-1]
        if request.return_logprob:
            self._log_probs += comma + orjson.dumps(triples)[1:-1]
        self._n = n

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token])

    def _top(self, top: TopLogProbs | None) -> list[list[Any]] | None:
        return None if top is None else [[v, t, self._token_text(t)] for v, t in top]

    def _meta_info(
        self, n: int, weight_version: str, *, finished: bool, stream: bool
    ) -> dict[str, Any]:
        request = self.request
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish_reason if finished else None,
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": weight_version,
            "num_retractions": request.num_retractions,
        }
        if request.return_logprob:
            scores = request.input_log_probs
            scored = request.prompt_ids[request.logprob_start_len :] if scores else []
            meta["input_token_logprobs"] = [
                [v, t, self._token_text(t)] for v, t in zip(scores, scored, strict=True)
            ]
            meta["output_token_logprobs"] = orjson.Fragment(bytes(b"[" + self._log_probs + b"]"))
            meta["output_token_logprobs_length"] = n
            if request.top_logprobs_num:
                meta["input_top_logprobs"] = [self._top(t) for t in request.input_top]
                meta["output_top_logprobs"] = [self._top(t) for t in request.output_top[:n]]
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = n
        meta["cached_tokens"] = request.cached_tokens
        if finished:
            meta["weight_versions"] = [
                {"version": s.version, "start": s.start, "end": s.end} for s in request.spans
            ]
        meta["cached_tokens_details"] = (
            {"device": request.cached_tokens, "host": 0} if request.cached_tokens else None
        )
        meta["dp_rank"] = None
        if finished:
            meta["e2e_latency"] = time.perf_counter() - request.received
        if not (finished and stream):
            meta["response_sent_to_client_ts"] = time.time()
        return meta
