"""The fixed-answer engine, a process of its own: every prompt gets the same tokens, 64 of a text or
those of a tool call.

    python -P engine.py ANSWER.json        prints its port; ends when its standard input ends

Each line on its standard input sets the delay before an answer (`delay_s`) and between the events
of a stream (`interval_s`), how many a stream has (`n_events`), and which answer is given (`answer`:
`text` or `call`, which nobody streams as chat completions); it is answered by a line that
tells when the events of each stream since the line before were written (seconds of the monotonic
clock, which all processes share).

It speaks SGLang's `/generate` (whole, or as a stream of cumulative events), and chat completions as
SGLang and vLLM answer them: with ids and log-probs for those who ask by `return_token_ids`. Every
answer is bytes made at the start; a request costs its parsing.

Imports nothing of ours: it starts at once, and what it costs is the same for all systems.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httptools
import orjson
import uvloop

VERSION = "1"
"""`weight_version` of every answer."""
CONTEXT_LENGTH = 131_072

Events: TypeAlias = list[bytes]


class Answers:
    """All that is ever answered, as whole HTTP responses.

    Args:
        answer: `ids` and `log_probs` of the response with its end token, `pieces` (the text of each
            id, "" for the end token), `prompt_ids`, which stand for any prompt's,
            `tokenizer_path`, and `function`, if it is a tool call.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self._ids: list[int] = answer["ids"]
        self._log_probs: list[float] = answer["log_probs"]
        self._pieces: list[str] = answer["pieces"]
        self._prompt_ids: list[int] = answer["prompt_ids"]
        self._function: dict[str, str] | None = answer.get("function")
        self.tokenizer_path: str = answer["tokenizer_path"]
        n = len(self._ids)
        self.generate = _response(self._generated(n))
        self.chat = _response(self._completion(with_ids=False))
        self.chat_with_ids = _response(self._completion(with_ids=True))
        self.divide(n)

    def divide(self, n_events: int) -> None:
        """Give each stream this many events, of as many tokens each as can be; 0: one a token."""
        n = len(self._ids)
        n_events = min(n_events or n, n)
        ends = [(k + 1) * n // n_events for k in range(n_events)]
        self.generate_events = [_event(self._generated(k)) for k in ends]
        self.chat_events = self._chunks(ends, with_ids=False)
        self.chat_events_with_ids = self._chunks(ends, with_ids=True)

    def _generated(self, n: int) -> dict[str, Any]:
        ended = n == len(self._ids)
        pairs = zip(self._log_probs[:n], self._ids[:n], strict=True)
        return {
            "text": "".join(self._pieces[:n]),
            "output_ids": self._ids[:n],
            "meta_info": {
                "id": "fixed",
                "finish_reason": {"type": "stop", "matched": self._ids[-1]} if ended else None,
                "prompt_tokens": len(self._prompt_ids),
                "completion_tokens": n,
                "cached_tokens": 0,
                "weight_version": VERSION,
                "output_token_logprobs": [[log_prob, i, None] for log_prob, i in pairs],
            },
        }

    def _completion(self, *, with_ids: bool) -> dict[str, Any]:
        n, n_prompt = len(self._ids), len(self._prompt_ids)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces)}
        if self._function is not None:
            call = {"id": "call_fixed", "type": "function", "function": self._function}
            message |= {"content": None, "tool_calls": [call]}
        reason = "stop" if self._function is None else "tool_calls"
        choice = {"message": message, "finish_reason": reason}
        ids = {"prompt_token_ids": self._prompt_ids} if with_ids else {}
        if with_ids:
            choice |= self._sampled(slice(None))
        return _chat("chat.completion", choice, usage=usage, **ids)

    def _chunks(self, ends: list[int], *, with_ids: bool) -> Events:
        events = []
        for start, end in zip([0, *ends], ends, strict=False):
            piece = "".join(self._pieces[start:end])
            choice: dict[str, Any] = {"delta": {"content": piece} if piece else {}}
            choice["finish_reason"] = "stop" if end == len(self._pieces) else None
            ids = {"prompt_token_ids": self._prompt_ids} if with_ids and start == 0 else {}
            if with_ids:
                choice |= self._sampled(slice(start, end))
            events.append(_event(_chat("chat.completion.chunk", choice, **ids)))
        return events

    def _sampled(self, at: slice) -> dict[str, Any]:
        """Ids and log-probs, as SGLang and vLLM answer those who ask for them."""
        log_probs = [self._log_prob(k) for k in range(len(self._ids))[at]]
        return {"token_ids": self._ids[at], "logprobs": {"content": log_probs}}

    def _log_prob(self, k: int) -> dict[str, Any]:
        return {
            "token": self._pieces[k],
            "logprob": self._log_probs[k],
            "bytes": list(self._pieces[k].encode()),
            "top_logprobs": [],
        }


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chat(kind: str, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-fixed", "object": kind, "created": 1, "model": "bench"}
    return {**head, "choices": [{"index": 0, **choice}], **more}


def _response(payload: Any) -> bytes:
    body = orjson.dumps(payload)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _event(payload: Any) -> bytes:
    """One server-sent event as one chunk of a chunked body."""
    data = b"data: " + orjson.dumps(payload) + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


@dataclass(slots=True)
class Server:
    """State that the connections share."""

    answers: Answers
    delay_s: float = 0.0
    interval_s: float = 0.0
    emitted: list[list[float]] = field(default_factory=list)
    other: dict[bytes, bytes] = field(default_factory=dict)
    """Answers to GET by path."""

    def __post_init__(self) -> None:
        model = {"id": "bench", "object": "model", "owned_by": "sglang", "root": "bench"}
        self.other[b"/v1/models"] = _response(
            {"object": "list", "data": [{**model, "max_model_len": CONTEXT_LENGTH}]}
        )
        info = {
            "model_path": "bench",
            "served_model_name": "bench",
            "tokenizer_path": self.answers.tokenizer_path,
            "is_generation": True,
            "weight_version": VERSION,
            "dp_size": 1,
            "tp_size": 1,
        }
        for path in (b"/model_info", b"/get_model_info", b"/server_info", b"/get_server_info"):
            self.other[path] = _response(info)


class Connection(asyncio.Protocol):
    """One client. Headers are not looked at: all that ask here keep their connections."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        server, path = self._server, self._path
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if path == b"/generate":
            self._answer(body, server.answers.generate, server.answers.generate_events)
        elif path == b"/v1/chat/completions":
            answers = server.answers
            if b'"return_token_ids"' in body:
                self._answer(body, answers.chat_with_ids, answers.chat_events_with_ids)
            else:
                self._answer(body, answers.chat, answers.chat_events)
        else:
            self._transport.write(server.other.get(path) or _response({}))

    def _answer(self, body: bytes, whole: bytes, events: Events) -> None:
        loop = asyncio.get_running_loop()
        if b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(STREAM_HEAD)
            times: list[float] = []
            self._server.emitted.append(times)
            self._timer = loop.call_later(self._server.interval_s, self._emit, events, 0, times)
        elif self._server.delay_s:
            answer = partial(self._transport.write, whole)
            self._timer = loop.call_later(self._server.delay_s, answer)
        else:
            self._transport.write(whole)

    def _emit(self, events: Events, k: int, times: list[float]) -> None:
        times.append(time.perf_counter())
        if k + 1 == len(events):
            self._transport.write(events[k] + DONE)
            return
        self._transport.write(events[k])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.interval_s, self._emit, events, k + 1, times)


async def main(answers: dict[str, Answers]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    server = Server(answers["text"])
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=2048)
    print(listening.sockets[0].getsockname()[1], flush=True)

    def control(line: str) -> None:
        settings, emitted = orjson.loads(line), server.emitted
        server.delay_s, server.interval_s = settings["delay_s"], settings["interval_s"]
        server.answers = answers[settings["answer"]]
        server.answers.divide(settings["n_events"])
        server.emitted = []
        print(orjson.dumps(emitted).decode(), flush=True)

    def watch() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(control, line)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    gc.freeze()
    gc.disable()  # nothing here is cyclic
    await ended.wait()


if __name__ == "__main__":
    made = orjson.loads(Path(sys.argv[1]).read_bytes())
    uvloop.run(main({name: Answers(answer) for name, answer in made.items()}))
