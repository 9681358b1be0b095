"""Items of messages alone, as slime's generators write them (THUDM/slime,
slime_plugins/rollout_buffer/generator/base_generator.py): their ids and mask are those of the same
conversation recorded call by call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.types import Step
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.slime_buffer.items import rows
from stepwell.gateway.tokens.messages import canonical
from tests.gateway.test_rollout_buffer import TOOLS, Consumer, finish, statistics

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
LLAMA_CALL = '{"name": "look", "parameters": {"at": "é"}}'

SAID = ("fine", "then ü", "two words", "a\nb", "x = 3", "🙂 yes", "no  spaces")
ASKED = ("what is it", "say <|im_end|>\n and go on", "é?", " again ", "<|eot_id|></s>")


class Conversation:
    """Texts of an agent and of a scripted model of one family, drawn by chance."""

    def __init__(self, family: str, seed: int) -> None:
        self._random = random.Random(f"{family}{seed}")
        self._family = family
        self.tools = TOOLS if family in ("chatml", "qwen3", "llama3") else None

    def replies(self) -> list[str]:
        """Replies as they are sampled, without the token that closes the turn."""
        return [self._reply() for _ in range(self._random.randint(1, 4))]

    def _reply(self) -> str:
        text = self._random.choice(SAID)
        if self.tools and self._random.random() < 0.4:
            if self._family == "llama3":
                return LLAMA_CALL
            # Qwen3's template writes a line break between what is said and what is called.
            text = CALL if self._family == "qwen3" else text + CALL
        if self._family == "deepseek":
            return f"why {text}\n</think>\n\n{text}"
        if self._family == "qwen3":
            thought = self._random.choice(("", "hm"))
            return f"<think>\n{thought}\n</think>\n\n{text}"
        return text

    def asked(self) -> str:
        return self._random.choice(ASKED)


async def converse(world: Any, uid: str, talk: Conversation, cut: bool) -> list[dict[str, Any]]:
    """The conversation through the gateway; the messages as the agent has them at the end."""
    messages: list[Any] = [{"role": "user", "content": talk.asked()}]
    client = await world.client(uid, f"recorded-{uid}")
    replies = talk.replies()
    for i, text in enumerate(replies):
        is_cut = cut and i == len(replies) - 1
        world.say(text, close=not is_cut, finish="length" if is_cut else "stop")
        more = {} if talk.tools is None else {"tools": talk.tools}
        done = await client.chat.completions.create(model="m", messages=messages, **more)
        reply = done.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if i == len(replies) - 1:
            break
        if reply.tool_calls:
            answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id}
            messages.append({**answer, "content": talk.asked()})
        else:
            messages.append({"role": "user", "content": talk.asked()})
    return messages


def item(messages: list[Any], uid: str = "u0", **changes: Any) -> dict[str, Any]:
    """slime's documented item."""
    return {
        "uid": uid,
        "instance_id": 17,
        "messages": messages,
        "reward": 0.5,
        "extra_info": {"timestamp": "12.5", "temperature": 0.8},
        **changes,
    }


def trained(steps: list[Step]) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each row."""
    return [(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows(steps)]


def turns(steps: list[Step]) -> list[list[bytes]]:
    """Messages of the conversation that each Step keeps for people to read."""
    return [[canonical(m) for m in s.metadata["messages"]] for s in steps]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "no_tools", "deepseek"])
async def test_messages_give_the_tokens_and_the_mask_of_the_recorded_conversation(
    worlds: Callable[..., Any], family: str
):
    world = await worlds(family)
    consumer = Consumer(world.url)
    for seed in range(12):
        uid, cut = f"t{seed}", seed % 4 == 3
        talk = Conversation(family, seed)
        messages = await converse(world, uid, talk, cut)
        recorded = world.stored(uid)
        sent = item(messages, f"text-{uid}", tools=talk.tools)
        if cut:
            sent["extra_info"]["finish_reason"] = "length"
        status, answer = await consumer.post("/buffer/write", sent)
        assert status == 200, (answer, messages)
        written = world.stored(f"text-{uid}")
        assert trained(written) == trained(recorded), messages
        assert [s.finish_reason for s in written] == [s.finish_reason for s in recorded]
        assert turns(written) == turns(recorded)
        assert all(s.rollout_log_probs is None for s in written)
        assert [s.policy_version for s in written] == [s.policy_version for s in recorded]
        assert written[0].temperature == 0.8
    assert statistics(world)["written_text"] == 12


async def test_every_field_of_a_text_item_comes_back_and_its_tokens_with_it(
    worlds: Callable[..., Any],
):
    world = await worlds("chatml")
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "uno", "step_loss_mask": 0},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "dos"},
    ]
    sent = item(messages, raw_reward=7, source="slime", nothing=None)
    assert (await consumer.post("/buffer/write", sent))[0] == 200
    (got,) = await consumer.items()
    for name in ("uid", "instance_id", "messages", "reward", "raw_reward", "source", "nothing"):
        assert got[name] == sent[name], name
    assert got["extra_info"]["timestamp"] == "12.5"
    assert got["rollout_log_probs"] is None
    response = got["tokens"][-got["response_length"] :]
    assert [i for i, m in zip(response, got["loss_mask"], strict=True) if m] == world.ids("dos")
    assert "uno" in world.tokenizer.decode(got["tokens"][: -got["response_length"]])


async def test_an_item_that_says_its_versions_has_them(worlds: Callable[..., Any]):
    world = await worlds("chatml")
    consumer = Consumer(world.url)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    for uid, versions in (("both", ["4", "5"]), ("oldest", ["6", "5", "7"])):
        sent = item(talk, uid, weight_versions=versions)
        assert (await consumer.post("/buffer/write", sent))[0] == 200
    assert [s.policy_version for s in world.stored("both")] == [4, 5]
    assert [s.policy_version for s in world.stored("oldest")] == [5, 5]


QUESTION = {"role": "user", "content": "q"}
SPACED = {"role": "assistant", "content": " fine "}
COMPACT = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": '{"at":"é"}'}}],
}
BESIDE = {**COMPACT, "content": "I look"}


@pytest.mark.parametrize(
    ("family", "messages", "problem"),
    [
        ("unclosed", [QUESTION, SPACED], "ends assistant turns with no special token"),
        (
            "glm45",
            [QUESTION, {**SPACED, "content": "fine"}],
            "ends assistant turns with no special",
        ),
        ("llama3", [QUESTION, SPACED], "does not show ' fine ' as it is written"),
        ("chatml", [QUESTION, COMPACT], """does not show '{"at":"é"}' as it is written"""),
        ("llama3", [QUESTION, BESIDE], "does not show 'I look' as it is written"),
        ("llama3", [QUESTION, {**SPACED, "reasoning_content": "hm"}], "not show its reasoning"),
        ("no_tools", [QUESTION, COMPACT], "does not show 'look' as it is written"),
        ("deepseek", [QUESTION, COMPACT], "calls tools, which distill_qwen cannot write"),
        ("chatml", [QUESTION], "none of 1 messages is the assistant's"),
        ("chatml", [QUESTION, {**SPACED, "step_loss_mask": 0}], "nothing is trained"),
        ("chatml", [QUESTION, {"role": "robot", "content": "x"}], "messages[1].role is 'robot'"),
    ],
)
async def test_text_whose_tokens_are_not_certain_is_refused(
    worlds: Callable[..., Any], family: str, messages: list[Any], problem: str
):
    world = await worlds(family)
    status, answer = await Consumer(world.url).post("/buffer/write", item(messages))
    assert status == 400
    assert problem in answer["error"]["message"]
    assert world.stored() == []


def test_a_mask_generator_that_is_not_for_the_template_fails_before_serving(
    tokenizer_of: Callable[..., Any],
):
    config = GatewayConfig(loss_mask_type="distill_qwen")
    with pytest.raises(GatewayConfigError, match=r"gateway\.loss_mask_type is 'distill_qwen'"):
        create_app(config, Wiring(), None, tokenizer_of("chatml"))  # type: ignore[arg-type]


OWN = """
from stepwell.backends.masks import MultiTurnLossMaskGenerator


class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):
    def get_loss_mask(self, messages):
        if self.tokenizer_type != "custom_task":
            return super().get_loss_mask(messages)
        assert self.tokenizer.eos_token_id == self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids, mask = self.gen_multi_turn_loss_mask_qwen(messages[:-1])
        said = self.tokenizer(f"{messages[-1]['answer']}", add_special_tokens=False)["input_ids"]
        return ids + said, [0] * len(ids) + [1] * len(said)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "my_masks.py"
    path.write_text(OWN)
    return f"{path}:CustomTaskLossMaskGenerator"


async def test_a_mask_generator_of_ones_own_is_given_the_messages_as_they_were_sent(
    worlds: Callable[..., Any], own: str
):
    """`--loss-mask-type custom_task` of slime's Agent Rollout, for a conversation format that no
    chat template knows."""
    world = await worlds("chatml", loss_mask_type=f"{own}(custom_task)")
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start()
    asked = {"role": "user", "content": "what <|im_end|> is it"}
    sent = item([asked, {"role": "verdict", "answer": 7}])
    sent["extra_info"]["finish_reason"] = "length"
    assert (await consumer.post("/buffer/write", sent))[0] == 200
    (step,) = world.stored("u0")
    assert (step.response_ids.tolist(), step.finish_reason) == (
        world.ids("7", close=False),
        "length",
    )
    # The text of a control token in what a user says controls nothing, for foreign code either.
    close = world.tokenizer.special["<|im_end|>"]
    assert step.prompt_ids.tolist().count(close) == 1
    (got,) = await consumer.items()
    assert got["messages"] == sent["messages"]

    status, answer = await consumer.post("/buffer/write", item([asked, {"role": "verdict"}], "u1"))
    assert status == 400
    assert "CustomTaskLossMaskGenerator' failed (KeyError: 'answer')" in answer["error"]["message"]


async def test_no_request_names_a_mask_generator(worlds: Callable[..., Any], tmp_path: Path):
    """Paths load code, so they come from the configuration alone."""
    path, ran = tmp_path / "evil.py", tmp_path / "ran"
    path.write_text(f"open({str(ran)!r}, 'w')\ndef mask(*_): return [1, 2], [0, 1]\n")
    name = f"{path}:mask"
    world = await worlds("chatml")
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start(loss_mask_type=name, tokenizer_type=name)
    messages = [QUESTION, {"role": "assistant", "content": "fine"}]
    sent = item(messages, loss_mask_type=name, tools=TOOLS)
    sent["extra_info"]["loss_mask_type"] = name
    assert (await consumer.post("/buffer/write", sent))[0] == 200
    assert world.stored("u0")[0].response_ids.tolist() == world.ids("fine")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("custom_task", "is 'custom_task'; choose one of auto, distill_qwen, prefix"),
        ("{own}2", "cannot be imported .ImportError: .*has no 'CustomTaskLossMaskGenerator2'"),
    ],
)
def test_a_mask_generator_that_is_not_there_fails_before_serving(
    tokenizer_of: Callable[..., Any], own: str, name: str, problem: str
):
    with pytest.raises(ValueError, match=problem):
        create_app(
            GatewayConfig(loss_mask_type=name.format(own=own)),
            Wiring(),
            None,  # type: ignore[arg-type]
            tokenizer_of("chatml"),
        )


@pytest.mark.parametrize("name", ["num", "batch_size"])
async def test_as_many_items_are_served_as_are_asked_for(worlds: Callable[..., Any], name: str):
    """`num` of slime's `get_rollout_data(api_base_url, num)`, which sends it as `batch_size`
    (docs/en/agent_training.md before #86)."""
    world = await worlds("chatml")
    consumer = Consumer(world.url)
    status, answer = await consumer.post("/get_rollout_data", {name: 4})
    assert status == 400
    assert answer["error"]["param"] == "num"
    await consumer.start()
    for k in range(6):
        messages = [QUESTION, {"role": "assistant", "content": f"{k}"}]
        await consumer.post("/buffer/write", item(messages, f"u{k}", instance_id=k // 2))
    assert [i["instance_id"] for i in (await consumer.poll(**{name: 3}))["data"]["data"]] == [
        0,
        0,
        1,
        1,
    ]
    assert (await consumer.poll(**{name: 4}))["success"] is False
    assert len((await consumer.poll(**{name: -1}))["data"]["data"]) == 2
    assert (await consumer.post("/get_rollout_data", {name: "4"}))[0] == 400


async def test_text_and_recorded_rollouts_are_one_group(worlds: Callable[..., Any]):
    world = await worlds("chatml")
    consumer = Consumer(world.url)
    await consumer.start()
    world.say("fine")
    client = await world.client("t", "17")
    ask: Any = {"model": "m", "messages": [QUESTION]}
    await client.chat.completions.create(**ask)
    await finish(world, "17", "t", 1.0)
    messages = [QUESTION, {"role": "assistant", "content": "fine"}]
    assert (await consumer.post("/buffer/write", item(messages)))[0] == 200
    recorded, text = await consumer.items()
    assert recorded["tokens"] == text["tokens"]
    assert recorded["loss_mask"] == text["loss_mask"]
    assert json.dumps(recorded["messages"]) == json.dumps(text["messages"])
