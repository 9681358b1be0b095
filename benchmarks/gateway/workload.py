"""Load of the gateway's benches: conversations over real text, and the one answer to all.

The text is the standard library's own source, which is on every machine; a byte-level BPE of 16,000
entries is trained on it (one second), so that a token is about four characters, as agents' are. The
template is ChatML. Kinds of conversations, in tokens::

    chat   685 at first, 95 more a turn     8 turns: 1,017 on average
    long   3,200 at first and a turn        20 turns: 64,000
    many   4,000 to 8,000 at first, 95 more a turn
    12k    12,000 at first, 500 more a turn; also 28k, 44k, 60k
    coding 45,000 at first, 500 more a turn, and 20 tools of 3 kB in every request
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
VOCABULARY = 16_000
TEXT_CHARACTERS = 4_000_000

END = "<|im_end|>"
TEMPLATE = (
    "{%- if tools %}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>\n' + call | tojson + '\n</tool_call>' }}{%- endfor %}"
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Files for the processes of a bench, and what is checked afterwards."""

    folder: Path
    answer_ids: list[int]

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def answer_file(self) -> Path:
        """File with the answer that `engine.py` gives."""
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
    workload = Workload(folder, [*answer, *tokenizer.encode(END).ids])
    _save_tokenizer(tokenizer, workload.tokenizer_path)
    workload.answer_file.write_bytes(
        orjson.dumps(
            {
                "ids": workload.answer_ids,
                "log_probs": [-(k % 7 + 1) / 8 for k in range(ANSWER_TOKENS)],
                "pieces": [*pieces, ""],
                "prompt_ids": tokenizer.encode(text[:8_000]).ids[:1_000],
                "tokenizer_path": str(workload.tokenizer_path),
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
                    "more": ',"tools":' + orjson.dumps(_tools(source)).decode(),
                },
            }
        )
    )
    return workload


def _growing(source: _Source, answer: str, tokens: int) -> dict[str, Any]:
    new = TURN_TOKENS - ANSWER_TOKENS
    firsts = [tokens - SYSTEM_TOKENS - TURN_TOKENS] * GROWING
    return _conversations(source, answer, firsts=firsts, follow_ups=101, tokens=new)


def _tools(source: _Source) -> list[dict[str, Any]]:
    """Tools as coding agents send them: long descriptions, few parameters."""
    argument = {"type": "string", "description": "What the tool is to work on, as it stands."}
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{k}",
                "description": source.take(TOOL_CHARACTERS)[:TOOL_CHARACTERS],
                "parameters": {
                    "type": "object",
                    "properties": dict.fromkeys(("path", "pattern", "content"), argument),
                    "required": ["path"],
                },
            },
        }
        for k in range(TOOLS)
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


def _fragment(*messages: dict[str, str]) -> str:
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
