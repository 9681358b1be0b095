# ruff: noqa: E402  # the platform is chosen before verl is imported
"""verl's own classes of its document take the same inputs here and give the same outputs:
`make test-verl`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="make test-verl runs it, where verl is")

from tests.backends.verl_cpu import use_cpu

use_cpu()

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.reward_score import default_compute_score
from verl.utils.torch_functional import postprocess_data
from verl.workers.reward_manager import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
)

from stepwell.backends.verl.backend import VerlBackend
from stepwell.datapool.types import Group, Step, Trajectory
from stepwell.trainer.config import CustomSource, ParquetSource, RewardConfig, Truncation
from stepwell.trainer.data import PromptSource
from stepwell.trainer.data.prompt_length import PromptMeter
from stepwell.trainer.rewards.base import RewardSample
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.scoring import EXTRA, Scorer
from stepwell.trainer.tools import ToolBox
from tests.trainer.rewards.sandbox_server import SandboxServer, sandbox
from tests.trainer.test_tools import calls

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
VERL = "verl.utils.dataset.rl_dataset:RLHFDataset"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """verl's rows of GSM8K, of several lengths."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("HOME", str(tmp_path))
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{'add one, ' * i}and say it."}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {
                "index": i,
                "tools_kwargs": {"count": {"create_kwargs": {"start": i}}},
            },
        }
        for i in range(12)
    ]
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(table).to_parquet(path)
    return path


KEYS: dict[str, Any] = {
    "prompt_key": "prompt",
    "label_key": "reward_model.ground_truth",
    "metadata_key": "extra_info",
    "shuffle": False,
}


@pytest.mark.parametrize("limit", [None, 40])
def test_rlhf_dataset_gives_the_tasks_that_our_reader_gives(rows: Path, limit: int | None) -> None:
    """The same rows are too long, and the rest have the same messages, truths and extra_info."""
    fields = {**KEYS, "max_prompt_tokens": limit}
    mine = PromptSource(
        ParquetSource.model_validate({"kind": "parquet", "path": rows, **fields}),
        tokenizer_path=MODEL,
    )
    custom = {"kind": "custom", "cls": VERL, "path": [rows], "options": {"use_shm": False}}
    theirs = PromptSource(CustomSource.model_validate({**custom, **fields}), tokenizer_path=MODEL)
    told = [[{**t, "instance_id": None} for t in source.all()] for source in (mine, theirs)]
    assert told[0] == told[1]
    assert (len(told[0]) == 12) is (limit is None)
    assert told[0]


def test_a_batch_of_it_is_a_data_proto_whose_prompts_are_our_tasks(rows: Path) -> None:
    """DataLoader, collate_fn, DataProto.from_single_dict and pop, as the document's data flow."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = OmegaConf.create({"max_prompt_length": 512, "prompt_key": "prompt"})
    data = RLHFDataset(data_files=[str(rows)], tokenizer=tokenizer, config=config)
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate_fn, drop_last=True)
    batch = DataProto.from_single_dict(next(iter(loader)))
    generation = batch.pop(batch_keys=["dummy_tensor"], non_tensor_batch_keys=["raw_prompt"])
    source = ParquetSource.model_validate({"kind": "parquet", "path": rows, **KEYS})
    tasks = PromptSource(source).all()[:4]
    assert [*generation.non_tensor_batch["raw_prompt"]] == [t["messages"] for t in tasks]
    assert [*batch.non_tensor_batch["tools_kwargs"]] == [
        t["metadata"]["tools_kwargs"] for t in tasks
    ]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [5, 6, 11])
def test_a_bare_prompt_is_cut_to_the_tokens_that_verl_keeps(side: Truncation, limit: int) -> None:
    """A bare prompt has no chat template; the markup of one stays whole here, and verl cuts it."""
    meter = PromptMeter(MODEL, {})
    meter._tokenizer.chat_template = None
    text = "0123456789 abc def ghi"
    ids = meter._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kept, _ = postprocess_data(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_length=limit,
        pad_token_id=0,
        left_pad=True,
        truncation=side,
    )
    cut = meter.truncate({"question": text}, limit, side)
    assert cut["truncated_tokens"] == ids.shape[1] - limit
    assert cut["question"] == meter._tokenizer.decode(kept[0])


# ── tools ────────────────────────────────────────────────────────────────────────────────────────


class Count(BaseTool):  # type: ignore[misc]
    """A tool as users of verl 0.9 write one: state by instance, create_kwargs, a ToolResponse."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.values: dict[str, int] = {}

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        made, response = await super().create(instance_id)
        self.values[made] = kwargs.get("create_kwargs", {}).get("start", 0)
        return made, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        by = int(parameters.get("by", 0))
        self.values[instance_id] += by
        return ToolResponse(text=f"now {self.values[instance_id]}"), by / 10, {"by": by}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.values[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.values[instance_id]


FILE = f"""
tools:
  - class_name: {__name__}.Count
    config: {{ type: native, limit: "${{oc.env:LIMIT}}" }}
    tool_schema:
      type: function
      function:
        name: count
        description: Counts.
        parameters:
          type: object
          properties: {{ by: {{ type: string, description: how far }} }}
          required: [by]
"""


async def test_a_tool_of_verls_base_class_says_the_same_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT", "3")
    path = tmp_path / "tools.yaml"
    path.write_text(FILE)
    (theirs,) = initialize_tools_from_config(str(path))
    box = ToolBox.from_yaml(path)
    schema = theirs.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert box.schemas == [schema]

    kwargs = {"create_kwargs": {"start": 5}}
    instance, _ = await theirs.create(**kwargs)
    response, reward, metrics = await theirs.execute(instance, {"by": "2"})
    total = await theirs.calc_reward(instance)
    await theirs.release(instance)

    async with box.session({"tools_kwargs": {"count": kwargs}}) as tools:
        (message,) = await tools.call(calls(("count", {"by": "2"})))
        assert message["content"] == response.text == "now 7"
        assert tools.step_rewards == [reward]
        assert tools.metrics == {"count": [metrics]}
        assert await tools.rewards() == {"count": total}
    assert box._tools["count"]._tool.config == theirs.config  # type: ignore[attr-defined]


async def test_verls_base_class_itself_is_a_tool(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(
        FILE.replace(f"{__name__}.Count", "verl.tools.base_tool.BaseTool").replace(
            ', limit: "${oc.env:LIMIT}"', ""
        )
    )
    async with ToolBox.from_yaml(path).session() as tools:
        (message,) = await tools.call(calls(("count", {})))
    assert message["content"] == "Updated the tool state."


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────


async def our_scores(*samples: RewardSample, **config: Any) -> list[float]:
    manager = RewardManager(RewardConfig.model_validate(config))
    try:
        return [result.score for result in await manager.score(samples)]  # type: ignore[union-attr]
    finally:
        await manager.aclose()


CASES = [
    *(("openai/gsm8k", said, "18") for said in ("#### 18", "#### 1,8", "18", "#### 17 #### 18")),
    *(("lighteval/MATH", said, "7") for said in (r"so \boxed{7}", "so 7", r"\boxed{8}")),
    *(("math_dapo", said, "34") for said in ("Answer: 34", "34", "Answer: 35")),
    ("searchR1_nq", "<answer>The Beatles.</answer>", {"target": ["beatles"]}),
    ("searchR1_nq", "<answer>Queen</answer>", {"target": ["beatles"]}),
]


async def test_data_sources_are_scored_as_by_verl() -> None:
    theirs = []
    for source, said, truth in CASES:
        result = default_compute_score(source, said, truth)
        theirs.append(float(result["score"] if isinstance(result, dict) else result))
    assert await our_scores(*(RewardSample(*case, {}) for case in CASES)) == theirs


def detailed(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """The document's dict: a score, parts of it, and a text."""
    accuracy = float(solution_str == ground_truth)
    return {
        "score": accuracy * 0.7 + 0.3,
        "accuracy": accuracy,
        "detailed_feedback": f"{data_source} {extra_info['index']}: wanted {ground_truth}",
    }


def batch(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[str],
    extra_infos: list[Any],
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """The same, of verl's batch manager."""
    return [*map(detailed, data_sources, solution_strs, ground_truths, extra_infos)]


@pytest.mark.parametrize(
    ("name", "theirs", "function"),
    [
        ("naive", NaiveRewardManager, "detailed"),
        ("dapo", DAPORewardManager, "detailed"),
        ("batch", BatchRewardManager, "batch"),
    ],
)
async def test_reward_managers_pay_and_say_what_verls_do(
    name: str, theirs: Any, function: str
) -> None:
    """The same trajectories, as our groups and as the DataProto that is made of them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trajectories = [
        Trajectory(
            f"t{i}",
            "p",
            (
                Step(
                    prompt_ids=np.array([1, 2], np.int32),
                    response_ids=np.array(tokenizer.encode(said), np.int32),
                    rollout_log_probs=np.full(len(tokenizer.encode(said)), -0.5, np.float32),
                    trajectory_uid=f"t{i}",
                    prompt_uid="p",
                    step_index=0,
                    finish_reason="stop",
                ),
            ),
        )
        for i, said in enumerate(("42", "forty-two", "41"))
    ]
    task = {"data_source": "mine", "question": "6 * 7 =", "answer": "42", "metadata": {"index": 3}}
    group = Group("p", tuple(trajectories), 3, {"task": task})
    data = VerlBackend().convert_groups([group])
    manager = theirs(tokenizer=tokenizer, num_examine=1, compute_score=globals()[function])
    told = manager(data, return_dict=True)

    config = RewardConfig.model_validate({"function": f"{__file__}:{function}", "manager": name})
    scorer = Scorer(config, MODEL)
    (scored,) = await scorer.score([group])
    await scorer.aclose()
    assert [t.reward for t in scored.trajectories] == pytest.approx(
        told["reward_tensor"].sum(-1).tolist()
    )
    for i, trajectory in enumerate(scored.trajectories):
        for key, value in trajectory.metadata[EXTRA].items():
            assert told["reward_extra_info"][key][i] == value


PROGRAMS = [
    "```python\nprint(int(input()) * 2)\n```",
    "```python\nprint(4)\n```",
    "```python\nimport sys\nsys.exit(1)\n```",
    "```python\nraise ValueError\n```",
]


@contextmanager
def serving() -> Iterator[SandboxServer]:
    """A server in a thread of its own: verl's client blocks."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    servers: list[SandboxServer] = []
    ended = asyncio.Event()

    async def serve() -> None:
        async with sandbox() as server:
            servers.append(server)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def test_a_sandbox_pays_what_verls_client_of_it_pays() -> None:
    """verl asks the whole URL; the same server, the same requests but for the programs."""
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}
    with serving() as server:
        places = threading.Semaphore(4)
        theirs = [
            default_compute_score(
                "codecontests",
                said,
                json.dumps(tests),
                sandbox_fusion_url=f"{server.url}/run_code",
                concurrent_semaphore=places,
                memory_limit_mb=1024,
            )
            for said in PROGRAMS
        ]
        asked = server.bodies[0]
        server.bodies.clear()
        samples = [RewardSample("codecontests", said, tests, {}) for said in PROGRAMS]
        ours = await our_scores(*samples, sandbox_fusion=f"{server.url}/run_code")
    assert ours == pytest.approx(theirs)
    assert theirs[0] == 1.0
    mine = server.bodies[0]
    assert {k: v for k, v in mine.items() if k not in ("code", "stdin")} == {
        k: v for k, v in asked.items() if k not in ("code", "stdin")
    }
