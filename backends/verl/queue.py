"""Rows for verl's V1 trainers, which take them from a TransferQueue.

A V1 trainer's `ReplayBuffer` samples whole prompts: the key `{uid}` says that a prompt's rollouts
are done, and its rows lie under `{uid}_{session}_{output}`, unpadded::

    key              tag                                                 fields
    p7_0_0           status success, lengths, min/max_global_steps       prompts, responses, …
    p7_0_1           …                                                   (another branch of 0)
    p7_1_0
    p7               is_prompt, status finished, global_steps            none

The rows are put first, so that a prompt is sampled with all of them or not at all, and putting them
again (a redelivered lease) changes nothing. verl's step s samples with the weights that step s - 1
left, whose version is s - 1 if engines are told verl's `global_steps` as the version: a group's
`global_steps` is its oldest version + 1, and verl's staleness limits hold.

Owns: names, tags, fields. Does not own: what a row holds (`verl/rows.py`), TransferQueue.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.verl.backend import REMEDY, require_verl
from stepwell.backends.verl.rows import VerlRow

NAMED_OTHERWISE = {"__num_turns__": "num_turns"}
TAGGED = ("min_global_steps", "max_global_steps")


@dataclass(frozen=True, slots=True)
class QueueRows:
    """Content of a partition; lists are parallel."""

    keys: list[str]
    tags: list[dict[str, Any]]
    fields: list[dict[str, Any]]
    prompts: dict[str, dict[str, Any]]
    """uid -> the tag that makes its rows sampleable."""


def queue_uid(prompt_uid: str) -> str:
    """`prompt_uid` without `_`, which verl splits its keys at; different ones stay different."""
    return prompt_uid.replace("%", "%25").replace("_", "%5F")


def queue_rows(rows: Sequence[VerlRow]) -> QueueRows:
    """The rows of whole groups as entries of a TransferQueue; needs neither verl nor the queue.

    Raises:
        BatchError: rows of several temperatures: a V1 trainer scores all of them at its own.
    """
    temperatures = sorted({row.temperature for row in rows})
    if len(temperatures) > 1:
        raise BatchError(
            f"the rows were sampled at temperatures {temperatures}; verl's V1 trainers score all "
            "at rollout.temperature: sample at that one"
        )
    found = QueueRows([], [], [], {})
    oldest: dict[str, int] = {}
    for row in rows:
        uid = queue_uid(row.fields["uid"])
        first = row.fields["min_global_steps"] + 1
        oldest[uid] = min(first, oldest.get(uid, first))
    for row in rows:
        uid = queue_uid(row.fields["uid"])
        versions = {name: row.fields[name] for name in TAGGED}
        prompt_len, response_len = len(row.prompts), len(row.columns["responses"])
        found.keys.append(f"{uid}_{row.fields['session_id']}_{row.fields['output_index']}")
        found.tags.append(
            {
                "status": "success",
                "prompt_len": prompt_len,
                "response_len": response_len,
                "seq_len": prompt_len + response_len,
                "global_steps": oldest[uid],
                **versions,
            }
        )
        plain = {NAMED_OTHERWISE.get(k, k): v for k, v in row.fields.items() if k not in TAGGED}
        fields: dict[str, Any] = {
            "multi_modal_inputs": row.multi_modal_inputs or {},
            **plain,
            **row.columns,
            "uid": uid,
            "prompts": row.prompts,
            "loss_mask": row.columns["response_mask"],
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "global_steps": oldest[uid],
            "extra_fields": {**versions, "reward_extra_info": {}},
        }
        if row.routed_experts is not None:
            fields["routed_experts"] = row.routed_experts
        found.fields.append(fields)
        found.prompts[uid] = {
            "is_prompt": True,
            "status": "finished",
            "global_steps": oldest[uid],
        }
    return found


async def put(rows: Sequence[VerlRow], partition_id: str = "train") -> list[str]:
    """Put whole groups into the TransferQueue that `transfer_queue.init()` has joined.

    Returns:
        The keys of the rows.

    Raises:
        BackendConfigError: verl or TransferQueue is not installed.
        BatchError: as `queue_rows`.
    """
    require_verl()
    if importlib.util.find_spec("transfer_queue") is None:
        raise BackendConfigError(f"TransferQueue is not installed: {REMEDY}")
    import transfer_queue
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    entries = queue_rows(rows)
    await transfer_queue.async_kv_batch_put(
        keys=entries.keys,
        partition_id=partition_id,
        fields=list_of_dict_to_tensordict(entries.fields),
        tags=entries.tags,
    )
    await transfer_queue.async_kv_batch_put(
        keys=list(entries.prompts),
        partition_id=partition_id,
        tags=list(entries.prompts.values()),
    )
    return entries.keys
