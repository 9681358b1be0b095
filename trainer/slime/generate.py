"""slime's generate functions as agents: `rollout.agent=module:generate`.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

    task ──► Sample(prompt, label, metadata) ──► generate ──► tokens, loss_mask ──► Steps ──► pool
                                                    │ args.sglang_router_ip, _port      `masked.py`
                                                    └─► `engine_address.py`

slime's `--custom-generate-function-path`, as slime 0.3.1 calls it (`slime/rollout/
sglang_rollout.py`, `generate_and_rm`). A function that says `evaluation` is told whether it
evaluates. A Sample of status `aborted` is a failed attempt, made again; one without a trained token
is a rollout without Steps. Several Samples are branches of one rollout, which has one reward.

Where slime is installed, samples are its own class and its HTTP client is made ready. Elsewhere
functions take from here what they import from slime::

    from slime.utils.types import Sample                       from stepwell.trainer.slime.generate
    from slime.utils.http_utils import get, post                    import GenerateState, Sample,
    from slime.rollout.sglang_rollout import GenerateState              get, post

Does not own: attempts and their ends (`rollout/worker.py`), rewards of Samples without one
(`scoring.py`).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp

from stepwell.backends.slime.sample import SAMPLE, SlimeSample, sample_class
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.types import GREEDY, MAX_REWARD, VAL, Step, is_reward
from stepwell.trainer.config import RolloutConfig, ValidationConfig
from stepwell.trainer.data import Task
from stepwell.trainer.data.prompt_length import PromptMeter, load_tokenizer
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.plain import plain
from stepwell.trainer.rollout.gateway import RETRY_S, GatewayClient
from stepwell.trainer.slime.arguments import Arguments
from stepwell.trainer.slime.engine_address import HOST, EngineAddress
from stepwell.trainer.slime.masked import EngineCall, steps_of

Sample = sample_class()

MAX_NUMBERS = 500_000
"""Ids and log-probs of one request."""


class GenerateState:
    """slime's `GenerateState` of these arguments: tokenizer, semaphore and sampling parameters, one
    for the process."""

    _made: GenerateState | None = None

    def __new__(cls, args: Any) -> GenerateState:
        if cls._made is None:
            made = super().__new__(cls)
            made._begin(args)
            cls._made = made  # a whole one: the next call would else get what failed
        return cls._made

    def _begin(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(Path(args.hf_checkpoint), "GenerateState")
        self.processor = None
        engines = max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * engines)
        self.sampling_params = sampling_params(args)
        self.reset()

    def reset(self) -> None:
        """Forget what is under way."""
        self.remaining_batch_size = 0
        self.pendings: set[Any] = set()
        self.aborted = False


def sampling_params(args: Any) -> dict[str, Any]:
    """Sampling parameters that slime hands to a generate function, of its arguments."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(
    url: str,
    payload: Mapping[str, Any] | None,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The JSON (or text) that `url` answers to a POST; failures of server and network are tried
    again, as in slime's `http_utils`.

    Raises:
        RolloutError: it refuses the request (4xx), or failed `max_retries` times.
    """
    return await _ask("POST", url, max_retries, json=payload or {}, headers=headers)


async def get(url: str) -> Any:
    """The JSON that `url` answers to a GET; raises as `post`, at the first failure."""
    return await _ask("GET", url, 1)


async def _ask(method: str, url: str, tries: int, **how: Any) -> Any:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        for attempt in range(1, tries + 1):
            try:
                async with http.request(method, url, **how) as answer:
                    content = await answer.text()
                    if answer.status < 400:
                        try:
                            return json.loads(content)
                        except (ValueError, RecursionError):  # thousands of brackets, too
                            return content
                    why = f"answered {answer.status}: {content:.300}"
                    if answer.status < 500 and answer.status != 429:
                        raise RolloutError(f"{url} {why}")
            except aiohttp.ClientError as e:
                why = f"cannot be asked ({type(e).__name__}: {e})"
            if attempt < tries:
                await asyncio.sleep(RETRY_S)
    raise RolloutError(f"{url} {why}, after {tries} tries")


class GenerateRollouts:
    """Runs rollouts of a generate function; one per worker.

    Args:
        function: found at `config.agent`.
        tokenizer_path: Hugging Face directory, the `hf_checkpoint` of `args`.
        validation: says how evaluations sample; None: as training does.
    """

    def __init__(
        self,
        function: Any,
        config: RolloutConfig,
        gateway: GatewayClient,
        tokenizer_path: Path,
        validation: ValidationConfig | None = None,
    ) -> None:
        self._function = function
        self._config = config
        self._gateway = gateway
        self._path = tokenizer_path
        self._validation = validation
        self._says_evaluation = "evaluation" in inspect.signature(function).parameters
        self._lock = asyncio.Lock()
        self._tokenizer: Any = None
        self._template: PromptMeter | None = None
        self._context_length = 0

    async def run(
        self, task: Task, started: Mapping[str, Any], mark: Mapping[str, Any], channel: str
    ) -> dict[str, Any]:
        """Run the function on `task` and store its Steps; the body that completes the rollout.

        Args:
            started: the gateway's answer to `/init_trajectory`.
            mark: the rollout's metadata.

        Raises:
            RolloutError: what the function returned is no rollout, or it was aborted.
        """
        await self._ready()
        origin = started["base_url"].rsplit("/", 2)[0]
        identity = {name: started[name] for name in ("trajectory_uid", "prompt_uid")}
        address = EngineAddress(self._gateway, origin, identity, self._tokenizer)
        async with address:
            args = self._arguments(address, channel, is_greedy=bool(mark.get(GREEDY)))
            sample = self._sample(task, mark["rollout_index"], identity["trajectory_uid"])
            known = dict(sample.metadata)
            also = {"evaluation": channel == VAL} if self._says_evaluation else {}
            try:
                returned = await self._function(args, sample, sampling_params(args), **also)
            except Exception as e:
                if address.refusal:
                    raise RolloutError(f"{address.refusal} ({type(e).__name__})") from e
                raise
        samples = self._checked(returned)
        steps = self._steps(samples, address.calls, identity)
        for some in _bodies(steps):
            await self._gateway.ask(
                f"{origin}/submit_steps",
                {"steps": [step.to_dict() for step in some], "channel": channel},
            )
        return {"reward": self._reward(samples), "metadata": _metadata(samples[-1], known)}

    async def _ready(self) -> None:
        async with self._lock:
            if self._tokenizer is not None:
                return
            ready = await self._gateway.ask("/ready", None)
            self._context_length = int(ready["context_length"])
            if self._config.agent_args.get("apply_chat_template", False):
                kwargs = self._config.agent_args.get("apply_chat_template_kwargs") or {}
                self._template = await asyncio.to_thread(PromptMeter, self._path, kwargs)
            with suppress(ImportError):  # slime is not installed
                http = importlib.import_module("slime.utils.http_utils")
                http.init_http_client(self._arguments(None, "", is_greedy=False))
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path, "rollout.agent")

    def _arguments(
        self, address: EngineAddress | None, channel: str, *, is_greedy: bool
    ) -> Arguments:
        config = self._config
        own = self._validation if channel == VAL else None

        def chosen(name: str, default: Any) -> Any:
            found = (getattr(section, name) for section in (own, config) if section is not None)
            return next((value for value in found if value is not None), default)

        stop, stop_ids = chosen("stop", None), chosen("stop_token_ids", None)
        reward = config.reward
        known = {
            "hf_checkpoint": str(self._path),
            "custom_generate_function_path": config.agent,
            "sglang_router_ip": HOST,
            "sglang_router_port": 0 if address is None else address.port,
            "sglang_server_concurrency": config.concurrency,
            "rollout_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
            "n_samples_per_prompt": config.n,
            "rollout_temperature": 0.0 if is_greedy else chosen("temperature", 1.0),
            "rollout_top_p": chosen("top_p", 1.0),
            "rollout_top_k": chosen("top_k", -1),
            "rollout_max_response_len": chosen("max_tokens", self._context_length),
            "rollout_max_context_len": self._context_length,
            "rollout_stop": None if stop is None else list(stop),
            "rollout_stop_token_ids": None if stop_ids is None else list(stop_ids),
            "rollout_skip_special_tokens": config.skip_special_tokens,
            "group_rm": reward is not None and reward.manager == "group",
            "custom_rm_path": None,
            "rm_type": None,
            "reward_key": None,
            "eval_reward_key": None,
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "use_rollout_routing_replay": False,
            "use_distributed_post": False,
            "router_policy": None,
            "sglang_dp_size": 1,
            "sglang_speculative_algorithm": None,
            "sglang_enable_deterministic_inference": False,
            "sglang_model_routers": None,
            "ci_test": False,
        }
        return Arguments("set it in rollout.agent_args", **known | config.agent_args)

    def _sample(self, task: Task, index: int, session_id: str) -> Any:
        prompt = task["question"] if "question" in task else task["messages"]
        own = {"instance_id": task["instance_id"], "source_name": task["data_source"]}
        tools = {"tools": task["tools"]} if "tools" in task else {}
        return sample_class()(
            group_index=0,
            index=index,
            prompt=prompt if self._template is None else self._template.render(task),
            label=task["answer"],
            metadata={**task["metadata"], **own, **tools},
            session_id=session_id,
        )

    def _checked(self, returned: Any) -> list[Any]:
        samples = returned if isinstance(returned, list) else [returned]
        strangers = [s for s in samples if not isinstance(s, (SlimeSample, sample_class()))]
        if strangers or not samples:
            what = f"a {type(strangers[0]).__name__}" if strangers else "an empty list"
            raise RolloutError(
                f"{self._config.agent} returned {what}; return the Sample, or a list of Samples"
            )
        if any(s.status == type(s).Status.ABORTED for s in samples):
            raise RolloutError(f"{self._config.agent} returned a Sample of status aborted")
        return samples

    def _steps(
        self, samples: Sequence[Any], calls: Sequence[EngineCall], identity: Mapping[str, str]
    ) -> list[Step]:
        steps: list[Step] = []
        for sample in samples:
            try:
                steps += steps_of(sample, calls, identity, len(steps))
            except InvalidStepError as e:
                raise RolloutError(f"{self._config.agent} returned no rollout: {e}") from e
        return steps

    def _reward(self, samples: Sequence[Any]) -> float | None:
        """The rollout's reward; None: it is scored later."""
        rewards = {self._number(sample) for sample in samples}
        if len(rewards) > 1:
            raise RolloutError(
                f"{self._config.agent} returned Samples with the rewards {sorted(rewards, key=str)}"
                "; they are branches of one rollout: give all of them the same, or none one"
            )
        (reward,) = rewards
        return reward

    def _number(self, sample: Any) -> float | None:
        reward, key = sample.reward, self._config.agent_args.get("reward_key")
        if isinstance(reward, dict):
            if key not in reward:
                raise RolloutError(
                    f"{self._config.agent} returned a reward with the parts {sorted(reward)}, but "
                    f"reward_key of rollout.agent_args is {key!r}; set it to one of them"
                )
            reward = reward[key]
        if reward is not None and not is_reward(reward):
            raise RolloutError(
                f"{self._config.agent} returned the reward {reward!r:.80}; set a number within "
                f"±{MAX_REWARD:g}, or None to leave the rollout unscored"
            )
        return None if reward is None else float(reward)


def _bodies(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps of one request each: every Step brings all tokens before it, so those of many turns are
    more numbers than a gateway takes at once."""
    body: list[Step] = []
    room = MAX_NUMBERS
    for step in steps:
        n = step.n_tokens + len(step.response_ids)
        if body and n > room:
            yield body
            body, room = [], MAX_NUMBERS
        body.append(step)
        room -= n
    if body:
        yield body


def _metadata(sample: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the trajectory: all that the function added to the sample's, and, for reward
    functions of slime's form, the sample's text and attributes that are no fields.

    Raises:
        RolloutError: some of it is no JSON, and would not reach the trainer's process.
    """
    own = {f.name for f in fields(sample)}
    added = {k: v for k, v in sample.metadata.items() if k not in known or known[k] is not v}
    kept = {name: value for name, value in vars(sample).items() if name not in own}
    kept |= {"prompt": sample.prompt, "response": sample.response, "status": sample.status.value}
    for name, value in (*added.items(), *kept.items()):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise RolloutError(
                f"sample has {name} = a {type(value).__name__}, which is no JSON ({e}) and would "
                "not reach the reward in the trainer's process; set text, numbers, lists or dicts"
            ) from e
    said: dict[str, Any] = plain({**added, SAMPLE: kept})  # the model's words may be anything
    return said
