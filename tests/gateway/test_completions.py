"""Completions without a chat template, through the unmodified OpenAI client, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from tokenizers.processors import TemplateProcessing

from tests.builders import until
from tests.gateway.conftest import Sampled, World, log_prob


@pytest.fixture
async def bos_world(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    from stepwell.gateway.tokens.tokenizer import ChatTokenizer
    from tests.gateway import conftest

    backend = conftest.make_backend("llama3")
    bos = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    template = conftest.make_template("llama3", "{{ messages[0].content }}")
    made = ChatTokenizer(backend, template)
    monkeypatch.setattr(conftest, "make_tokenizer", lambda family: made)
    world: World = await worlds("llama3")
    return world


async def test_text_goes_in_and_text_comes_out_without_special_tokens(world: Any) -> None:
    client = await world.client()
    said = world.say(' 4 <tool_call>{"name": "f", "arguments": {}}</tool_call>' + "x" * 40)
    answer = await client.completions.create(model="m", prompt="2 + 2 =")
    [choice] = answer.choices
    # What this tokenizer calls special is no text; nothing else is taken out.
    assert choice.text == ' 4 {"name": "f", "'
    assert (choice.finish_reason, choice.index) == ("length", 0)
    request = world.engine.requests[0]
    assert request["input_ids"] == world.ids("2 + 2 =", close=False)
    assert request["sampling_params"]["max_new_tokens"] == 16
    [step] = world.stored()
    assert step.response_ids.tolist() == said.ids[:16]
    assert step.metadata["dialect"] == "openai_completions"
    assert answer.usage.prompt_tokens == len(step.prompt_ids)
    assert answer.usage.completion_tokens == len(step.response_ids)
    world.check_exact()


async def test_answers_and_chunks_are_valid_openai_objects(world: Any) -> None:
    client = await world.client()
    raw = await client.completions.with_raw_response.create(model="m", prompt="x", logprobs=1)
    Completion.model_validate(json.loads(raw.text), strict=True)
    raw = await client.completions.with_raw_response.create(
        model="m", prompt="y", logprobs=0, stream=True, stream_options={"include_usage": True}
    )
    lines = [line async for line in raw.http_response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for chunk in chunks:
        # The SDK's type wants a finish reason; OpenAI sends null before the last chunk.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"]["completion_tokens"] == len(world.stored()[-1].response_ids)


@pytest.mark.parametrize("burst", [1, 3, 1000])
async def test_every_chunk_has_the_log_probs_of_its_own_text(world: Any, burst: int) -> None:
    world.engine.burst = burst
    world.say("naïve 東京 🦊 and more <tool_call> of it")
    client = await world.client()
    stream = await client.completions.create(
        model="m", prompt="x", logprobs=0, max_tokens=100, stream=True
    )
    text = ""
    async for chunk in stream:
        [choice] = chunk.choices
        if choice.text:
            assert choice.logprobs.text_offset[0] == len(text)
            text += choice.text
            spelled = b"".join(map(as_bytes, choice.logprobs.tokens)).decode()
            assert spelled.replace("<tool_call>", "") == choice.text
    assert text == "naïve 東京 🦊 and more  of it"


def as_bytes(token: str) -> bytes:
    """A token as the legacy object names it: text, or "bytes:" and its bytes."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


async def test_samples_are_streamed_by_index_and_stop_strings_are_cut(world: Any) -> None:
    client = await world.client()
    for i in range(2):
        world.say(f"thought {i}\nObservation:", close=False, matched="\nObservation:")
    stream = await client.completions.create(
        model="m", prompt="Thought:", n=2, stop="\nObservation:", max_tokens=100, stream=True
    )
    texts, finished = ["", ""], ["", ""]
    async for chunk in stream:
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        finished[choice.index] += choice.finish_reason or ""
    assert sorted(texts) == ["thought 0", "thought 1"]
    assert finished == ["stop", "stop"]
    assert [s.metadata.get("branch") for s in world.stored()] == [None, "resampled"]
    world.check_exact()


async def test_a_prompt_that_goes_on_from_a_reply_extends_it(world: Any) -> None:
    """The way of ReAct agents: the history is one text that grows."""
    client = await world.client()
    prompt = "Question: 6 * 7?\nThought:"
    for i, (text, stop) in enumerate(
        ((" I call\nObservation:", "\nObservation:"), (" sure 🦊\nObservation:", "\nObservation:"))
    ):
        world.say(text, close=False, matched=stop)
        answer = await client.completions.create(
            model="m", prompt=prompt, stop=[stop], max_tokens=100
        )
        prompt += f"{answer.choices[0].text}\nObservation: 4{i}\nThought:"
    await client.completions.create(model="m", prompt=prompt)
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, 1]
    assert world.tokenizer.decode(steps[2].prompt_ids.tolist()) == prompt
    world.check_exact()


async def test_a_hand_made_chat_extends_its_turns_if_it_shows_their_ends(world: Any) -> None:
    client = await world.client()
    opening = "<|im_end|>\n<|im_start|>assistant\n"
    prompt = "<|im_start|>user\nhi" + opening
    world.say("hello")
    first = await client.completions.create(model="m", prompt=prompt)
    kept = f"{prompt}{first.choices[0].text}<|im_end|>\n<|im_start|>user\nmore{opening}"
    await client.completions.create(model="m", prompt=kept)
    # Without the end that was sampled, these are other tokens, and so a branch.
    lost = f"{prompt}{first.choices[0].text}\n<|im_start|>user\nmore{opening}"
    await client.completions.create(model="m", prompt=lost)
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, None]
    assert [s.metadata.get("branch") for s in steps] == [None, None, "new_conversation"]
    ids = steps[1].prompt_ids.tolist()
    assert ids.count(world.tokenizer.special["<|im_start|>"]) == 4
    assert world.tokenizer.decode(ids) == kept
    world.check_exact()


async def test_prompts_of_ids_are_sent_as_they_are_and_extend_one_another(world: Any) -> None:
    client = await world.client()
    ids = world.ids("one two", close=False)
    for prompt in (ids, [ids]):
        await client.completions.create(model="m", prompt=prompt, logprobs=0)
    first = world.stored()[0]
    longer = [*first.prompt_ids.tolist(), *first.response_ids.tolist(), 7, 8]
    await client.completions.create(model="m", prompt=longer)
    await client.completions.create(model="m", prompt=[5, *longer])
    assert [r["input_ids"] for r in world.engine.requests] == [ids, ids, longer, [5, *longer]]
    steps = world.stored()
    # Two samples of one prompt said the same: the later one is the parent.
    assert [s.parent_index for s in steps] == [None, None, 1, None]
    assert [s.metadata.get("branch") for s in steps] == [
        None,
        "resampled",
        None,
        "new_conversation",
    ]
    world.check_exact()


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_reply_that_was_cut_off_goes_on_from_its_own_tokens(
    world: Any, as_ids: bool
) -> None:
    client = await world.client()

    def sent(text: str) -> Any:
        return world.ids(text, close=False) if as_ids else text

    world.say("an answer 🦊 that is cut", close=False)
    first = await client.completions.create(model="m", prompt=sent("Say:"), max_tokens=12)
    assert first.choices[0].finish_reason == "length"
    [cut] = world.stored()
    so_far: Any = [*cut.prompt_ids.tolist(), *cut.response_ids.tolist()]
    text = world.tokenizer.decode(so_far)
    for _ in range(2):
        await client.completions.create(model="m", prompt=so_far if as_ids else text)
        assert world.engine.requests[-1]["input_ids"] == so_far
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, None, None]
    assert [s.metadata.get("branch") for s in steps] == [None, "continued", "continued"]
    # And what follows that extends it.
    whole: Any = [*so_far, *steps[1].response_ids.tolist(), *world.ids("more", close=False)]
    prompt = whole if as_ids else world.tokenizer.decode(whole)
    await client.completions.create(model="m", prompt=prompt)
    assert world.stored()[3].parent_index in (1, 2)
    assert world.engine.requests[-1]["input_ids"] == whole
    world.check_exact()


async def test_texts_begin_as_the_tokenizer_begins_them(bos_world: Any) -> None:
    bos = bos_world.tokenizer.special["<|begin_of_text|>"]
    client = await bos_world.client()
    for prompt in ("hi", "<|begin_of_text|>hi"):
        await client.completions.create(model="m", prompt=prompt)
        ids = bos_world.engine.requests[-1]["input_ids"]
        assert ids == [bos, *bos_world.ids("hi", close=False)]
    first = bos_world.stored()[0]
    said = bos_world.tokenizer.decode(first.response_ids.tolist())
    await client.completions.create(model="m", prompt=f"hi{said} and more")
    assert bos_world.engine.requests[-1]["input_ids"].count(bos) == 1
    assert bos_world.stored()[-1].parent_index == 0
    bos_world.check_exact()


class WithTops(Sampled):
    """Two alternatives per token, of which the first is another token than the sampled one."""

    def chunk(self, n: int, *, final: bool, n_prompt: int) -> dict[str, Any]:
        chunk = super().chunk(n, final=final, n_prompt=n_prompt)
        chunk["meta_info"]["output_top_logprobs"] = [
            [[-0.001, 40, None], [-0.002, 41, None]] for _ in self.ids[:n]
        ]
        return chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_legacy_logprobs_name_every_sampled_token(world: Any, stream: bool) -> None:
    client = await world.client()
    text = "naïve 🦊 answer"
    world.engine.script.append(WithTops(world.ids(text)))
    answer: Any = await client.completions.create(
        model="m", prompt="x", logprobs=2, max_tokens=100, stream=stream
    )
    parts = (
        [c.choices[0].logprobs async for c in answer] if stream else [answer.choices[0].logprobs]
    )
    parts = [p for p in parts if p is not None]
    ids = world.stored()[0].response_ids.tolist()
    tokens = [t for p in parts for t in p.tokens]
    assert tokens == [world.tokenizer.token_text(i) for i in ids]
    logs = [x for p in parts for x in p.token_logprobs]
    assert logs == pytest.approx([log_prob(i) for i in ids], abs=1e-6)
    for token, token_id, top in zip(
        tokens, ids, [t for p in parts for t in p.top_logprobs], strict=True
    ):
        assert top[token] == pytest.approx(log_prob(token_id), abs=1e-6)
        assert len(top) == 3
    offsets = [o for p in parts for o in p.text_offset]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text)  # of the end of text, which is none
    for token, offset in zip(tokens[:-1], offsets, strict=False):
        assert token.startswith("bytes:") or text.startswith(token, offset)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_each_prompt_of_a_list_is_a_call_of_its_own(
    world: Any, as_ids: bool, stream: bool
) -> None:
    world.engine.default = lambda body: Sampled(world.ids(f"to {len(body['input_ids'])}"))
    texts = ["one", "three words here", "a much longer prompt than those"]
    ids = [world.ids(text, close=False) for text in texts]
    client = await world.client()
    answer: Any = await client.completions.create(
        model="m",
        prompt=ids if as_ids else texts,
        n=2,
        max_tokens=100,
        stream=stream,
        extra_body={"stream_options": {"include_usage": True}} if stream else None,
    )
    said, finished = [""] * 6, [""] * 6
    for part in [part async for part in answer] if stream else [answer]:
        usage = part.usage
        for choice in part.choices:
            said[choice.index] += choice.text
            finished[choice.index] += choice.finish_reason or ""
    # The samples of the first prompt stand before those of the second.
    assert said == [f"to {len(each)}" for each in ids for _ in range(2)]
    assert finished == ["stop"] * 6
    steps = world.stored("t1")
    assert sorted(s.prompt_ids.tolist() for s in steps) == sorted([*ids, *ids])
    assert [s.step_index for s in steps] == list(range(6))
    assert [s.parent_index for s in steps] == [None] * 6
    assert usage.prompt_tokens == sum(map(len, ids))
    assert usage.completion_tokens == sum(len(s.response_ids) for s in steps)
    world.check_exact()


async def test_one_prompt_of_a_list_that_is_refused_refuses_all(worlds: Any) -> None:
    world = await worlds(context_length=50)
    client = await world.client()
    for prompt, named in (
        (["short", "long " * 100], "prompt"),
        (["short", ""], "prompt"),
        (["short", [1, 2]], None),
        (["short", 3], "prompt[1]"),
        ([[1], [-1]], "prompt[1]"),
        ([[1], []], "prompt[1]"),
    ):
        if named is None:  # texts and ids beside each other are two prompts
            await client.completions.create(model="m", prompt=prompt)
            assert len(world.stored()) == 2
            continue
        n_asked = len(world.port.asked)
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="m", prompt=prompt)
        assert refusal.value.param == named
        assert len(world.port.asked) == n_asked  # the pool hears nothing of it
    assert len(world.engine.requests) == 2


async def test_prompts_of_a_list_have_the_trajectories_that_they_would_have_alone(
    world: Any,
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="k") as client:
        create = client.completions.with_raw_response.create
        begun = await create(model="m", prompt=["one:", "two:"], n=2, max_tokens=1)
        first, second = begun.headers["x-stepwell-trajectory"].split(",")
        assert {s.trajectory_uid for s in world.stored()} == {first, second}
        assert [len(world.stored(uid)) for uid in (first, second)] == [2, 2]
        assert len({s.prompt_uid for s in world.stored()}) == 2
        said = begun.parse().choices
        # Each goes on in its own, beside one that begins.
        prompts = [f"one:{said[0].text} more", f"two:{said[2].text} more", "three:"]
        went_on = await create(model="m", prompt=prompts)
        uids = went_on.headers["x-stepwell-trajectory"].split(",")
    assert uids[:2] == [first, second]
    assert len(set(uids)) == 3
    for uid in (first, second):
        assert world.stored(uid)[2].parent_index in (0, 1)
    world.check_exact()


async def test_prompts_of_a_list_whose_group_is_over_begin_another_together(world: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{world.url}/v1", api_key="k", default_headers={"x-prompt-uid": "g"}
    ) as client:
        await client.completions.create(model="m", prompt="before")
        await world.pool.drop_group("g", "tested")
        await client.completions.create(model="m", prompt=["one", "two", "three"])
    before, *after = world.stored()
    assert before.prompt_uid == "g"
    assert len({s.trajectory_uid for s in after}) == 3
    (other,) = {s.prompt_uid for s in after}
    assert other.startswith("g~")
    world.check_exact()


async def test_a_retry_of_a_list_is_the_same_steps(world: Any) -> None:
    client = await world.client(max_retries=2)
    world.port.failures = [*[""] * 5, "before"]  # of the last Step: none is still being generated
    key = {"Idempotency-Key": "a"}
    texts = ["x", "y", "x"]
    first, again = [
        await client.completions.create(model="m", prompt=texts, n=2, extra_headers=key)
        for _ in range(2)
    ]
    assert len(world.engine.requests) == 6
    assert [s.step_index for s in world.stored()] == list(range(6))
    assert again.choices == first.choices
    texts = ["another", "y", "x"]
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        await client.completions.create(model="m", prompt=texts, n=2, extra_headers=key)
    assert len(world.engine.requests) == 6
    world.check_exact()


async def test_a_client_that_leaves_a_stream_of_prompts_ends_all_their_calls(world: Any) -> None:
    client = await world.client()
    gate = asyncio.Event()
    for text in ("first", "second", "third"):
        world.say(f"{text} that nobody hears", gate=gate)
    stream = await client.completions.create(
        model="m", prompt=["a", "b", "c"], max_tokens=100, stream=True
    )
    async for _ in stream:
        break
    await until(lambda: len(world.engine.requests) == 3)
    await stream.close()
    await until(lambda: len(world.engine.aborts) == 3)
    gate.set()
    assert world.stored() == []
    answer = await client.completions.create(model="m", prompt="a")
    assert answer.choices[0].text == "fine"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_answers_the_prompt_before_the_reply(world: Any, stream: bool) -> None:
    client = await world.client()
    for prompt, texts in (
        ("2 + 2 =", ["2 + 2 ="]),
        (world.ids("<|im_start|>user 🦊"), ["<|im_start|>user 🦊<|im_end|>"]),
        (["one:", "two:"], ["one:", "two:"]),
    ):
        answer: Any = await client.completions.create(
            model="m", prompt=prompt, echo=True, n=2, stream=stream
        )
        said = [""] * (2 * len(texts))
        for part in [part async for part in answer] if stream else [answer]:
            for choice in part.choices:
                said[choice.index] += choice.text
        assert said == [f"{text}fine" for text in texts for _ in range(2)]
    assert all(s.response_ids.tolist() == world.ids("fine") for s in world.stored())
    # What was echoed is how the next prompt begins.
    client = await world.client("t2")
    answer = await client.completions.create(model="m", prompt="Say:", echo=True, max_tokens=1)
    await client.completions.create(model="m", prompt=answer.choices[0].text + " and more")
    assert [s.parent_index for s in world.stored("t2")] == [None, 0]
    world.check_exact()


async def test_log_probs_of_an_echoed_prompt_are_refused(world: Any) -> None:
    client = await world.client()
    for n in (0, 1):
        with pytest.raises(openai.BadRequestError, match="with echo it asks for the prompt's") as e:
            await client.completions.create(model="m", prompt="x", echo=True, logprobs=n)
        assert e.value.param == "logprobs"
    assert world.engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", None),
        ("prompt", ""),
        ("prompt", {"text": "x"}),
        ("prompt", [1, "x"]),
        ("prompt", [-1]),
        ("prompt", ["x"] * 65),
        ("echo", "yes"),
        ("best_of", 2),
        ("suffix", "x"),
        ("logprobs", 21),
        ("logprobs", True),
        ("frequency_penalty", 1),
        ("logit_bias", {"1": 2}),
        ("add_special_tokens", False),
        ("messages", [{"role": "user", "content": "x"}]),
        ("tools", []),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(world: Any, field: str, value: Any) -> None:
    client = await world.client()
    body = {"prompt": "x", field: value}
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="m", prompt=body.pop("prompt"), extra_body=body)
    assert refusal.value.param == field
    assert field in refusal.value.message
    assert world.stored() == []


async def test_neutral_values_and_notes_are_accepted(world: Any) -> None:
    client = await world.client()
    await client.completions.create(
        model="m", prompt=["x"], echo=False, best_of=1, suffix="", user="u", frequency_penalty=0
    )
    assert len(world.stored()) == 1


async def test_a_retry_of_a_completion_is_the_same_step(world: Any) -> None:
    client = await world.client(max_retries=2)
    world.port.failures = ["after"]
    world.say("once")
    answer = await client.completions.create(model="m", prompt="x")
    assert answer.choices[0].text == "once"
    assert len(world.engine.requests) == 1
    assert len(world.stored()) == 1
