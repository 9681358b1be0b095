"""Load of the gateway's benches: conversations over real text, and the one answer to all.

The text is the standard library's own source, which is on every machine; a byte-level BPE of 16,000
entries is trained on it (one second), so that a token is about four characters, as agents' are. The
template is ChatML. Kinds of conversations, in tokens::

    chat   685 at first, 95 more a turn     8 turns: 1,017 on average
    long   3,200 at first and a turn        20 turns: 64,000
    many   4,000 to 8,000 at first, 95 more a turn
    12k    12,000 at first, 500 more a turn; also 28k, 44k, 60k
    coding 45,000 at first, 500 more a turn, and 20 tools of 3 kB in every request
    tools  as chat, with 4 tools of 0.5 kB in every request; each answer calls one, and each new
           message is the tool's
    responses  the same as a client of the Responses API sends it
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.gateway.client import CALL_ID

ANSWER_TOKENS = 64
"""With the end token."""
ROLLOUTS = 8
TURNS = 8
LONG_TURNS = 20
SYSTEM_TOKENS = 300
CONTEXTS = {"12k": 12_000, "28k": 28_000, "44k": 44_000, "60k": 60_000}
"""Tokens of the conversations of a kind at their second turn."""
CODING_TOKENS = 45_000
TURN_TOKENS = 500
"""New ones of each turn of these, the answer's included."""
GROWING = 8
"""Conversations of each of these kinds."""
TOOLS, TOOL_CHARACTERS = 20, 2_800
SHORT_TOOLS, SHORT_TOOL_CHARACTERS = 4, 200
CALLING = ("tools", "responses")
"""Kinds of conversations in which each answer is a tool call."""
VOCABULARY = 16_000
TEXT_CHARACTERS = 4_000_000

END = "<|im_end|>"
TEMPLATE = (
    "{%- if tools %}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>\n{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' "
    "+ call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ANSWER = (
    "The test that failed reads its input twice and so finds nothing the second time. Read it once "
    "into a list, pass that list to both functions and run the tests again. If they pass then look "
    "for other callers of the same function, because each of them has the same mistake and will "
    "fail in the same way as soon as it is called with a file instead of a list of lines. "
)
"""Plain words: no character of it is written otherwise in JSON."""
CALLED = "tool_0"
ARGUMENTS = {"path": "tests/test_reader.py", "pattern": "read", "content": "lines of the input"}
CALL = f'<tool_call>\n{{"name": "{CALLED}", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
"""Answer that is a tool call, as the template writes it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Files for the processes of a bench, and what is checked afterwards."""

    folder: Path
    answer_ids: list[int]
    call_ids: list[int]
    """Ids of the answer that is a tool call."""

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def answer_file(self) -> Path:
        """File with the answers that `engine.py` gives."""
        return self.folder / "answer.json"

    @property
    def conversations_file(self) -> Path:
        """File with the conversations that `client.py` sends."""
        return self.folder / "conversations.json"


def make_workload(folder: Path) -> Workload:
    """Write all files of a bench to `folder`."""
    text, tokenizer = _text(), _tokenizer()
    answer = tokenizer.encode(ANSWER).ids[: ANSWER_TOKENS - 1]
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in answer]
    call, end = tokenizer.encode(CALL).ids, tokenizer.encode(END).ids
    workload = Workload(folder, [*answer, *end], [*call, *end])
    _save_tokenizer(tokenizer, workload.tokenizer_path)
    arguments = json.dumps(ARGUMENTS)
    known = {
        "prompt_ids": tokenizer.encode(text[:8_000]).ids[:1_000],
        "tokenizer_path": str(workload.tokenizer_path),
    }
    workload.answer_file.write_bytes(
        orjson.dumps(
            {
                "text": {**known, "pieces": [*pieces, ""], **_sampled(workload.answer_ids)},
                "call": {
                    **known,
                    "pieces": [*map(tokenizer.decode, ([i] for i in call)), ""],
                    **_sampled(workload.call_ids),
                    "function": {"name": CALLED, "arguments": arguments},
                },
            }
        )
    )
    source = _Source(text, tokenizer)
    said = "".join(pieces)
    workload.conversations_file.write_bytes(
        orjson.dumps(
            {
                "chat": _conversations(source, said, firsts=[370] * 512, follow_ups=997, tokens=20),
                "long": _conversations(
                    source, said, firsts=[2_890] * 8, follow_ups=101, tokens=3_128
                ),
                "many": _conversations(
                    source,
                    said,
                    firsts=[3_700 + 4_000 * k // 63 for k in range(64)],
                    follow_ups=997,
                    tokens=20,
                ),
                **{kind: _growing(source, said, n) for kind, n in CONTEXTS.items()},
                "coding": {
                    **_growing(source, said, CODING_TOKENS),
                    "more": _more(tools=_tools(source, TOOLS, TOOL_CHARACTERS)),
                },
                **_calling(source, arguments),
            }
        )
    )
    return workload


def _sampled(ids: list[int]) -> dict[str, Any]:
    return {"ids": ids, "log_probs": [-(k % 7 + 1) / 8 for k in range(len(ids))]}


def _more(**fields: Any) -> str:
    """Fields of a request behind its list."""
    return "," + orjson.dumps(fields).decode()[1:-1]


def _calling(source: _Source, arguments: str) -> dict[str, Any]:
    """Conversations in which each answer is a tool call: of chat completions, and of the Responses
    API."""
    tools = _tools(source, SHORT_TOOLS, SHORT_TOOL_CHARACTERS)
    called = {"name": CALLED, "arguments": arguments}
    system, firsts = {"role": "system", "content": source.system}, range(512)
    users = [{"role": "user", "content": source.take(370)} for _ in firsts]
    results = [source.take(20) for _ in range(997)]
    call = {"id": CALL_ID, "type": "function", "function": called}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    item = {"type": "function_call", "call_id": CALL_ID, **called}
    common = {"answer": f'"{CALLED}"', "answer_characters": 0, "calls": True}
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    return {
        "tools": {
            **common,
            "heads": [_fragment(system, user) for user in users],
            "follow_ups": [
                "," + _fragment(reply, {"role": "tool", "tool_call_id": CALL_ID, "content": result})
                for result in results
            ],
            "more": _more(tools=tools),
        },
        "responses": {
            **common,
            "list_name": "input",
            "limit_name": "max_output_tokens",
            "heads": [_fragment(user) for user in users],
            "follow_ups": [
                ","
                + _fragment(
                    item, {"type": "function_call_output", "call_id": CALL_ID, "output": result}
                )
                for result in results
            ],
            "more": _more(instructions=source.system, tools=flat),
        },
    }


def _growing(source: _Source, answer: str, tokens: int) -> dict[str, Any]:
    new = TURN_TOKENS - ANSWER_TOKENS
    firsts = [tokens - SYSTEM_TOKENS - TURN_TOKENS] * GROWING
    return _conversations(source, answer, firsts=firsts, follow_ups=101, tokens=new)


def _tools(source: _Source, n: int, n_characters: int) -> list[dict[str, Any]]:
    """Tools as coding agents send them, with descriptions of `n_characters`: few parameters."""
    argument = {"type": "string", "description": "What the tool is to work on, as it stands."}
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{k}",
                "description": source.take(n_characters)[:n_characters],
                "parameters": {
                    "type": "object",
                    "properties": dict.fromkeys(("path", "pattern", "content"), argument),
                    "required": ["path"],
                },
            },
        }
        for k in range(n)
    ]


def _conversations(
    source: _Source, answer: str, *, firsts: list[int], follow_ups: int, tokens: int
) -> dict[str, Any]:
    """Fragments as `client.Conversations` has them.

    Args:
        firsts: tokens of the first user message of each prompt.
        follow_ups: how many later user messages there are.
        tokens: of each of these.
    """
    system = {"role": "system", "content": source.system}
    return {
        "heads": [_fragment(system, {"role": "user", "content": source.take(n)}) for n in firsts],
        "follow_ups": [
            ","
            + _fragment(
                {"role": "assistant", "content": answer},
                {"role": "user", "content": source.take(tokens)},
            )
            for _ in range(follow_ups)
        ],
        "answer": answer,
        "answer_characters": len(answer),
    }


def _fragment(*messages: Mapping[str, Any]) -> str:
    return orjson.dumps(messages).decode()[1:-1]


class _Source:
    """Pieces of text of a wanted number of tokens, one after the other."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._ids = cycle(tokenizer.encode_batch_fast([text])[0].ids)
        self._tokenizer = tokenizer
        self.system = self.take(SYSTEM_TOKENS)

    def take(self, n: int) -> str:
        return self._tokenizer.decode(list(islice(self._ids, n)))


@lru_cache
def _text() -> str:
    """The beginning of the standard library's source."""
    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_text("utf8", "replace")
        if len(text) > TEXT_CHARACTERS:
            break
    return text[:TEXT_CHARACTERS]


@lru_cache
def _tokenizer() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = _text()
    bpe.train_from_iterator(
        (text[i : i + 10_000] for i in range(0, len(text), 10_000)),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|endoftext|>", "<|im_start|>", END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # slow to import; only a run needs it

    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer_class(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
