"""Loss masks: exactly what the assistant wrote, whatever the chat template and the conversation."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stepwell.backends.masks import (
    MaskedRow,
    MaskError,
    mask_generator,
    to_steps,
)
from stepwell.backends.masks.base import for_template
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.tokens.graph import Turn as GatewayTurn
from stepwell.gateway.tokens.render import ChatRenderer
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.gateway.conftest import hf_tokenizer, make_backend, make_template

Message = dict[str, Any]

GENERATION = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content + '<|im_end|>' }}"
    "{%- endgeneration %}{{- '\n' }}{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

FAMILIES = ("chatml", "qwen3", "llama3", "no_tools", "unclosed", "deepseek", "generation")
CLOSE = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "no_tools": "</s>",
    "unclosed": "\n",
    "deepseek": "<｜end▁of▁sentence｜>",
    "generation": "<|im_end|>",
}


@lru_cache
def tokenizer(family: str) -> Any:
    if family != "generation":
        return hf_tokenizer(family)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["user assistant what is the answer"] * 9,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[1])
    made.chat_template = GENERATION
    return made


def text_of(family: str, ids: Sequence[int] | np.ndarray) -> str:
    return str(tokenizer(family).decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def written(family: str, row: MaskedRow) -> list[str]:
    """The texts with loss, turn by turn, after checking that the turns are the mask."""
    mask = np.zeros(len(row.token_ids), np.int8)
    for turn in row.turns:
        mask[turn.start : turn.end] = turn.has_loss
    assert mask.tolist() == row.loss_mask.tolist()
    return [text_of(family, row.token_ids[t.start : t.end]) for t in row.turns if t.has_loss]


def without_loss(family: str, row: MaskedRow) -> str:
    return text_of(family, row.token_ids[row.loss_mask == 0])


def chat(*pairs: tuple[str, str], system: str | None = None) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in pairs:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages


# ── every template ───────────────────────────────────────────────────────────────────────────────

SAID = {
    "chatml": "{}<|im_end|>",
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "llama3": "{}<|eot_id|>",
    "no_tools": "{}</s>",
    "unclosed": "{}\n",
    "deepseek": "\n</think>\n\n{}<｜end▁of▁sentence｜>",
    "generation": "{}<|im_end|>",
}
"""Text of the model for an answer without reasoning. Qwen3's template shows an empty thought in the
last turn; DeepSeek's prompt has opened one."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_is_the_assistants_text_with_the_token_that_closes_the_turn(family: str) -> None:
    messages = chat(("one?", "uno"), ("two?", "dos"), system="Translate.")
    row = mask_generator("auto", tokenizer(family))(messages)
    assert written(family, row) == [SAID[family].format("uno"), SAID[family].format("dos")]
    assert [t.message_index for t in row.turns] == [2, 4]
    assert len(row.token_ids) == len(row.loss_mask) == row.turns[-1].end
    assert (row.token_ids.dtype, row.loss_mask.dtype) == (np.int32, np.int8)


@pytest.mark.parametrize("family", ["chatml", "llama3", "no_tools", "unclosed", "generation"])
def test_where_nothing_is_rewritten_the_tokens_are_the_templates_own(family: str) -> None:
    messages = chat(("one?", "uno"), ("two?", "dos"))
    row = mask_generator("auto", tokenizer(family))(messages)
    whole = tokenizer(family).apply_chat_template(messages, return_dict=False)
    assert row.token_ids.tolist() == whole[: len(row.token_ids)]
    assert text_of(family, whole[len(row.token_ids) :]) in ("", "\n")


def test_arguments_given_as_text_are_shown_as_the_objects_they_are() -> None:
    function = {"name": "f", "arguments": '{"x":  1}'}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "two"},
    ]
    row = mask_generator("llama3", tokenizer("llama3"))(messages)
    assert written("llama3", row) == [
        '{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
        "two<|eot_id|>",
    ]
    assert function["arguments"] == '{"x":  1}', "what was given is not touched"


def test_arguments_of_100_000_levels_are_shown_as_the_text_they_are() -> None:
    function = {"name": "f", "arguments": '{"a":' * 100_000}
    shown = for_template(
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    )
    assert shown["tool_calls"] == [{"function": function}]


def test_close_tokens_that_swallow_white_space_do_so_inside_a_row() -> None:
    """Phi-3's special tokens are like that."""
    plain = tokenizer("no_tools").backend_tokenizer
    phi = PreTrainedTokenizerFast(tokenizer_object=type(plain).from_str(plain.to_str()))
    greedy = [AddedToken(t, rstrip=True, special=True) for t in ("<|user|>", "<|assistant|>")]
    phi.add_special_tokens({"eos_token": AddedToken("<|end|>", rstrip=True, special=True)})
    phi.add_tokens(greedy, special_tokens=True)
    phi.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    messages = chat(("one?", "uno"), ("two?", "dos"))
    row = mask_generator("prefix", phi)(messages)
    assert row.token_ids.tolist() == phi.apply_chat_template(messages, return_dict=False)
    assert phi.decode(row.token_ids[row.loss_mask == 1].tolist()) == "uno<|end|>dos<|end|>"


# Words that tell who wrote them, with all that may confuse: control tokens of every family, white
# space at both ends, letters of several bytes.
NOISE = st.lists(
    st.sampled_from(
        (
            " ",
            "\n",
            "\n\n",
            "é",
            "🙂",
            "<|im_end|>",
            "<|im_start|>assistant\n",
            "<|eot_id|>",
            "</s>",
            "assistant: ",
            "<｜Assistant｜>",
            "{",
            "\t",
            "<tool_call>",
            "word",
        )
    ),
    max_size=4,
).map("".join)
HARMLESS = st.lists(st.sampled_from([" ", "\n", "é", "🙂", "{", "word"]), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, tools: bool, reasoning: bool) -> list[Message]:
    messages: list[Message] = []
    count = iter(range(1000))

    def theirs(role: str, **more: Any) -> Message:
        content = f"{draw(NOISE)}q{next(count)}q{draw(NOISE)}"
        return {"role": role, "content": content, **more}

    if draw(st.booleans()):
        messages.append(theirs("system"))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(theirs("user"))
        for number in range(draw(st.integers(1, 3)) if tools else 1):
            answer: Message = {
                "role": "assistant",
                "content": f"{draw(HARMLESS)}a{next(count)}a{draw(HARMLESS)}",
            }
            if reasoning and draw(st.booleans()):
                answer["reasoning_content"] = f"a{next(count)}a because{draw(HARMLESS)}"
            if draw(st.integers(0, 4)) == 0:
                answer["step_loss_mask"] = draw(st.sampled_from([0, 1]))
            messages.append(answer)
            if tools and number < 2 and draw(st.booleans()):
                function = {"name": "f", "arguments": json.dumps({"x": f"a{next(count)}a"})}
                answer["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
                messages.append(theirs("tool", tool_call_id="c1"))
            else:
                break
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": f"a{next(count)}a"})
    return messages


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"q9999q": "object"}}}]


def words(text: str, kind: str) -> list[str]:
    return re.findall(f"{kind}[0-9]+{kind}", text)


def words_of(messages: Sequence[Message], shown_calls_only: bool = False) -> list[str]:
    found = []
    for m in messages:
        calls = m.get("tool_calls")
        content = "" if shown_calls_only and calls else m["content"]
        found += words(m.get("reasoning_content", "") + content + json.dumps(calls or []), "a")
    return found


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_all_that_the_assistant_wrote_has_loss_and_nothing_that_it_was_told(
    family: str, data: st.DataObject
) -> None:
    tools = family in ("chatml", "qwen3", "llama3")
    messages = data.draw(conversations(tools, reasoning=family in ("qwen3", "deepseek")))
    if family == "llama3" and tools:
        for first in messages[: 1 + (messages[0]["role"] == "system")]:
            first["content"] = first["content"].strip()
    row = mask_generator("auto", tokenizer(family))(messages, TOOLS if tools else None)
    with_loss = [m for m in messages if m["role"] == "assistant" and m.get("step_loss_mask", 1)]
    texts = written(family, row)
    told = [m["content"] for m in messages if m["role"] != "assistant"]
    assert [words_of([m], family == "llama3") for m in with_loss] == [words(t, "a") for t in texts]
    assert words("".join(texts), "q") == []
    context = without_loss(family, row)
    told_words = {w for t in told for w in words(t, "q")} | ({"q9999q"} if tools else set())
    assert set(words(context, "q")) == told_words
    masked_out = [m for m in messages if m["role"] == "assistant" and m not in with_loss]
    assert sorted(words(context, "a")) == sorted(words_of(masked_out, family == "llama3"))
    assert all(t.endswith(CLOSE[family]) for t in texts)
    assert all(t.count(CLOSE[family]) == 1 for t in texts if family != "unclosed")


# ── thinking ─────────────────────────────────────────────────────────────────────────────────────

THOUGHTFUL = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Easy."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>\nHard.\n</think>\n\n6"},
]


def test_past_reasoning_stays_in_the_context_as_the_gateway_keeps_it() -> None:
    row = mask_generator("qwen", tokenizer("qwen3"))(THOUGHTFUL)
    assert written("qwen3", row) == [
        "<think>\nEasy.\n</think>\n\n4<|im_end|>",
        "<think>\nHard.\n</think>\n\n6<|im_end|>",
    ]
    assert without_loss("qwen3", row).replace("<|im_start|>", "") == (
        "user\n2 + 2?<|im_end|>\nassistant\n\nuser\nAnd 3 + 3?<|im_end|>\nassistant\n"
    )


@given(
    messages=conversations(tools=True, reasoning=True), family=st.sampled_from(["chatml", "qwen3"])
)
def test_a_row_is_what_the_gateway_would_have_built_in_a_rollout(
    messages: list[Message], family: str
) -> None:
    """The independent construction: whole prompt, then for each turn the response and the cut."""
    if family == "chatml":
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    # The gateway renders control tokens in users' texts as text; here they are what they are.
    chat_tokenizer = ChatTokenizer(make_backend(family), make_template(family), sanitize=False)
    renderer = ChatRenderer(chat_tokenizer)
    row = mask_generator("qwen", tokenizer(family))(messages, TOOLS)
    ids: list[int] = []
    known = 0
    turn: GatewayTurn | None = None
    for turn_of_row in row.turns:
        index = turn_of_row.message_index
        if turn is None:
            ids += renderer.whole(messages[:index], TOOLS, {}).tolist()
        else:
            new = messages[known:index]
            ids += renderer.suffix(turn, messages[:known], new, TOOLS, {}).tolist()
        assert ids == row.token_ids[: turn_of_row.start].tolist()
        response = row.token_ids[turn_of_row.start : turn_of_row.end]
        calls = tuple(
            (c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in messages[index].get("tool_calls") or ()
        )
        turn = GatewayTurn(None, response, response, 0, calls, False, None)
        ids += response.tolist()
        known = index + 1
    assert ids == row.token_ids.tolist()


def test_a_distilled_models_thought_is_written_after_the_prompt_that_opens_it() -> None:
    row = mask_generator("distill_qwen", tokenizer("deepseek"))(THOUGHTFUL)
    assert written("deepseek", row) == [
        "Easy.\n</think>\n\n4<｜end▁of▁sentence｜>",
        "Hard.\n</think>\n\n6<｜end▁of▁sentence｜>",
    ]
    assert text_of("deepseek", row.token_ids) == (
        "<｜begin▁of▁sentence｜><｜User｜>2 + 2?<｜Assistant｜><think>\nEasy.\n</think>\n\n4"
        "<｜end▁of▁sentence｜><｜User｜>And 3 + 3?<｜Assistant｜><think>\nHard.\n</think>\n\n6"
        "<｜end▁of▁sentence｜>"
    )


@pytest.mark.parametrize("family", ["llama3", "generation"])
def test_reasoning_that_a_template_never_shows_is_refused(family: str) -> None:
    with pytest.raises(
        MaskError, match=r"messages\[1\]: .* does not show its reasoning \('Easy.'\)"
    ):
        mask_generator("prefix", tokenizer(family)).rows(THOUGHTFUL[:2])


def test_a_prompt_that_opens_a_thought_which_is_not_shown_is_refused() -> None:
    with pytest.raises(MaskError, match=r"generation prompt .*<think>.* does not begin the turn"):
        mask_generator("prefix", tokenizer("deepseek"))(chat(("a", "b")))


# ── what is masked, what is refused ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_with_step_loss_mask_0_is_context(family: str) -> None:
    messages = chat(("one?", "uno"), ("two?", "dos"))
    messages[1]["step_loss_mask"] = 0
    row = mask_generator("auto", tokenizer(family))(messages)
    assert written(family, row) == [SAID[family].format("dos")]
    assert "uno" in without_loss(family, row)
    assert [t.has_loss for t in row.turns] == [False, True]


def test_what_follows_the_last_answer_is_left_out() -> None:
    generator = mask_generator("qwen", tokenizer("chatml"))
    messages = chat(("one?", "uno"))
    more = generator([*messages, {"role": "user", "content": "two?"}])
    assert more.token_ids.tolist() == generator(messages).token_ids.tolist()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "none of 0 messages is the assistant's"),
        ([{"role": "user", "content": "a"}], "none of 1 messages is the assistant's"),
        (["hello"], r"messages\[0\] is 'hello'; it is an object with role"),
        ([{"role": "assistant", "content": "a"}], r"the chat template refuses messages\[:0\]"),
        ([*chat(("a", "b")), {"role": "user", "step_loss_mask": 2}], "step_loss_mask is 2"),
        (
            [*chat(("a", "b")), {"role": "assistant", "tool_calls": '[{"name": "add"}]'}],
            r"messages\[2\]: tool_calls is '\[\{\"name\": \"add\"\}\]'; it is a list of objects",
        ),
        (
            [*chat(("a", "b")), {"role": "assistant", "tool_calls": [{"function": "add"}]}],
            r"messages\[2\]: tool_calls is \[\{'function': 'add'\}\]",
        ),
    ],
)
def test_a_conversation_that_cannot_be_masked_is_refused(
    messages: list[Message], message: str
) -> None:
    with pytest.raises(MaskError, match=message):
        mask_generator("prefix", tokenizer("qwen3"))(messages)


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    function = {"name": "f", "arguments": {}}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
    ]
    with pytest.raises(MaskError, match="only supports single tool-calls at once"):
        mask_generator("llama3", tokenizer("llama3"))(messages)
    with pytest.raises(MaskError, match=r"messages\[1\] calls tools"):
        mask_generator("distill_qwen", tokenizer("deepseek"))(messages)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("qwenn", "chatml", "is 'qwenn'; choose one of auto, distill_qwen"),
        ("distill_qwen", "chatml", "DistillQwenMasks is for templates with '<｜Assistant｜>'"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(name: str, family: str, message: str) -> None:
    with pytest.raises(MaskError, match=message.replace("|", r"\|")):
        mask_generator(name, tokenizer(family))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml").backend_tokenizer)
    with pytest.raises(MaskError, match="has no chat template"):
        mask_generator("auto", bare)


def test_the_shipped_models_own_template_is_masked() -> None:
    model = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
    shipped = AutoTokenizer.from_pretrained(model)
    row = mask_generator("auto", shipped)(chat(("one?", "uno")))
    assert shipped.decode(row.token_ids[row.loss_mask == 1].tolist()) == "uno<|im_end|>"


# ── Steps ────────────────────────────────────────────────────────────────────────────────────────


@given(messages=conversations(tools=True, reasoning=True))
def test_steps_hold_every_turn_once_and_extend_their_parents(messages: list[Message]) -> None:
    generator = mask_generator("qwen", tokenizer("qwen3"))
    steps = to_steps(generator, messages, TOOLS, trajectory_uid="t", prompt_uid="p", reward=1.0)
    assert [s.metadata["message_index"] for s in steps] == [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("step_loss_mask", 1)
    ]
    for step in steps:
        message = messages[step.metadata["message_index"]]
        assert words(text_of("qwen3", step.response_ids), "a") == words_of([message])
        if step.parent_index is not None:
            parent = steps[step.parent_index]
            before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
            assert step.prompt_ids.tolist()[: len(before)] == before
            assert len(step.prompt_ids) > len(before)
    assert [s.parent_index for s in steps] == [None, *range(len(steps) - 1)][: len(steps)]
    assert [s.reward for s in steps] == [None] * (len(steps) - 1) + [1.0] * bool(steps)
    assert [s.is_last for s in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)


async def test_steps_of_messages_go_through_the_pool() -> None:
    generator = mask_generator("auto", tokenizer("qwen3"))
    steps = to_steps(generator, THOUGHTFUL, trajectory_uid="t", prompt_uid="p", reward=1.0)
    async with DataPoolClient.local() as pool:
        assert await pool.submit_steps(steps, "sft") == ["accepted", "accepted"]
        lease = await pool.lease_batch(1, "sft", 1)
    assert lease is not None
    assert [s.response_ids.tolist() for s in lease.steps] == [
        s.response_ids.tolist() for s in steps
    ]
    assert lease.groups[0].trajectories[0].reward == 1.0


# ── generators of one's own ──────────────────────────────────────────────────────────────────────


OWN = '''
from stepwell.backends.masks import MultiTurnLossMaskGenerator, TurnwiseMasks


class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):
    """As slime's Agent Rollout document adds one: only the last reply has loss."""

    def get_custom_multi_turn_loss_mask(self, messages):
        ids = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
        said = self.tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
        return ids + said, [0] * len(ids) + [1] * len(said)

    def get_loss_mask(self, messages):
        if self.tokenizer_type == "custom_task":
            return self.get_custom_multi_turn_loss_mask(messages)
        return super().get_loss_mask(messages)


class FirstSentence(TurnwiseMasks):
    def _turn(self, messages, index, tools):
        prompt = self._render(messages[:index], tools, prompt=True)
        return prompt, messages[index]["content"].partition(".")[0]


class Alone:
    """slime's shape without slime's class."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def get_loss_mask(self, messages, tools=None):
        text = f"{len(tools or ())} tools: "
        ids = [self.tokenizer(t)["input_ids"] for t in (text, messages[-1]["content"])]
        return ids[0] + ids[1], [0] * len(ids[0]) + [1] * len(ids[1])


def function(tokenizer, messages):
    ids = tokenizer("says ")["input_ids"]
    return ids + ids, [0] * len(ids) + [1] * len(ids)


def broken(tokenizer, messages):
    masks = {"length": [1, 1], "none": [0, 0, 0], "first": [1, 0, 1]}
    return [1, 2, 3], masks[messages[0]["content"]]


def raises(tokenizer, messages):
    raise KeyError("no such task")


def leaves(tokenizer, messages):
    raise SystemExit("no such task")


number = 7
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The file of somebody's generators."""
    path = tmp_path / "my_masks.py"
    path.write_text(OWN)
    return str(path)


TALK = [
    *chat(("one?", "uno. done")),
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "dos"},
]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("CustomTaskLossMaskGenerator(custom_task)", ["dos"]),
        ("CustomTaskLossMaskGenerator", ["uno. done<|im_end|>\n", "dos<|im_end|>\n"]),
        ("FirstSentence", ["uno", "dos"]),
        ("Alone", ["dos"]),
        ("function", ["says "]),
    ],
)
def test_a_generator_of_ones_own_is_named_by_its_path(
    own: str, name: str, texts: list[str]
) -> None:
    generator = mask_generator(f"{own}:{name}", tokenizer("chatml"))
    assert written("chatml", generator(TALK)) == texts
    steps = to_steps(generator, TALK, trajectory_uid="t", prompt_uid="p")
    assert [text_of("chatml", s.response_ids) for s in steps] == texts
    assert [s.parent_index for s in steps] == [None, 0][: len(steps)]


def test_a_generator_of_ones_own_gets_tools_and_template_arguments_or_is_refused(own: str) -> None:
    alone = mask_generator(f"{own}:Alone", tokenizer("chatml"))
    assert "1 tools" in text_of("chatml", alone(TALK, TOOLS[:1]).token_ids)
    with pytest.raises(MaskError, match=r"tools, which .*function' is not given"):
        mask_generator(f"{own}:function", tokenizer("chatml"))(TALK, TOOLS)
    greets = copy.copy(tokenizer("chatml"))
    greets.chat_template = "{{ greeting }}" + greets.chat_template
    name = f"{own}:CustomTaskLossMaskGenerator(custom_task)"
    row = mask_generator(name, greets, {"greeting": "hello "})(TALK)
    assert text_of("chatml", row.token_ids).startswith("hello <|im_start|>")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("broken", "length", r"returned \(\[1, 2, 3\], \[1, 1\]\); return \(token_ids, loss_mask"),
        ("broken", "none", "has no 1"),
        ("broken", "first", "begins with 1, before which there is no context"),
        ("raises", "any", "raises' failed .KeyError: 'no such task'"),
        ("leaves", "any", "leaves' failed .SystemExit: no such task"),
    ],
)
def test_what_a_generator_of_ones_own_returns_is_checked(
    own: str, name: str, content: str, problem: str
) -> None:
    generator = mask_generator(f"{own}:{name}", tokenizer("chatml"))
    with pytest.raises(MaskError, match=problem):
        generator(chat((content, "b")))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("custom_task", "is 'custom_task'; choose one of auto, .* or name a class or function"),
        ("{own}:nothing", "cannot be imported .ImportError: .*has no 'nothing'"),
        ("nowhere.module:Masks", "cannot be imported .ModuleNotFoundError"),
        ("{own}:number", "is 7; name a LossMaskGenerator, a class with get_loss_mask"),
        ("{own}:FirstSentence(custom_task)", "is no class with get_loss_mask; leave the brackets"),
        ("{own}:Alone(custom_task)", "cannot be built .TypeError"),
    ],
)
def test_a_path_that_leads_to_no_generator_is_refused(own: str, name: str, problem: str) -> None:
    with pytest.raises(MaskError, match=problem):
        mask_generator(name.format(own=own), tokenizer("chatml"))
