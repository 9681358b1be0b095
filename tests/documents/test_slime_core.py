"""The document on slime's core: what it describes runs here as it is written there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from starlette.responses import PlainTextResponse

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import Launch
from stepwell.backends.engines.kinds import command_line
from stepwell.backends.engines.ports import Host, node_launches
from stepwell.backends.engines.server import EngineServer
from stepwell.backends.errors import EngineStartError
from stepwell.backends.slime.sample import SlimeSample
from stepwell.datapool.types import Group, Step
from stepwell.gateway.config import ChannelSampling
from stepwell.trainer.config import RewardConfig, RolloutConfig, ValidationConfig
from stepwell.trainer.errors import DataError, RolloutError
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.rollout.worker import RolloutWorker
from stepwell.trainer.scoring import Scorer
from stepwell.trainer.slime.generate import GenerateState, Sample, get, post
from stepwell.trainer.validation import figures
from tests.builders import group, step_of
from tests.gateway.conftest import World, log_prob, save_tokenizer, serving, worlds

__all__ = ["worlds"]  # a fixture

TASK = {
    "question": "who wrote it",
    "answer": "she",
    "instance_id": "q1",
    "data_source": "books",
    "metadata": {"level": 3},
}


# -- custom_generate_function_path: functions of slime's form -------------------------------------


async def search(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two turns with a tool between them, as examples/search-r1 goes about it: text is sent, and
    the ids and log-probs of the answers are joined with the tool's tokens."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, log_probs = "", [], [], []
    params = {**sampling_params, "stop": [*(sampling_params["stop"] or ()), "</search>"]}
    for _ in range(2):
        payload = {
            "text": sample.prompt + response,
            "sampling_params": params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        sampled = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        ids += [entry[1] for entry in sampled]
        log_probs += [entry[0] for entry in sampled]
        mask += [1] * len(sampled)
        if "</search>" not in output["text"]:
            break
        found = "<information>a page</information>"
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response += found
        ids += found_ids
        mask += [0] * len(found_ids)
        log_probs += [0.0] * len(found_ids)
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    sample.status = {"length": Sample.Status.TRUNCATED, "stop": Sample.Status.COMPLETED}[
        output["meta_info"]["finish_reason"]["type"]
    ]
    sample.n_searches = 1  # an attribute of its own, for the reward
    return sample


async def retool(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """The same by ids and `append_response_tokens`, as examples/retool does it."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(2):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        meta = (await post(url, payload))["meta_info"]
        entries = meta["output_token_logprobs"]
        new = [entry[1] for entry in entries]
        sample.append_response_tokens(
            args,
            tokens=new,
            log_probs=[entry[0] for entry in entries],
            trainable=True,
            meta_info=meta,
            text=state.tokenizer.decode(new),
        )
        if turn == 0:
            tool = state.tokenizer("result", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tool, trainable=False, text="result")
    sample.metadata["evaluated"] = evaluation
    return sample


async def retokenised(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Its response is other text than was sampled; it says nothing of log-probs."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    assert "output_token_logprobs" not in output["meta_info"]
    sample.tokens = state.tokenizer(f"{sample.prompt} {output['text']}!")["input_ids"]
    sample.response_length = 3
    return sample


async def silent(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Its mask and log-probs are left out: those of the call are known."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    sample.tokens = state.tokenizer(sample.prompt)["input_ids"] + output["output_ids"]
    sample.response_length = len(output["output_ids"])
    sample.reward = {"score": 0.5, "format": 1.0}
    return sample


async def elsewhere(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Sampled by an engine that is not ours; its version is told."""
    sample.tokens, sample.response_length, sample.weight_versions = [5, 6, 7, 8], 2, ["3", "4"]
    return sample


async def long_elsewhere(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.tokens = [5] * 30_000 + [6, 7] * 41
    sample.response_length, sample.loss_mask = 82, [1, 0] * 41
    sample.weight_versions = ["3"]
    return sample


async def of_no_version(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.tokens, sample.response_length = [5, 6, 7, 8], 2
    return sample


async def aborted(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.status = Sample.Status.ABORTED
    return sample


async def removed(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.tokens, sample.response_length, sample.remove_sample = [5, 6, 7], 2, True
    return sample


async def short_mask(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.tokens, sample.response_length, sample.loss_mask = [5, 6, 7], 2, [1]
    return sample


async def fans_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    samples = []
    for prompt in ([5, 6], [7, 8]):
        output = await post(url, {"input_ids": prompt, "sampling_params": sampling_params})
        ids = output["output_ids"]
        samples.append(SlimeSample(tokens=prompt + ids, response_length=len(ids), reward=1.0))
    return samples


async def quarrels(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    good, bad = await fans_out(args, sample, sampling_params)
    bad.reward = 0.0
    return [good, bad]


async def returns_text(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return "an answer"


async def asks_for_what_no_policy_samples(
    args: Any, sample: Any, sampling_params: dict[str, Any]
) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    await post(url, {"text": "x", "sampling_params": {**sampling_params, "ignore_eos": True}})
    return sample


async def asks_for_another_endpoint(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/list_workers")
    return sample


async def asks_for_more_than_fits(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A body of more than a MiB, which aiohttp's servers refuse by default."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    await post(url, {"input_ids": [5] * 400_000, "sampling_params": sampling_params})
    return sample


async def leaves_a_deep_value(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A reply that was read as JSON may be of thousands of brackets."""
    for _ in range(5000):
        sample.metadata["read"] = [sample.metadata.get("read")]
    return await elsewhere(args, sample, sampling_params)


async def wants_an_argument(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    assert getattr(args, "never_set", None) is None
    return args.max_searches


def not_async(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return sample


async def needs_more(args: Any, sample: Any, sampling_params: dict[str, Any], tools: Any) -> Any:
    return sample


def generate_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Any]]:
    return []


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


@asynccontextmanager
async def worker(
    world: World, folder: Path, function: str, validation: Any = None, **options: Any
) -> AsyncIterator[RolloutWorker]:
    GenerateState._made = None  # one for a process, which runs one function
    config = RolloutConfig(agent=f"{__name__}:{function}", max_attempts=1, **options)
    made = RolloutWorker(
        config, [world.url], tokenizer_path=Path(save_tokenizer(folder)), validation=validation
    )
    try:
        yield made
    finally:
        await made.close()


async def run(
    world: World, folder: Path, function: str, n: int = 1, channel: str = "train", **options: Any
) -> dict[str, int]:
    await world.pool.open_group("p", n, channel=channel, metadata={"task": TASK})
    async with worker(world, folder, function, **options) as running:
        return await running.run_group(dict(TASK), "p", n, channel)


async def leased(world: World, channel: str = "train") -> list[Step]:
    steps = await world.pool.fetch_batch(channel=channel, timeout_s=10)
    assert steps is not None
    return steps


def log_probs(ids: Any) -> list[float]:
    return [log_prob(i) for i in ids]


async def test_a_generate_function_of_two_turns_becomes_a_step_for_each(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds(sampling={"train": ChannelSampling(0.8)})
    first = world.say("<search>her</search>", close=False, matched="</search>", version="3")
    second = world.say("she did", version="4")
    assert await run(world, tmp_path, "search", temperature=0.8) == {"complete": 1}
    steps = await leased(world)
    assert [s.response_ids.tolist() for s in steps] == [first.ids, second.ids]
    assert [s.policy_version for s in steps] == [3, 4]
    for step, said in zip(steps, (first, second), strict=True):
        assert step.rollout_log_probs is not None
        assert step.rollout_log_probs.tolist() == pytest.approx(log_probs(said.ids), abs=1e-6)
        assert step.metadata["sampling_params"]["temperature"] == 0.8
    prompt = world.ids(TASK["question"], close=False)
    tool = world.ids("<information>a page</information>", close=False)
    assert steps[0].prompt_ids.tolist() == prompt
    assert steps[1].prompt_ids.tolist() == [*prompt, *first.ids, *tool]
    assert (steps[0].parent_index, steps[1].parent_index) == (None, 0)
    assert [r["sampling_params"]["stop"] for r in world.engine.requests] == [["</search>"]] * 2


async def test_a_function_that_appends_its_tokens_runs_where_slime_is_not_installed(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    first, second = world.say("<code>", close=False), world.say("42", version="1")
    assert await run(world, tmp_path, "retool") == {"complete": 1}
    steps = await leased(world)
    assert [s.response_ids.tolist() for s in steps] == [first.ids, second.ids]
    assert [s.policy_version for s in steps] == [0, 1]
    assert steps[1].finish_reason == "stop"


async def test_an_evaluation_is_told_and_samples_as_validation_says(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    validation = ValidationConfig(temperature=0.0, max_tokens=7, stop="end")
    options = {"channel": "val", "temperature": 1.0, "validation": validation}
    assert await run(world, tmp_path, "retool", **options) == {"complete": 1}
    lease = await world.pool.lease_batch(channel="val", timeout_s=10)
    assert lease is not None
    (trajectory,) = lease.groups[0].trajectories
    assert trajectory.metadata["evaluated"] is True
    sent = [r["sampling_params"] for r in world.engine.requests]
    assert [(s["temperature"], s["max_new_tokens"], s["stop"]) for s in sent] == [
        (0.0, 7, ["end"])
    ] * 2


async def test_log_probs_that_a_function_leaves_out_are_those_of_its_calls(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    said = world.say("she did", version="2")
    options = {"agent_args": {"reward_key": "score"}}
    assert await run(world, tmp_path, "silent", **options) == {"complete": 1}
    (step,) = await leased(world)
    assert step.rollout_log_probs is not None
    assert step.rollout_log_probs.tolist() == pytest.approx(log_probs(said.ids), abs=1e-6)
    assert (step.policy_version, step.reward) == (2, 0.5)


async def test_tokens_that_nobody_sampled_like_this_are_stored_without_log_probs(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    world.say("she did", version="2")
    assert await run(world, tmp_path, "retokenised") == {"complete": 1}
    (step,) = await leased(world)
    assert step.rollout_log_probs is None
    assert step.policy_version == 2


async def test_a_sample_of_an_engine_elsewhere_has_the_version_that_it_tells(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    assert await run(world, tmp_path, "elsewhere") == {"complete": 1}
    (step,) = await leased(world)
    assert (step.policy_version, step.rollout_log_probs) == (3, None)


async def test_several_samples_are_branches_of_one_rollout(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    assert await run(world, tmp_path, "fans_out") == {"complete": 1}
    steps = await leased(world)
    assert [s.prompt_ids.tolist() for s in steps] == [[5, 6], [7, 8]]
    assert [s.parent_index for s in steps] == [None, None]
    assert [s.reward for s in steps] == [None, 1.0]


async def test_a_sample_to_be_removed_is_a_rollout_without_steps(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    assert await run(world, tmp_path, "removed") == {"no_steps": 1}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("aborted", "returned a Sample of status aborted"),
        ("of_no_version", "sample.weight_versions is empty"),
        ("short_mask", "sample.loss_mask has 1 values for a response_length of 2"),
        ("quarrels", "give all of them the same"),
        ("silent", r"parts \['format', 'score'\], but reward_key of rollout.agent_args is None"),
        ("returns_text", "returned a str; return the Sample"),
        ("asks_for_what_no_policy_samples", "ignore_eos is True"),
        ("asks_for_another_endpoint", "GET /list_workers is not served"),
        ("asks_for_more_than_fits", "400000 tokens"),
        ("leaves_a_deep_value", r"read = a list, which is no JSON \(maximum recursion depth"),
        ("wants_an_argument", "args.max_searches is not known here; set it in rollout.agent_args"),
    ],
)
async def test_what_is_no_rollout_is_an_abort_that_says_why(
    worlds: Callable[..., Any], tmp_path: Path, function: str, why: str
) -> None:
    world = await worlds()
    ((end, times),) = (await run(world, tmp_path, function)).items()
    assert times == 1
    assert re.search(why, end), end
    assert await world.pool.fetch_batch() is None


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000, "1" * 5000])
async def test_an_answer_that_is_no_json_is_text(text: str) -> None:
    async with serving(PlainTextResponse(text)) as url:
        assert await post(url, {}) == await get(url) == text


async def test_a_rollout_of_many_long_turns_is_stored_in_several_requests(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    """Each Step has all tokens before it: 41 of them are more than a request may hold."""
    world = await worlds()
    assert await run(world, tmp_path, "long_elsewhere") == {"complete": 1}
    steps = await leased(world)
    assert len(steps) == 41
    assert sum(s.n_tokens for s in steps) > 1_200_000


async def test_a_call_may_take_as_long_as_the_model_does(
    worlds: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of rollouts is otherwise patient for two minutes; then it would begin again."""
    monkeypatch.setattr("stepwell.trainer.rollout.gateway.ANSWER_S", 0.2)
    world = await worlds()
    said = world.say("she did", gate=asyncio.Event())
    running = asyncio.create_task(
        run(world, tmp_path, "silent", agent_args={"reward_key": "score"})
    )
    await world.engine.arrived.wait()
    await asyncio.sleep(0.5)
    said.gate.set()
    assert await running == {"complete": 1}
    assert len(world.engine.requests) == 1


async def rewards_the_whole(args: Any, sample: Any, **kwargs: Any) -> float:
    """Like search-r1's: the text of all turns, and what the function left on the sample."""
    whole = sample.prompt + sample.response
    assert whole.startswith("who wrote it<search>her</search><information>a page</information>")
    assert sample.status == Sample.Status.COMPLETED
    assert sample.label == "she"
    return float(sample.n_searches + ("she" in sample.response))


async def test_a_reward_of_slimes_form_gets_the_sample_as_the_function_left_it(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    world.say("<search>her</search>", close=False, matched="</search>")
    world.say("she did")
    await run(world, tmp_path, "search")
    lease = await world.pool.lease_batch(timeout_s=10)
    assert lease is not None
    scorer = Scorer(RewardConfig(function=f"{__name__}:rewards_the_whole"), tmp_path)
    (group,) = await scorer.score(lease.groups)
    assert group.trajectories[0].reward == 2.0
    await scorer.aclose()


async def test_the_prompt_is_text_by_the_chat_template_where_that_is_asked_for(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    await run(world, tmp_path, "retool", agent_args={"apply_chat_template": True})
    sent = world.tokenizer.decode(world.engine.requests[0]["input_ids"])
    assert sent == "<|im_start|>user\nwho wrote it<|im_end|>\n<|im_start|>assistant\n"


async def shows_its_text(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": [5], "sampling_params": sampling_params})
    sample.tokens, sample.response_length = [5, *output["output_ids"]], len(output["output_ids"])
    sample.response = output["text"]
    return sample


async def reads_json(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A reply may spell half a character, and a number of any size."""
    sample = await shows_its_text(args, sample, sampling_params)
    sample.metadata["read"] = json.loads('{"said": "\\ud83d", "n": 9999999999999999999999}')
    return sample


async def test_what_a_function_read_in_a_reply_comes_with_its_rollout(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world = await worlds()
    assert await run(world, tmp_path, "reads_json") == {"complete": 1}
    lease = await world.pool.lease_batch(timeout_s=10)
    assert lease is not None
    (trajectory,) = lease.groups[0].trajectories
    assert trajectory.metadata["read"] == {"said": "?", "n": "9999999999999999999999"}


SEEN: list[str] = []


def sees(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    SEEN.append(solution_str)
    return 1.0


@pytest.mark.parametrize(("skips", "text"), [(True, "she did"), (False, "she did<|im_end|>")])
async def test_special_tokens_are_left_out_of_texts_or_not(
    worlds: Callable[..., Any], tmp_path: Path, skips: bool, text: str
) -> None:
    """`skip_special_tokens` holds for the text that a function gets, and for that of rewards."""
    world = await worlds()
    world.say("she did")
    await run(world, tmp_path, "shows_its_text", skip_special_tokens=skips)
    lease = await world.pool.lease_batch(timeout_s=10)
    assert lease is not None
    (trajectory,) = lease.groups[0].trajectories
    assert trajectory.metadata["slime_sample"]["response"] == text
    reward = RewardConfig(function=f"{__name__}:sees")
    scorer = Scorer(reward, tmp_path, skip_special_tokens=skips)
    await scorer.score(lease.groups)
    await scorer.aclose()
    assert SEEN.pop() == text


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("not_async", "no coroutine function; write it as async def generate(args, sample, "),
        ("needs_more", "called as needs_more(args, sample, sampling_params): missing a required"),
        ("generate_rollout", "a function for slime's --rollout-function-path: those draw prompts"),
    ],
)
def test_a_function_that_cannot_be_run_is_refused_before_anything_starts(
    function: str, why: str
) -> None:
    with pytest.raises(RolloutError, match=re.escape(why)):
        load_agent(f"{__name__}:{function}")


def test_a_state_that_could_not_be_made_is_made_again(tmp_path: Path) -> None:
    GenerateState._made = None
    known = {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "hf_checkpoint": tmp_path}
    for _ in range(2):
        with pytest.raises(DataError, match="no tokenizer can be loaded"):
            GenerateState(SimpleNamespace(**known))


def test_an_engine_of_more_gpus_than_the_arguments_give_it_is_one_engine(tmp_path: Path) -> None:
    """A semaphore of no engine would let no call through, for ever."""
    GenerateState._made = None
    names = "temperature top_p top_k max_response_len stop stop_token_ids skip_special_tokens"
    known = dict.fromkeys((f"rollout_{name}" for name in names.split()), None)
    engines = {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 8}
    state = GenerateState(
        SimpleNamespace(
            **known, **engines, hf_checkpoint=save_tokenizer(tmp_path), sglang_server_concurrency=4
        )
    )
    assert not state.semaphore.locked()
    GenerateState._made = None


def test_arguments_that_nobody_reads_are_refused() -> None:
    with pytest.raises(RolloutError, match="only functions of slime's form are given args"):
        load_agent(f"{__name__}:agent", {"max_searches": 3})
    load_agent(f"{__name__}:search", {"max_searches": 3})
    with pytest.raises(ValueError, match="but agent is null: nobody reads it"):
        RolloutConfig(agent_args={"max_searches": 3})


# -- the router: engine.router_url -----------------------------------------------------------------


class Router:
    """An SGLang router as far as it is asked: who is behind it, in the form of sglang-router 0.3.2
    (`/workers`), or in that of older ones (`/list_workers`)."""

    def __init__(self, urls: list[str], *, old: bool, kind: str = "regular") -> None:
        self.asked: list[str] = []
        self.url = ""
        self._urls = urls
        self._old = old
        self._kind = kind

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/list_workers" and self._old:
            return web.json_response({"urls": self._urls})
        if request.path != "/workers" or self._old:
            return web.Response(status=404)
        workers = [
            {
                "id": f"{i}",
                "url": url,
                "model_id": "m",
                "worker_type": self._kind,
                "is_healthy": True,
                "connection_mode": "HTTP",
            }
            for i, url in enumerate(self._urls)
        ]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return web.json_response({"workers": workers, "total": len(workers), "stats": stats})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Router]:
        runner = web.ServerRunner(web.Server(self._answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("old", [False, True])
async def test_the_engines_behind_a_router_are_found_and_called_themselves(
    worlds: Callable[..., Any], tmp_path: Path, old: bool
) -> None:
    world = await worlds(engines=2)
    engines = world.engines  # type: ignore[attr-defined]
    # One of data-parallel ranks is listed once a rank.
    urls = [engines[0].url, f"{engines[1].url}@0", f"{engines[1].url}@1"]
    async with Router(urls, old=old).running() as router:
        config = EngineConfig(kind="attach", router_url=f"{router.url}/")
        found = await EngineServer(config, tmp_path).start()
        assert found == [engines[0].url, engines[1].url]
        calling = await worlds(engine_urls=tuple(found))
        client = await calling.client()
        hello = {"role": "user", "content": "hello"}
        await client.chat.completions.create(model="m", messages=[hello])
        assert sum(len(engine.requests) for engine in engines) == 1
        known = calling.gateway.engine.statistics()["engines"]
        assert [engine["url"] for engine in known] == found
        assert router.asked == ["/workers", "/list_workers"][: 1 + old]


async def test_a_router_without_whole_engines_is_refused_with_the_way_out(tmp_path: Path) -> None:
    async with Router(["http://127.0.0.1:9"], old=False, kind="prefill").running() as router:
        config = EngineConfig(kind="attach", router_url=router.url)
        with pytest.raises(
            EngineStartError, match=r"127\.0\.0\.1:9 is of the type prefill; only whole"
        ):
            await EngineServer(config, tmp_path).start()
    async with Router([], old=False).running() as router:
        config = EngineConfig(kind="attach", router_url=router.url, startup_timeout_s=0.1)
        with pytest.raises(EngineStartError, match="lists no worker; start the engines"):
            await EngineServer(config, tmp_path).start()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "attach"}, "or set router_url"),
        ({"kind": "attach", "router_url": "http://a", "urls": ("http://b",)}, "leave one out"),
        ({"kind": "sglang", "router_url": "http://a"}, "router_url is set but kind is 'sglang'"),
        ({"kind": "attach", "router_url": "a:3000"}, "router_url is 'a:3000'; write http://"),
    ],
)
def test_a_router_is_named_by_its_url_alone(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        EngineConfig(**fields)


# -- engines over several nodes --------------------------------------------------------------------


def test_the_parts_of_a_server_over_two_nodes_are_launched_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node 0 answers requests; its dist_init_addr is every part's."""
    monkeypatch.setattr("stepwell.backends.engines.commands.has_gpu", lambda: True)
    launches = node_launches([Host("10.0.0.2", 21000), Host("10.0.0.3", 24500)])
    lines = []
    for ip, launch in zip(("10.0.0.2", "10.0.0.3"), launches, strict=True):
        config = EngineConfig(
            kind="sglang",
            model_path=Path("/model"),
            python="python",
            host=ip,
            extra_args=("--tp-size", "16", *launch.args),
        )
        lines.append(command_line(config, Launch(launch.port, "/run/weights/v7", "7")).argv)
    assert " ".join(lines[0]) == (
        "python -m sglang.launch_server --model-path /run/weights/v7 --tokenizer-path /model "
        "--host 10.0.0.2 --port 21000 --weight-version 7 --max-running-requests 64 --dtype auto "
        "--stream-interval 4 --random-seed 0 --log-level-http warning --tp-size 16 "
        "--nccl-port 21001 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.2:21002"
    )
    other = " ".join(lines[0]).replace(
        "--host 10.0.0.2 --port 21000", "--host 10.0.0.3 --port 24500"
    )
    other = other.replace("--nccl-port 21001", "--nccl-port 24501")
    assert " ".join(lines[1]) == other.replace("--node-rank 0", "--node-rank 1")


# -- evaluations -----------------------------------------------------------------------------------


def rolled_out(source: str, *rollouts: tuple[float, str]) -> Group:
    """A prompt of a data source, with the reward and the finish reason of each rollout."""
    trajectories = [
        [step_of(f"{source}{i}", source, reward=reward, finish_reason=finish_reason)]
        for i, (reward, finish_reason) in enumerate(rollouts)
    ]
    return group(*trajectories, uid=source, metadata={"task": {"data_source": source}})


def test_each_evaluation_set_has_its_mean_reward_and_the_share_that_was_cut_off() -> None:
    sets = [
        rolled_out("aime", (1.0, "stop"), (0.0, "length"), (0.0, "length"), (1.0, "stop")),
        rolled_out("gpqa", (1.0, "stop"), (1.0, "length"), (1.0, "stop"), (1.0, "stop")),
    ]
    found = figures(sets, 4, pass_reward=1.0)
    assert (found["val/aime/mean@4"], found["val/aime/truncated_ratio"]) == (0.5, 0.5)
    assert (found["val/gpqa/mean@4"], found["val/gpqa/truncated_ratio"]) == (1.0, 0.25)
