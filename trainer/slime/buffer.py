"""slime's Agent Rollout: a rollout function over the HTTP of a Rollout Buffer, for slime runs that
share no Ray cluster with the pool.

    --rollout-function-path          stepwell.trainer.slime.buffer.generate_rollout
    --data-source-path               slime's own (with a buffer), or
                                     stepwell.trainer.slime.data_source.RolloutDataSourceWithBuffer
    --agent-rollout-buffer-url       http://gateway:8100      newer slimes: --rollout-buffer-url
    --rollout-task-type              chat
    --fetch-trajectory-retry-times   3      failures of a rollout that are borne; -1: any number
    --disable-rewards-normalization         if the buffer's transform_group normalises them
    --custom-config-path             {stepwell_log_raw_info: my_module:log_raw_info}

    generate(7) ─first time─► start_rollout       skip_instance_ids: of finished groups, which the
                                                  data source saves as its metadata
                ─until enough─► get_rollout_data  a group at a time, rollout_batch_size new ones
                              ► log_raw_info      what the buffer told of them
                              ► add_samples, get_samples       as --buffer-filter-path chooses
                ◄── samples

Names and forms are those of slime's `generate_agent_rollout` and of `rollout_buffer_example.py`
after it (THUDM/slime, slime_plugins/rollout_buffer). Differences: ids that a gateway recorded are
not tokenised again, no group is thrown away, and what cannot be fetched is an error. An agent's
side branches are not trained, and counted: `rollout.py` trains them, and loses nothing in a crash.

With keys, the gateway's admin key is read from the environment variable STEPWELL_ADMIN_KEY.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from weakref import WeakKeyDictionary

import aiohttp

from stepwell.backends.errors import MaskError
from stepwell.backends.masks import MultiTurnLossMaskGenerator, mask_generator
from stepwell.backends.slime.sample import sample_class
from stepwell.backends.slime.samples import settle_log_probs
from stepwell.datapool.dotted import resolve
from stepwell.trainer.errors import ConfigError, DataError, StarvedError
from stepwell.trainer.slime.config import SlimeConfig
from stepwell.trainer.slime.rollout import check_arguments

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two questions."""
START_S = 100.0
"""Seconds that an answer to `/start_rollout` may take: generators check what they are given."""
WAITING_S = 60.0
"""Seconds between two lines in the log that say what is waited for."""
REQUIRED = frozenset(("uid", "instance_id", "messages", "reward", "extra_info"))
"""Fields of every item, by the document."""
TOKENS = ("tokens", "response_length", "loss_mask")
"""Fields of an item whose ids are known; without them the messages are tokenised."""
SLIMES_MASKS = ("qwen", "qwen3", "qwen3_5", "distill_qwen")


class RolloutSamples(list[Any]):
    """Samples of a rollout, one per trajectory, group after group: what slime trains."""

    def __init__(self, groups: Sequence[Sequence[Any]], metrics: dict[str, Any]) -> None:
        super().__init__(sample for group in groups for sample in group)
        self.groups = groups
        """The same samples by group."""
        self.metrics = metrics
        """Items that were fetched for them."""


@dataclass
class _Run:
    """State of the rollout of one data source. slime keeps the source for a run; a run that
    is resumed has a source of its own, and starts its rollout anew."""

    is_started: bool = False
    groups: list[list[Any]] = field(default_factory=list)
    """Fetched, and in no batch yet: the buffer has given them away for good."""
    infos: list[Mapping[str, Any]] = field(default_factory=list)
    """`meta_info` of the answers since the last batch."""
    branch_tokens: int = 0
    """Sampled tokens of side branches since the last batch."""


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """Run `generate_agent_rollout`, for slime's `--rollout-function-path`.

    Returns:
        `RolloutFnTrainOutput` of slimes that have it, which log the metrics; of others, and where
        slime is not installed, the samples.
    """
    samples = asyncio.run(generate_agent_rollout(args, rollout_id, data_buffer, evaluation))
    try:
        kind = resolve("slime.rollout.base_types:RolloutFnTrainOutput")
    except ImportError:
        log.info("rollout %d: %s", rollout_id, samples.metrics)
        return samples
    return kind(samples=samples.groups, metrics=samples.metrics)


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutSamples:
    """Fetch `rollout_batch_size` new groups, add them to the data buffer and return the groups that
    its filter chooses.

    Args:
        args: slime's.
        rollout_id: number of this rollout; the data source's metadata has the finished instances
            by it.
        data_buffer: slime's data source with a buffer.
        evaluation: not supported, as in slime.

    Returns:
        A list of slime's samples.

    Raises:
        ConfigError: arguments that do not fit, or that the buffer refuses.
        StarvedError: the buffer failed too often, or its rollout ended before there was enough.
        DataError: items that make no samples, or a filter that returns too few groups.
        ValueError: see `get_rollout_data`.
        BatchError: see `settle_log_probs`.
    """
    if evaluation:
        raise ConfigError(
            "evaluation is not what a rollout buffer is for; set --eval-function-path to slime's "
            "own, or to stepwell.trainer.slime.rollout.generate_rollout"
        )
    check_arguments(args, one_sample_each=True)
    log_infos, url = _log_function(args), _buffer_url(args)
    run = _runs.setdefault(data_buffer, _Run())
    if not run.is_started:
        metadata = data_buffer.get_metadata()
        await asyncio.to_thread(start_rollout, url, args, metadata)
        run.is_started = True
        if getattr(args, "buffer_filter_path", None) is None:
            data_buffer.buffer_filter = latest_batch
    await _fetch(args, url, run, data_buffer)
    log_infos(args, run.infos, rollout_id)
    batch = args.rollout_batch_size
    fetched = [group[0].metadata["instance_id"] for group in run.groups]
    finished = [name for info in run.infos for name in info.get("finished_groups", ())]
    # What the buffer finished without serving it is not made again either.
    unserved = (Counter(finished) - Counter(fetched)).elements()
    data_buffer.update_metadata({str(rollout_id): [*fetched[:batch], *unserved]})
    _add(data_buffer, run.groups[:batch])
    metrics = {
        **{
            f"stepwell/dropped_groups/{why}": n
            for why, n in (run.infos[-1].get("dropped_groups", {}) if run.infos else {}).items()
        },
        "stepwell/untrained_tokens/branches": run.branch_tokens,
    }
    _runs[data_buffer] = _Run(is_started=True, groups=run.groups[batch:])
    groups: list[list[Any]] = data_buffer.get_samples(batch)
    n_rolled_out = sum(all(sample.tokens for sample in group) for group in groups)
    if n_rolled_out < len(groups):
        raise DataError(
            f"buffer_filter_path is {args.buffer_filter_path!r}, which returned {n_rolled_out} of "
            f"{batch} groups; the data source fills up with prompts that nobody rolled out: return "
            "as many groups as are asked for"
        )
    samples = RolloutSamples(groups, metrics)
    if samples and hasattr(samples[0], "rollout_log_probs"):
        without = sum(sample.rollout_log_probs is None for sample in samples)
        metrics["stepwell/samples_without_log_probs"] = without
        metrics["stepwell/untrained_tokens/no_log_probs"] = settle_log_probs(args, samples)
    metrics["stepwell/buffered_groups"] = data_buffer.get_buffer_length()
    return samples


def latest_batch(
    args: Any, rollout_id: int | None, buffer: list[list[Any]], num_samples: int
) -> list[list[Any]]:
    """Take the newest groups, at most `num_samples`: the filter without `--buffer-filter-path`.

    Older ones, which an earlier rollout function or a checkpoint has left there, stay, and are
    counted as `stepwell/buffered_groups`.
    """
    first = max(len(buffer) - num_samples, 0)
    taken = buffer[first:]
    del buffer[first:]
    return taken


async def get_rollout_data(
    api_base_url: str, num: int | None = None, timeout: float = 100.0
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask a Rollout Buffer for items until it has some.

    Args:
        api_base_url: address of the buffer, as `http://gateway:8100`.
        num: items wanted; a gateway answers with as many, rounded up to whole groups, or with none
            yet. None: all that there are.
        timeout: seconds that one request may take.

    Returns:
        The items, dictionaries with `REQUIRED`, and the `meta_info` of the answer.

    Raises:
        aiohttp.ClientError: the buffer cannot be reached, or answers with an error; a
            `ClientResponseError` has its status and words.
        ValueError: the answer is of another form.
        TimeoutError: a request took too long (`asyncio.TimeoutError` is its other name).
        StarvedError: a TimeoutError: the rollout has ended, so nothing will come.
    """
    url = f"{api_base_url.rstrip('/')}/get_rollout_data"
    body = {} if num is None else {"batch_size": num}
    waits_since = time.monotonic()
    async with aiohttp.ClientSession(
        headers=_headers(), timeout=aiohttp.ClientTimeout(total=timeout)
    ) as http:
        while True:
            async with http.post(url, json=body) as response:
                if response.status >= 400:
                    raise aiohttp.ClientResponseError(
                        response.request_info,
                        response.history,
                        status=response.status,
                        message=(await response.text())[:500],
                    )
                answer = await response.json()
            items, info, is_there = _read(answer, url)
            if is_there:
                return items, info
            if info.get("generator") in ("finished", "stopped"):
                raise StarvedError(f"the rollout at {api_base_url} is {info['generator']}")
            if time.monotonic() - waits_since > WAITING_S:
                log.warning("%s has nothing yet: %s", url, answer.get("message"))
                waits_since = time.monotonic()
            await asyncio.sleep(POLL_S)


def start_rollout(api_base_url: str, args: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a Rollout Buffer to start its rollout. Blocks, as slime's does.

    Args:
        api_base_url: address of the buffer.
        args: slime's; `start_payload` says which are sent.
        metadata: of the data source; its lists are the instances of finished groups, by rollout.

    Returns:
        The buffer's answer.

    Raises:
        ConfigError: it refuses, which no repetition mends.
        StarvedError: it failed once more than `fetch_trajectory_retry_times`.
    """
    url = f"{api_base_url.rstrip('/')}/start_rollout"
    body = json.dumps(start_payload(args, metadata)).encode()
    headers = {"content-type": "application/json", **_headers()}
    direct = build_opener(ProxyHandler({}))  # as aiohttp, which asks for the data
    failures = _Failures(args, url)
    while True:
        try:
            with direct.open(Request(url, body, headers), timeout=START_S) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except HTTPError as e:
            why = f"{e.code}: {e.read(500).decode(errors='replace')}"
            if e.code < 429:
                raise ConfigError(f"{url} answered {why}") from e
        except (OSError, ValueError) as e:  # not reached, or no JSON
            why = f"{type(e).__name__}: {e}"
        failures.bear(why)
        time.sleep(POLL_S)


def log_raw_info(args: Any, all_meta_info: Sequence[Mapping[str, Any]], rollout_id: int) -> None:
    """Log what the buffer told of a rollout's items before any filter: their number and their mean
    reward, as `rollout/no_filter/total_samples` and `rollout/no_filter/avg_reward`, to the log and,
    with `--use-wandb` (and `--use-tensorboard`), where slime's own figures go.

    A function of one's own with these arguments takes its place: `stepwell_log_raw_info`, its
    dotted path, in the file of `--custom-config-path`. Its figures begin with `rollout/`.

    Args:
        args: slime's.
        all_meta_info: `meta_info` of each answer.
        rollout_id: number of the rollout.
    """
    total = sum(info.get("total_samples", 0) for info in all_meta_info)
    if not total:
        return
    rewards = sum(i.get("avg_reward", 0) * i.get("total_samples", 0) for i in all_meta_info)
    figures: dict[str, Any] = {
        "rollout/no_filter/total_samples": total,
        "rollout/no_filter/avg_reward": rewards / total,
    }
    log.info("rollout %d: %s", rollout_id, figures)
    with_wandb = getattr(args, "use_wandb", False)
    if not (with_wandb or getattr(args, "use_tensorboard", False)):
        return
    step = rollout_id
    if getattr(args, "wandb_always_use_train_step", False):
        trained = rollout_id * args.rollout_batch_size * args.n_samples_per_prompt
        step = trained // args.global_batch_size
    figures["rollout/step"] = step
    try:
        write = resolve("slime.observability.logging_utils:log")
    except ImportError:  # a slime of before, whose only tracker is wandb
        if with_wandb:
            resolve("wandb:log")(figures)
        return
    write(args, figures, "rollout/step")


def start_payload(args: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `/start_rollout` is sent: slime's fields.

    Args:
        args: slime's.
        metadata: of the data source; its lists are the instances of finished groups, by rollout.
    """
    host = getattr(args, "sglang_router_ip", None)
    engine = {"remote_engine_url": f"http://{host}:{args.sglang_router_port}"} if host else {}
    finished = [each for value in metadata.values() if isinstance(value, list) for each in value]
    return {
        **engine,
        "num_process": str(getattr(args, "rollout_num_process", 100)),
        "num_epoch": str(getattr(args, "num_epoch", None) or 3),
        "remote_buffer_url": _buffer_url(args),
        "task_type": getattr(args, "rollout_task_type", "math"),
        "input_file": args.prompt_data,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "max_tokens": str(args.rollout_max_response_len),
        "sampling_params": {
            "max_tokens": args.rollout_max_response_len,
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
        },
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": finished,
    }


def _add(data_buffer: Any, groups: list[list[Any]]) -> None:
    """Add groups to the data buffer. That of the slimes with Agent Rollout (`slime.ray.buffer`,
    until August 2025) is their controller, and takes the samples of groups one after the other."""
    takes_samples = hasattr(data_buffer, "train_data_pool")
    data_buffer.add_samples([s for group in groups for s in group] if takes_samples else groups)


async def _fetch(args: Any, url: str, run: _Run, source: Any) -> None:
    """Fetch groups until there are those of a batch. What a failure has interrupted goes on."""
    masks = _Masks(args)
    failures = _Failures(args, url)
    while (missing := args.rollout_batch_size - len(run.groups)) > 0:
        try:
            items, info = await get_rollout_data(url, 1)  # of one group, then: whole groups
        except StarvedError as e:
            raise StarvedError(
                f"{e}, and {missing} groups are missing; raise --num-epoch, or start it again"
            ) from e
        except aiohttp.ClientResponseError as e:
            if e.status < 429:
                raise ConfigError(f"{url}/get_rollout_data answered {e.status}: {e.message}") from e
            failures.bear(f"{e.status}: {e.message}")
            await asyncio.sleep(POLL_S)
        except (aiohttp.ClientError, TimeoutError) as e:
            failures.bear(f"{type(e).__name__}: {e}")
            await asyncio.sleep(POLL_S)
        else:
            groups = _by_group(items, args.n_samples_per_prompt)
            run.groups += [_samples(group, source, masks) for group in groups]
            run.infos.append(info)
            branches = [b for item in items for b in item.get("branches") or ()]
            run.branch_tokens += sum(sum(branch["loss_mask"]) for branch in branches)
            if not groups:
                await asyncio.sleep(POLL_S)


class _Failures:
    """Failures of one rollout's requests to `url`."""

    def __init__(self, args: Any, url: str) -> None:
        self._url = url
        self._borne = getattr(args, "fetch_trajectory_retry_times", -1)
        self._n = 0
        self._told_at = -math.inf

    def bear(self, why: str) -> None:
        """Raises StarvedError: this failure is one more than may be."""
        self._n += 1
        if -1 < self._borne < self._n:
            raise StarvedError(
                f"{self._url} failed {self._n} times in this rollout (the last: {why}); see the "
                "gateway's log, or raise --fetch-trajectory-retry-times"
            )
        if (now := time.monotonic()) - self._told_at >= WAITING_S:
            self._told_at = now
            log.warning(
                "%s failed %d times in this rollout (the last: %s); trying again, as "
                "--fetch-trajectory-retry-times is %d",
                self._url,
                self._n,
                why,
                self._borne,
            )


def _by_group(items: Sequence[dict[str, Any]], n: int) -> list[list[dict[str, Any]]]:
    """Items of an answer by instance, `n` to a group."""
    by_instance: dict[Any, list[dict[str, Any]]] = {}
    for item in items:
        by_instance.setdefault(item["instance_id"], []).append(item)
    for instance, own in by_instance.items():
        if len(own) % n:
            raise DataError(
                f"/get_rollout_data answered {len(own)} items of instance_id {instance!r}, but "
                f"n_samples_per_prompt is {n}; a buffer serves whole groups, and its "
                "transform_group keeps their size"
            )
    return [own[i : i + n] for own in by_instance.values() for i in range(0, len(own), n)]


def _samples(group: Sequence[Mapping[str, Any]], source: Any, masks: _Masks) -> list[Any]:
    """The samples of one group's items, numbered by the data source; fields that an older slime's
    `Sample` lacks are left out."""
    kind = sample_class()
    known = {f.name for f in fields(kind)}
    made = []
    group_index = getattr(source, "sample_group_index", 0)
    for item in group:
        if item["reward"] is None:
            raise DataError(
                f"item {item['uid']!r} of /get_rollout_data has no reward; missing is not 0: score "
                "it before it is served"
            )
        tokens, length, mask = masks.of(item)
        extra = item["extra_info"]
        cut = extra.get("finish_reason") == "length"
        named = ("uid", "raw_reward")
        given = {
            "group_index": group_index,
            "index": item["instance_id"],
            "rollout_id": source.sample_index,
            "prompt": item["uid"],
            "tokens": tokens,
            "response_length": length,
            "loss_mask": mask,
            "rollout_log_probs": item.get("rollout_log_probs"),
            "weight_versions": item.get("weight_versions") or [],
            "reward": item["reward"],
            "status": kind.Status.TRUNCATED if cut else kind.Status.COMPLETED,
            "truncated": cut,
            "label": extra.get("label"),
            # Another group of an instance goes by a name of its own, and says whose it is.
            "metadata": {
                "instance_id": item["instance_id"],
                **extra,
                **{name: item[name] for name in named if name in item},
            },
        }
        made.append(kind(**{name: value for name, value in given.items() if name in known}))
        source.sample_index += 1
    source.sample_group_index = group_index + 1
    return made


class _Masks:
    """Ids and loss masks of items: their own, or those of their messages (`--loss-mask-type`)."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def of(self, item: Mapping[str, Any]) -> tuple[list[int], int, list[int]]:
        """Return tokens, the length of the response and its mask, [response_length]."""
        if all(item.get(name) is not None for name in TOKENS):
            tokens, length, mask = (item[name] for name in TOKENS)
            return tokens, length, mask
        messages, tools = item["messages"], item.get("tools")
        try:
            tokens, mask = self._generator(messages, tools)
        except MaskError as e:
            raise DataError(
                f"item {item['uid']!r} of /get_rollout_data has no tokens, and its messages cannot "
                f"be tokenised: {e}"
            ) from e
        if 1 not in mask:
            raise DataError(
                f"item {item['uid']!r} of /get_rollout_data has no message with loss; leave it out"
            )
        length = len(mask) - mask.index(1)
        return tokens, length, mask[-length:]

    @cached_property
    def _generator(self) -> Callable[[Any, Any], tuple[list[int], list[int]]]:
        from transformers import AutoTokenizer

        if (model := getattr(self._args, "hf_checkpoint", None)) is None:
            raise ConfigError("items come without tokens; set --hf-checkpoint to tokenise them")
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
        name = getattr(self._args, "loss_mask_type", "qwen")
        if name in SLIMES_MASKS:
            return MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=name).get_loss_mask
        try:
            rows = mask_generator(name, tokenizer)
        except MaskError as e:
            raise ConfigError(f"loss_mask_type is {name!r}: {e}") from e

        def generate(messages: Any, tools: Any) -> tuple[list[int], list[int]]:
            row = rows(messages, tools)
            return row.token_ids.tolist(), row.loss_mask.tolist()

        return generate


def _read(answer: Any, url: str) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Items, `meta_info` and whether there are items."""
    try:
        items, info = answer["data"]["data"], answer["data"]["meta_info"]
        is_there = bool(answer["success"])
        lacking = next((i for i in items if not REQUIRED.issubset(i)), None) if is_there else None
    except (KeyError, TypeError) as e:
        raise ValueError(
            f"{url} answered {answer!r:.200}; a Rollout Buffer answers {{success, data: {{data: "
            "[item, …], meta_info: {…}}}"
        ) from e
    if lacking is not None:
        raise ValueError(
            f"{url} answered an item without {', '.join(sorted(REQUIRED - set(lacking)))}: "
            f"{lacking!r:.200}"
        )
    return items, info, is_there


def _log_function(args: Any) -> Callable[[Any, Sequence[Mapping[str, Any]], int], Any]:
    path = SlimeConfig.of(args).log_raw_info
    if path is None:
        return log_raw_info
    try:
        function: Callable[[Any, Sequence[Mapping[str, Any]], int], Any] = resolve(path)
    except ImportError as e:
        raise ConfigError(
            f"stepwell_log_raw_info is {path!r}, which cannot be imported ({e}); name a function "
            "(args, all_meta_info, rollout_id) as package.module:function"
        ) from e
    return function


def _buffer_url(args: Any) -> str:
    """Address of the Rollout Buffer, by the name that a slime has for it."""
    names = ("agent_rollout_buffer_url", "rollout_buffer_url")
    urls = [url for name in names if (url := getattr(args, name, None))]
    if not urls:
        raise ConfigError(
            "rollout_buffer_url is not set; give --agent-rollout-buffer-url (newer slimes: "
            "--rollout-buffer-url) the gateway's"
        )
    if len(set(urls)) > 1:
        raise ConfigError(
            f"agent_rollout_buffer_url is {urls[0]!r} and rollout_buffer_url {urls[1]!r}; they are "
            "two names of one address: set one"
        )
    return str(urls[0]).rstrip("/")


def _headers() -> dict[str, str]:
    key = os.environ.get("STEPWELL_ADMIN_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}
