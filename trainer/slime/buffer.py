"""slime's rollout function over the HTTP of a Rollout Buffer, for slime runs that share no Ray
cluster with the pool.

    --rollout-function-path          stepwell.trainer.slime.buffer.generate_rollout
    --data-source-path               slime's own (with a buffer), or
                                     stepwell.trainer.slime.data_source.RolloutDataSourceWithBuffer
    --rollout-buffer-url             http://gateway:8100
    --rollout-task-type              chat
    --fetch-trajectory-retry-times   3      failures in a row that are borne; -1: any number
    --custom-reward-post-process-path stepwell.backends.slime.backend.post_process_rewards

    generate(7) ─first time─► POST /start_rollout     skip_instance_ids: of finished groups, which
                                                      the data source saves as its metadata
                ─until enough─► POST /get_rollout_data   a group at a time ──► the data source
                ◄── samples: the tokens as they were sampled; log-probs, if they have any

The form is that of slime's `rollout_buffer_example.py` and of `generate_agent_rollout` before it
(THUDM/slime, slime_plugins/rollout_buffer). Differences: nothing is tokenised again, no group is
thrown away, and what cannot be fetched is an error. An agent's side branches are not trained, and
counted: `rollout.py` trains them, and loses nothing in a crash.

With keys, the gateway's admin key is read from the environment variable STEPWELL_ADMIN_KEY.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import aiohttp

from stepwell.backends.slime.sample import sample_class
from stepwell.backends.slime.samples import settle_log_probs
from stepwell.trainer.errors import ConfigError, DataError, StarvedError
from stepwell.trainer.slime.rollout import check_arguments, output

log = logging.getLogger(__name__)

POLL_S = 1.0
REQUEST_S = 600.0
"""An answer may hold many groups."""
REQUIRED = ("instance_id", "reward", "tokens", "response_length", "loss_mask", "extra_info")

_started: WeakSet[Any] = WeakSet()
"""Data sources whose rollout was started: slime calls a function and keeps the source, and a run
that is resumed, with a source of its own, starts anew."""


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """For slime's `--rollout-function-path`: `generate_agent_rollout`, waited for."""
    return asyncio.run(generate_agent_rollout(args, rollout_id, data_buffer, evaluation))


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> Any:
    """`rollout_batch_size` groups of samples, and the metrics of what was fetched for them.

    Args:
        args: slime's.
        data_buffer: slime's data source with a buffer.

    Returns:
        slime's `RolloutFnTrainOutput`.

    Raises:
        ConfigError: arguments that do not fit, or that the buffer refuses.
        StarvedError: the buffer failed too often, or its rollout ended before there was enough.
        DataError: items that are no Stepwell gateway's.
        BatchError: see `settle_log_probs`.
    """
    if evaluation:
        raise ConfigError(
            "evaluation is not what a rollout buffer is for; set --eval-function-path to slime's "
            "own, or to stepwell.trainer.slime.rollout.generate_rollout"
        )
    check_arguments(args)
    if not (url := getattr(args, "rollout_buffer_url", None)):
        raise ConfigError("rollout_buffer_url is not set; give --rollout-buffer-url the gateway's")
    key = os.environ.get("STEPWELL_ADMIN_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    infos: list[Mapping[str, Any]] = []
    branches = 0
    async with aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=REQUEST_S)
    ) as http:
        buffer = _Buffer(http, url, getattr(args, "fetch_trajectory_retry_times", -1))
        if data_buffer not in _started:
            await buffer.ask("/start_rollout", start_payload(args, data_buffer.get_metadata()))
            _started.add(data_buffer)
        while (missing := args.rollout_batch_size - data_buffer.get_buffer_length()) > 0:
            items, info = await buffer.next_group(missing)
            # At once: the buffer has given it away for good.
            data_buffer.add_samples([_samples(items, data_buffer)])
            infos.append(info)
            branches += sum(sum(b["loss_mask"]) for i in items for b in i.get("branches") or ())
            finished = [name for each in infos for name in each.get("finished_groups", ())]
            data_buffer.update_metadata({str(rollout_id): finished})
    samples: list[list[Any]] = data_buffer.get_samples(args.rollout_batch_size)
    flat = [sample for group in samples for sample in group]
    without = sum(sample.rollout_log_probs is None for sample in flat)
    metrics = {
        **_metrics(infos),
        "stepwell/samples_without_log_probs": without,
        "stepwell/untrained_tokens/no_log_probs": settle_log_probs(args, flat),
        "stepwell/untrained_tokens/branches": branches,
    }
    return output("TrainOutput", samples, metrics)


def start_payload(args: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `/start_rollout` is sent: slime's fields.

    Args:
        metadata: of the data source; its lists are the instances of finished groups, by rollout.
    """
    host = getattr(args, "sglang_router_ip", None)
    engine = {"remote_engine_url": f"http://{host}:{args.sglang_router_port}"} if host else {}
    finished = [each for value in metadata.values() if isinstance(value, list) for each in value]
    return {
        **engine,
        "num_process": str(getattr(args, "rollout_num_process", 100)),
        "num_epoch": str(getattr(args, "num_epoch", None) or 3),
        "remote_buffer_url": args.rollout_buffer_url,
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


class _Buffer:
    """A Rollout Buffer's HTTP. `retries`: failures in a row that are borne; -1: any number."""

    def __init__(self, http: aiohttp.ClientSession, url: str, retries: int) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._retries = retries

    async def next_group(self, missing: int) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """The items of the next group, waited for, and the `meta_info` of the answer.

        Args:
            missing: groups that are waited for, this one included.

        Raises:
            StarvedError: none will come.
        """
        while True:
            answer = await self.ask("/get_rollout_data", {"num": 1})
            data, info = answer["data"]["data"], answer["data"]["meta_info"]
            if answer["success"]:
                return data, info
            if info.get("generator") in ("finished", "stopped"):
                raise StarvedError(
                    f"the rollout at {self._url} is {info['generator']}, and {missing} groups are "
                    "missing; raise --num-epoch, or start it again"
                )
            await asyncio.sleep(POLL_S)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a POST.

        Raises:
            ConfigError: it is refused, which no repetition mends.
            StarvedError: it failed once more than may be.
        """
        failures = 0
        while True:
            try:
                async with self._http.post(self._url + path, json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    why = f"{response.status}: {(await response.text())[:500]}"
                    if response.status < 429:
                        raise ConfigError(f"{self._url}{path} answered {why}")
            except (aiohttp.ClientError, TimeoutError) as e:
                why = f"{type(e).__name__}: {e}"
            failures += 1
            if -1 < self._retries < failures:
                raise StarvedError(
                    f"{self._url}{path} failed {failures} times in a row (the last: {why}); see "
                    "the gateway's log, or raise --fetch-trajectory-retry-times"
                )
            log.warning("%s%s failed (%s); trying again", self._url, path, why)
            await asyncio.sleep(POLL_S)


def _samples(group: Sequence[Mapping[str, Any]], source: Any) -> list[Any]:
    """The samples of one group's items; the data source numbers them."""
    made = []
    for item in group:
        if missing := [name for name in REQUIRED if item.get(name) is None]:
            raise DataError(
                f"an item of /get_rollout_data has no {missing[0]}; --rollout-buffer-url is to "
                "name a Stepwell gateway, which serves tokens and rewards"
            )
        kind = sample_class()
        extra = item["extra_info"]
        cut = extra.get("finish_reason") == "length"
        named = ("uid", "instance_id", "raw_reward")
        made.append(
            kind(
                group_index=source.sample_group_index,
                index=source.sample_index,
                tokens=item["tokens"],
                response_length=item["response_length"],
                loss_mask=item["loss_mask"],
                rollout_log_probs=item.get("rollout_log_probs"),
                weight_versions=item.get("weight_versions") or [],
                reward=item["reward"],
                status=kind.Status.TRUNCATED if cut else kind.Status.COMPLETED,
                label=extra.get("label"),
                metadata={**extra, **{name: item[name] for name in named if name in item}},
            )
        )
        source.sample_index += 1
    source.sample_group_index += 1
    return made


def _metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """slime's `rollout/no_filter/…`, of all that the buffer told of."""
    total = sum(info.get("total_samples", 0) for info in infos)
    rewards = sum(info.get("avg_reward", 0) * info.get("total_samples", 0) for info in infos)
    dropped: Mapping[str, int] = infos[-1].get("dropped_groups", {}) if infos else {}
    return {
        "rollout/no_filter/total_samples": total,
        **({"rollout/no_filter/avg_reward": rewards / total} if total else {}),
        **{f"stepwell/dropped_groups/{why}": n for why, n in dropped.items()},
    }
