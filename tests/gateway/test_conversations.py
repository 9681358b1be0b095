"""Properties of whole conversations, over HTTP: whatever agents do to their history, stored ids are
the engine's, prompts extend their parents, and every sampled token is trained exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.backends.rows import build_rows
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from tests.gateway.conftest import (
    Sampled,
    ScriptedEngine,
    WatchedPort,
    eos_id,
    local_pool,
    log_prob,
    make_tokenizer,
    port_of,
)
from tests.gateway.conftest import serving as serve_app

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
WORDS = [
    "",
    "yes",
    " no\n",
    "naïve 東京 🦊",
    "<|im_end|>",
    "a<|eot_id|>b",
    "</s>",
    "\\ud83d",
    "x" * 40,
]

OPENING = {
    "chatml": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "no_tools": "<|assistant|>\n",
    "glm45": "<|assistant|>",
    "kimi_k2": "<|im_assistant|>assistant<|im_middle|>",
}
"""Text with which the template begins an assistant turn."""

Message = dict[str, Any]


class Model:
    """Says anything: text, thoughts, tool calls; stops, is cut off, or ends at a stop string."""

    def __init__(self, family: str) -> None:
        self.tokenizer = make_tokenizer(family)
        self.family = family
        self.rng = random.Random(0)
        self.sampled: list[tuple[list[int], list[int]]] = []

    def answer(self, body: dict[str, Any]) -> Sampled:
        rng = self.rng
        text = rng.choice(WORDS) + rng.choice(WORDS) + str(rng.randrange(10**6))
        if self.family == "qwen3" and rng.random() < 0.5:
            thought = f"<think>\n{rng.choice(WORDS)}hm"
            # Sometimes the end comes before the thought's.
            text = thought if rng.random() < 0.2 else f"{thought}\n</think>\n\n{text}"
        n_calls = rng.choice([0, 0, 1, 2])
        if self.family == "llama3":
            n_calls = min(n_calls, 1)
        if self.family == "kimi_k2" and n_calls:
            text += "<|tool_calls_section_begin|>"
        for i in range(n_calls):
            arguments = {"expression": f"{i}+{rng.randrange(99)}", "why": rng.choice(WORDS[:4])}
            if self.family == "llama3":
                call = json.dumps({"name": "calc", "parameters": arguments}, ensure_ascii=False)
                text = call
                continue
            if self.family == "glm45":
                values = (
                    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
                    for key, value in arguments.items()
                )
                text += f"\n<tool_call>calc\n{''.join(values)}</tool_call>"
                continue
            if self.family == "kimi_k2":
                call = json.dumps(arguments, ensure_ascii=False)
                text += f"<|tool_call_begin|>functions.calc:{i}<|tool_call_argument_begin|>{call}"
                text += "<|tool_call_end|>" + "<|tool_calls_section_end|>" * (i == n_calls - 1)
                continue
            call = json.dumps({"name": "calc", "arguments": arguments}, ensure_ascii=False)
            text += f"\n<tool_call>\n{call}\n</tool_call>"
        ids = self.tokenizer.encode(text).tolist()
        finish: dict[str, Any] = {"finish": "stop"}
        stops = body["sampling_params"].get("stop") or []
        end = rng.random()
        if end < 0.2:
            ids, finish = ids[: max(1, rng.randrange(len(ids) + 1))], {"finish": "length"}
        elif end < 0.4 and stops:
            ids += self.tokenizer.encode(stops[0]).tolist()
            finish = {"finish": "stop", "matched": stops[0]}
        elif self.family == "glm45" and n_calls:
            ids.append(self.tokenizer.special["<|observation|>"])
        else:
            ids.append(eos_id(self.tokenizer))
        self.sampled.append((body["input_ids"], ids))
        return Sampled(ids, **finish)

    def check_extension(self, parent: Any, child: Any, new: list[Message]) -> None:
        """The prompt goes on with the parent's turn closed once, and the new messages only."""
        before = len(parent.prompt_ids) + len(parent.response_ids)
        eos, special = eos_id(self.tokenizer), self.tokenizer.special
        added = child.prompt_ids[before:].tolist()
        if self.family == "glm45":  # its turns end where the next message begins
            eos = special["<|observation|>" if new[0]["role"] == "tool" else "<|user|>"]
        elif parent.response_ids[-1] == special.get("<|tool_call_end|>"):
            assert added.pop(0) == special["<|tool_calls_section_end|>"]
        if parent.response_ids[-1] != eos:
            assert added.pop(0) == eos
        text = self.tokenizer.decode(added)
        assert text.count(OPENING[self.family]) == 1
        at = 0
        for message in new:
            at = text.find(message["content"].strip(), at)
            assert at >= 0, (text, message)


def resent(message: Message, rng: random.Random) -> Message:
    """A reply as agents send it back: the same, in other words."""
    message = dict(message)
    text = message.get("content") or ""
    if not text.strip():
        message["content"] = rng.choice([None, "", "\n", []])
    elif rng.random() < 0.5:
        message["content"] = [{"type": "text", "text": text}]
    thought = message.pop("reasoning_content", None)
    if thought and rng.random() < 0.5:
        message["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {
                **c,
                "function": {**c["function"], "arguments": again(c["function"]["arguments"], rng)},
            }
            for c in calls
        ]
    return message


def again(arguments: str, rng: random.Random) -> Any:
    value = json.loads(arguments)
    shuffled = dict(rng.sample(list(value.items()), len(value)))
    return rng.choice([arguments, json.dumps(shuffled, indent=1), shuffled])


def as_shown(reply: Message, new: list[Message]) -> list[Message]:
    """Messages behind a reply, results in the order of their calls."""
    ids = [call["id"] for call in reply.get("tool_calls") or ()]
    return sorted(new, key=lambda m: ids.index(m["tool_call_id"]) if m["role"] == "tool" else 99)


class Agent:
    """One trajectory's client. Its moves are what frameworks do to a conversation."""

    def __init__(self, url: str, session: aiohttp.ClientSession, rng: random.Random) -> None:
        self.url, self.session, self.rng = url, session, rng
        self.messages: list[Message] = []
        self.asked: list[tuple[str, list[Message]]] = []

    async def ask(self, messages: list[Message], **options: Any) -> Message:
        body = {"messages": messages, "model": "m", **options}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            got = await response.json()
            assert response.status == 200, (got, messages)
        reply: Message = got["choices"][0]["message"]
        return reply

    def question(self) -> Message:
        return {"role": "user", "content": self.rng.choice(WORDS) + "?"}

    def answers(self, reply: Message) -> list[Message]:
        """Messages that follow a reply: results of its calls in any order, a user's, or both."""
        results: list[Message] = [
            {"role": "tool", "tool_call_id": c["id"], "content": self.rng.choice(WORDS)}
            for c in reply.get("tool_calls") or ()
        ]
        self.rng.shuffle(results)
        if not results or self.rng.random() < 0.3:
            results.append(self.question())
        return results


MOVES = ["on", "on", "on", "edit", "fork", "side", "twice", "compact"]


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("family", "thinking"),
    [
        ("chatml", "preserve"),
        ("qwen3", "template"),
        ("llama3", "preserve"),
        ("glm45", "template"),
        pytest.param("chatml", "template", marks=pytest.mark.slow),
        pytest.param("qwen3", "preserve", marks=pytest.mark.slow),
        pytest.param("llama3", "template", marks=pytest.mark.slow),
        pytest.param("glm45", "preserve", marks=pytest.mark.slow),
        pytest.param("kimi_k2", "preserve", marks=pytest.mark.slow),
        pytest.param("kimi_k2", "template", marks=pytest.mark.slow),
        pytest.param("no_tools", "preserve", marks=pytest.mark.slow),
        pytest.param("no_tools", "template", marks=pytest.mark.slow),
    ],
)
def test_whatever_agents_do_every_sampled_token_is_stored_and_trained_once(
    family: str, thinking: str
) -> None:
    model = Model(family)
    engine = ScriptedEngine(default=model.answer)
    tools = None if family == "no_tools" else [TOOL]
    n_examples = 0
    causes: Counter[str] = Counter()

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> tuple[str, aiohttp.ClientSession, WatchedPort]:
            pool = await stack.enter_async_context(local_pool())
            engine_url = await stack.enter_async_context(engine.running())
            config = GatewayConfig(port=0, thinking=thinking)
            app = create_app(config, Wiring((engine_url,)), pool, model.tokenizer)
            url = await stack.enter_async_context(serve_app(app))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return url, session, port_of(pool)

        url, session, pool = runner.run(start())

        async def play(moves: list[str], seed: int, uid: str) -> None:
            rng = model.rng = random.Random(seed)
            agent = Agent(f"{url}/{uid}/p-{uid}", session, rng)
            options: dict[str, Any] = {"tools": tools} if tools else {}
            if rng.random() < 0.3:
                options["stop"] = ["\nObservation:"]
            system = {"role": "system", "content": rng.choice(WORDS) + "Be kind."}
            messages = [system] if rng.random() < 0.5 else []
            messages.append(agent.question())
            reply = await agent.ask(messages, **options)
            last = len(pool.stored(uid)) - 1
            for move in moves:
                before = len(pool.stored(uid))
                new = agent.answers(reply)
                onward = [*messages, resent(reply, rng), *new]
                if move == "on":
                    messages, answered = onward, reply
                    reply = await agent.ask(messages, **options)
                    step = pool.stored(uid)[-1]
                    if thinking == "preserve":
                        assert step.parent_index == last, (family, step.metadata)
                        model.check_extension(pool.stored(uid)[last], step, as_shown(answered, new))
                elif move == "edit":
                    changed = rng.randrange(len(messages))
                    messages = [*onward]
                    messages[changed] = {**messages[changed], "content": f"changed {before}"}
                    reply = await agent.ask(messages, **options)
                elif move == "fork":
                    messages = [*messages, resent(reply, rng), agent.question()]
                    first = await agent.ask(messages, **options)
                    messages = [*messages[:-1], {"role": "user", "content": f"rather {before}"}]
                    reply = await agent.ask(messages, **options)
                    del first
                elif move == "side":
                    await agent.ask([{"role": "user", "content": f"A title for {before}, please."}])
                    continue
                elif move == "twice":
                    await asyncio.gather(*(agent.ask(onward, **options) for _ in range(2)))
                    continue
                else:
                    summary = f"So far: {rng.choice(WORDS)} {before}"
                    messages = [*messages[:1], {"role": "user", "content": summary}]
                    reply = await agent.ask(messages, **options)
                last = len(pool.stored(uid)) - 1

        # Fewer would not always meet each cause.
        @settings(max_examples=max(100, settings().max_examples))
        @given(st.lists(st.sampled_from(MOVES), max_size=7), st.integers(0, 2**32))
        def check(moves: list[str], seed: int) -> None:
            nonlocal n_examples
            n_examples += 1
            uid = f"t{n_examples}"
            model.sampled.clear()
            runner.run(play(moves, seed, uid))
            steps = pool.stored(uid)
            stored = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in steps]
            assert sorted(stored) == sorted(model.sampled)
            for step in steps:
                assert step.rollout_log_probs is not None
                assert step.rollout_log_probs.tolist() == pytest.approx(
                    [log_prob(i) for i in step.response_ids.tolist()], abs=1e-6
                )
                if step.parent_index is None:
                    assert step.step_index == 0 or step.metadata["branch"]
                    causes[step.metadata.get("branch", "first")] += 1
                    continue
                parent = steps[step.parent_index]
                whole = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
                assert step.prompt_ids.tolist()[: len(whole)] == whole
                assert len(step.prompt_ids) > len(whole)
                causes["extends"] += 1
            trained: Counter[int] = Counter()
            for row in build_rows(steps, "merged"):
                for i in row.steps:
                    here = row.ids[len(steps[i].prompt_ids) : steps[i].n_tokens].tolist()
                    assert here == steps[i].response_ids.tolist()
                    trained[i] += 1
            assert trained == Counter(range(len(steps)))

        try:
            check()
        finally:
            runner.run(stack.aclose())
    assert causes["extends"] > 20
    assert causes["new_conversation"]
    assert causes["history_edited"]
    if (family, thinking) == ("qwen3", "template"):
        assert causes["thinking_stripped"]
