"""The shipped model: what it is, what its template renders, what it can and does not do yet."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.reply.reader import ReplyFormat
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.quickstart.agent import MAX_TOKENS, TOOLS
from stepwell.quickstart.make_model import (
    EVAL_SEED,
    HERE,
    WARM_UP_SEED,
    Demonstrations,
    make_model,
    make_tokenizer,
    measure,
    tasks,
    tool_call,
    warm_up,
)

MODEL = HERE / "model"
USER = {"role": "user", "content": "12 + 34 ="}
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(MODEL))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(MODEL)


def called(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def render(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **options: Any) -> str:
    return cast(str, tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


# ── the checkpoint ───────────────────────────────────────────────────────────────────────────────


def test_the_checkpoint_is_small_and_whole(model: Qwen3ForCausalLM) -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir()) < 4_000_000
    assert sum(p.numel() for p in model.parameters()) == 853_376
    assert model.dtype == torch.float32


def test_its_tokenizer_is_the_one_that_the_script_makes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made, shipped = (json.loads((d / name).read_text()) for d in (tmp_path, MODEL))
        assert made == shipped
    assert tokenizer.chat_template == (HERE / "chat_template.jinja").read_text()
    assert len(tokenizer) == 512


@pytest.mark.slow
def test_the_same_seed_makes_the_same_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = make_model(tokenizer)
        warm_up(model, Demonstrations(tokenizer, seed).batches(3, 0.4, batch_size=4), 3)
        return model.state_dict()

    first, second, other = made(0), made(0), made(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_it_guesses_most_of_the_time_and_the_tool_answers_when_it_is_used(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    torch.manual_seed(0)
    figures = measure(model, Demonstrations(tokenizer, seed=0), n=128)
    assert 0.25 < figures["tool_use"] < 0.50
    assert 0.25 < figures["accuracy"] < 0.50
    assert figures["accuracy_with_tool"] > 0.9


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


def test_prompts_are_short_and_a_call_fits_the_agents_limit(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    demonstrations = Demonstrations(tokenizer, seed=0)
    some = list(tasks(EVAL_SEED, 200))
    assert max(len(demonstrations.prompt(t["question"])) for t in some) <= 60
    longest = max(len(demonstrations.turn(tool_call(t["metadata"]["expression"]))) for t in some)
    assert longest < MAX_TOKENS


@pytest.mark.parametrize("index", range(20))
def test_a_demonstration_is_token_for_token_what_the_template_renders(
    tokenizer: PreTrainedTokenizerFast, index: int
) -> None:
    """The template renders the whole conversation; the gateway strings sampled turns together."""
    task = list(tasks(WARM_UP_SEED, index + 1))[-1]
    demonstrations = Demonstrations(tokenizer, seed=index)
    episode = demonstrations.with_tool(task)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    for part, _ in episode[1:-1]:
        text = cast(str, tokenizer.decode(part))
        if "<tool_call>" in text:
            call = json.loads(text.split("<tool_call>\n")[1].split("\n</")[0])
            messages.append(called(json.dumps(call["arguments"])))
        else:
            result = text.split("<tool_response>\n")[1].split("\n</")[0]
            messages.append({"role": "tool", "tool_call_id": "call_0", "content": result})
    rendered = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert [i for part, _ in episode[:-1] for i in part] == rendered
    assert tokenizer.decode(episode[-1][0]) == f"{task['answer']}<|im_end|>"


def test_digits_are_single_tokens_and_tool_markup_survives_skipping_special_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer.tokenize("1234 + 56") == ["1", "2", "3", "4", "Ġ+", "Ġ", "5", "6"]
    ids = tokenizer.encode(tool_call("1 + 2") + "<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == tool_call("1 + 2")


@pytest.mark.parametrize("text", ["naïve café", "日本語 🙂", "a\tb\n\n  c", "{'x': [1.5, null]}"])
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ── the chat template ────────────────────────────────────────────────────────────────────────────


def test_tools_are_listed_by_name_and_parameters(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render(tokenizer, USER, tools=TOOLS, add_generation_prompt=True) == (
        "<|im_start|>system\nTools: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\n12 + 34 =<|im_end|>\n" + ASSISTANT
    )


def test_a_system_message_stands_before_the_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert render(tokenizer, system, USER, tools=TOOLS).startswith(
        "<|im_start|>system\nBe brief.\nTools: calculator(expression)<|im_end|>\n<|im_start|>user"
    )
    assert render(tokenizer, system, USER).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    )
    assert render(tokenizer, USER) == "<|im_start|>user\n12 + 34 =<|im_end|>\n"


def test_a_tool_without_parameters_is_listed_too(tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "clock"}}]
    assert "Tools: calculator(expression) clock()<|im_end|>" in render(tokenizer, USER, tools=tools)


def test_arguments_render_alike_as_a_string_and_as_an_object(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    as_string = render(tokenizer, USER, called('{"expression": "1 + 2"}'))
    assert as_string == render(tokenizer, USER, called({"expression": "1 + 2"}))
    assert as_string.endswith(f"{ASSISTANT}{tool_call('1 + 2')}<|im_end|>\n")


def test_content_stands_before_the_call(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = render(tokenizer, USER, called({"expression": "1"}, content="Let me see."))
    assert rendered.endswith(f"{ASSISTANT}Let me see.\n{tool_call('1')}<|im_end|>\n")


def test_results_of_one_turn_share_a_user_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    results = [{"role": "tool", "tool_call_id": str(i), "content": str(i)} for i in range(2)]
    assert render(tokenizer, USER, called("{}"), *results).endswith(
        "<|im_start|>user\n<tool_response>\n0\n</tool_response>"
        "\n<tool_response>\n1\n</tool_response><|im_end|>\n"
    )


def test_content_may_be_missing_or_come_in_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "12 + "}, {"type": "text", "text": "34 ="}]
    assert render(tokenizer, {"role": "user", "content": parts}) == render(tokenizer, USER)
    for message in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        assert render(tokenizer, USER, message).endswith(f"{ASSISTANT}<|im_end|>\n")


# ── how a gateway reads its replies ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        ("46", "46", []),
        (tool_call("1"), "", ["1"]),
        (
            f"Let me see.\n{tool_call('1')}\n{tool_call('2')}",
            "Let me see.\n",
            ["1", "2"],
        ),
        ('<tool_call>\n{"name": "calc', '<tool_call>\n{"name": "calc', []),
        ("<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    ],
)
def test_a_reply_is_read_into_content_and_calls(
    tokenizer: PreTrainedTokenizerFast,
    reply: str,
    content: str,
    calls: list[str],
) -> None:
    chat = ChatTokenizer.load(str(MODEL))
    prompt = chat.encode(render(tokenizer, USER, tools=TOOLS, add_generation_prompt=True))
    reader = ReplyFormat(chat, GatewayConfig()).reader(
        prompt, tools=TOOLS, parse_tools=True, stop=()
    )
    reader.feed(tokenizer.encode(f"{reply}<|im_end|>"))
    reader.finish()
    assert reader.content == content
    found = [json.loads(call.arguments)["expression"] for call in reader.tool_calls]
    assert found == calls
