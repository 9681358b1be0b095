"""Our rollout function in the slime of Agent Rollout's document (commit be675e6, July 2025), which
came before `slime.rollout.base_types`: `make test-slime` runs these tests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from stepwell.backends.slime.sample import sample_class
from stepwell.trainer.slime import buffer
from tests.backends.slime_itself import slime
from tests.documents.test_agent_rollout import write
from tests.gateway.conftest import QUICKSTART, worlds  # noqa: F401 - a fixture


def _is_there() -> bool:
    try:
        return importlib.util.find_spec("slime.rollout.agent_rollout") is not None
    except ImportError:
        return False


pytestmark = pytest.mark.skipif(not _is_there(), reason="make test-slime runs it, where slime is")


@pytest.fixture
def controller_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """slime's `Buffer`, which is controller and data buffer in one, in this process."""
    monkeypatch.setattr(buffer, "POLL_S", 0.05)

    def make(url: str, **given: Any) -> Any:
        args = Namespace(
            **{
                "agent_rollout_buffer_url": url,
                "rollout_function_path": "stepwell.trainer.slime.buffer.generate_rollout",
                "eval_function_path": "stepwell.trainer.slime.rollout.generate_rollout",
                "rollout_task_type": "external",
                "fetch_trajectory_retry_times": -1,
                "rollout_global_dataset": False,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 64,
                "rollout_temperature": 1.0,
                "rollout_top_p": 1.0,
                "num_epoch": 1,
                "sglang_router_ip": "127.0.0.1",
                "sglang_router_port": 1,
                "prompt_data": "prompts.jsonl",
                "hf_checkpoint": "model",
                "buffer_filter_path": None,
                "advantage_estimator": "grpo",
                "rewards_normalization": True,
                "grpo_std_normalization": True,
                "reward_key": None,
                "use_wandb": False,
                "debug_train_only": False,
                "load_debug_rollout_data": None,
                "save_debug_rollout_data": None,
                **given,
            }
        )
        return slime("ray.buffer").Buffer.__ray_metadata__.modified_class(args)

    return make


async def test_its_controller_trains_what_our_rollout_function_returns(
    worlds: Callable[..., Any],  # noqa: F811
    controller_of: Callable[..., Any],
) -> None:
    world = await worlds("chatml")
    controller = controller_of(world.url)
    for rollout_id in range(2):
        generating = asyncio.create_task(asyncio.to_thread(controller.generate, rollout_id))
        for n in (2 * rollout_id, 2 * rollout_id + 1):
            await write(world.url, n, f"id{n}", (0.0, 1.0))
        await generating
        data = controller.get_data(rollout_id)
        assert data["raw_reward"] == data["rewards"] == [0.0, 1.0, 0.0, 1.0]
        assert data["round_number"] == [1, 1, 1, 1]
        assert data["truncated"] == [0, 0, 0, 0]
        steps = [
            world.stored(f"{n}-{i}")[0]
            for n in (2 * rollout_id, 2 * rollout_id + 1)
            for i in (0, 1)
        ]
        assert data["tokens"] == [step.token_ids.tolist() for step in steps]
        assert data["loss_masks"] == [[1] * len(step.response_ids) for step in steps]
    assert controller.get_metadata() == {"0": ["id0", "id1"], "1": ["id2", "id3"]}
    assert controller.get_buffer_length() == 0
    assert sample_class() is slime("utils.types").Sample


async def test_its_own_rollout_function_reads_our_buffer_unchanged(
    worlds: Callable[..., Any],  # noqa: F811
    controller_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The document's `--rollout-function-path`, with its polling, its masks and its filter."""
    theirs = slime("rollout.agent_rollout")
    monkeypatch.setattr(theirs, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    # It was written for transformers 4, whose chat templates give lists of ids.
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    template = partial(tokenizer.apply_chat_template, return_dict=False)
    monkeypatch.setattr(tokenizer, "apply_chat_template", template)
    loads = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    monkeypatch.setattr(theirs, "AutoTokenizer", loads)
    world = await worlds("quickstart")
    controller = controller_of(
        world.url,
        rollout_function_path="slime.rollout.agent_rollout.generate_rollout",
        loss_mask_type="qwen",
        hf_checkpoint=str(QUICKSTART),
    )
    for n in (0, 1):
        await write(world.url, n, f"id{n}", (0.0, 1.0))
    await asyncio.to_thread(controller.generate, 0)
    data = controller.get_data(0)
    assert data["raw_reward"] == [0.0, 1.0, 0.0, 1.0]
    steps = [world.stored(f"{n}-{i}")[0] for n in (0, 1) for i in (0, 1)]
    for step, tokens, mask in zip(steps, data["tokens"], data["loss_masks"], strict=True):
        assert tokens[: step.n_tokens] == step.token_ids.tolist()
        # Its masks train the line break behind the close, too; ours end with the close.
        assert mask == [1] * (len(step.response_ids) + 1)
    assert controller.get_metadata() == {"0": ["id0", "id1"]}


def test_its_tool_gives_the_same_instance_ids_as_ours(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": "é"}, {"prompt": "b", "instance_id": "math_0"}, {"prompt": "c"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = []
    for module in (
        "slime_plugins.rollout_buffer.tools.assign_instance_id",
        "stepwell.gateway.slime_buffer.assign_instance_id",
    ):
        subprocess.run([sys.executable, "-m", module, "--input_path", str(data)], check=True)
        written.append((tmp_path / "data_processed.jsonl").read_bytes())
    assert written[0] == written[1]
