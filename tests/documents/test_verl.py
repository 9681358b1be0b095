"""The examples of verl's document (part 2: data, rollouts with tools, rewards, the loop), written
anew and run in its forms: classes, files, arguments, return values, endpoints. With verl's own
classes: `test_verl_itself.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import datasets
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from stepwell.backends.verl.backend import lay_out
from stepwell.backends.verl.rows import build
from stepwell.config.migration import find, known_as
from stepwell.trainer.config import CustomSource, ParquetSource, RewardConfig
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import DataError
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.tools import ToolAgent, ToolBox
from tests.gateway.conftest import worlds  # noqa: F401  # a fixture
from tests.helpers import serving_posts
from tests.trainer.rewards.sandbox_server import sandbox
from tests.trainer.small_run import small_config, small_run
from tests.trainer.test_rollout_samples import Tables

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
Worlds = Callable[..., Any]


# ── RLHFDataset: rows of Parquet ─────────────────────────────────────────────────────────────────

DATASET = '''
import copy
import os

import datasets
import torch
from omegaconf import ListConfig
from torch.utils.data import Dataset


class RLHFDataset(Dataset):
    """Of verl's form: options by `config.get`, prompts that are too long filtered, rows of tensors,
    and the prompt taken out of the row."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        if not isinstance(data_files, (list, ListConfig)):
            data_files = [data_files]
        self.data_files = copy.deepcopy(data_files)
        self.original_data_files = copy.deepcopy(data_files)
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.cache_dir = os.path.expanduser(config.get("cache_dir", "~/.cache/verl/rlhf"))
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key = config.get("image_key", "images")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self._read_files()

    def _read_files(self):
        loaded = [
            datasets.load_dataset("parquet", data_files=f)["train"] for f in self.data_files
        ]
        self.dataframe = datasets.concatenate_datasets(loaded)
        if self.filter_overlong_prompts:
            self.dataframe = self.dataframe.filter(
                lambda row: len(self._ids(row[self.prompt_key])) <= self.max_prompt_length
            )

    def _text(self, messages):
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def _ids(self, messages):
        return self.tokenizer.encode(self._text(messages), add_special_tokens=False)

    def __len__(self):
        return len(self.dataframe)

    def __getitem__(self, item):
        row = self.dataframe[item]
        messages = row.pop(self.prompt_key)
        ids, n = self._ids(messages), self.max_prompt_length
        if len(ids) > n:
            half = n // 2
            cut = {
                "left": ids[-n:],
                "right": ids[:n],
                "middle": ids[:half] + ids[-(n - half):],
            }
            if self.truncation == "error":
                raise RuntimeError(f"Prompt length {len(ids)} is longer than {n}.")
            ids = cut[self.truncation]
        padding = n - len(ids)
        row["input_ids"] = torch.tensor([0] * padding + ids)
        row["attention_mask"] = torch.tensor([0] * padding + [1] * len(ids))
        row["position_ids"] = (row["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        row["raw_prompt_ids"] = ids
        if self.return_raw_chat:
            row["raw_prompt"] = messages
        if self.return_full_prompt:
            row["full_prompts"] = self._text(messages)
        info = row.get("extra_info", {})
        row["index"] = info.get("index", 0)
        row["tools_kwargs"] = info.get("tools_kwargs", {})
        return row
'''


def parquet(folder: Path, *prompts: str) -> Path:
    """verl's rows of GSM8K, with arguments for a tool."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {
                "index": i,
                "split": "train",
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(i)}}},
            },
        }
        for i, prompt in enumerate(prompts)
    ]
    path = folder / "train.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PromptSource]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    module = tmp_path / "my_dataset.py"
    module.write_text(dedent(DATASET))

    def dataset(*prompts: str, **fields: Any) -> PromptSource:
        path = [parquet(tmp_path, *prompts)]
        config = {"kind": "custom", "cls": f"{module}:RLHFDataset", "path": path, "shuffle": False}
        source = CustomSource.model_validate({**config, **fields})
        return PromptSource(source, tokenizer_path=MODEL)

    return dataset


def test_the_printed_data_set_class_gives_tasks(dataset: Callable[..., PromptSource]) -> None:
    source = dataset("1 + 1 =", "2 + 2 =")
    task = source.next()
    assert task["messages"] == [{"role": "user", "content": "1 + 1 ="}]
    assert (task["data_source"], task["answer"]) == ("openai/gsm8k", "0")
    assert task["metadata"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "0"}}
    }
    again = dataset("1 + 1 =", "2 + 2 =")
    again.load_state_dict(source.state_dict())  # as a run that is resumed does
    assert again.next()["answer"] == "1"


def test_its_options_return_raw_chat_and_return_full_prompt(
    dataset: Callable[..., PromptSource],
) -> None:
    task = dataset(
        "1 + 1 =", returned_prompt_key="full_prompts", options={"return_full_prompt": True}
    ).next()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "user", "content": "1 + 1 ="}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert task["question"] == whole, "the prompt as text, for /v1/completions"
    with pytest.raises(DataError, match="no 'raw_prompt' and no 'prompt'; set returned_prompt_key"):
        dataset("1 + 1 =", options={"return_raw_chat": False})


LONG = "one two three four five six seven eight nine ten " * 4


def test_its_filter_leaves_out_what_is_too_long_and_its_error_is_told(
    dataset: Callable[..., PromptSource],
) -> None:
    assert len(dataset("1 + 1 =", LONG, max_prompt_tokens=40)) == 1
    with pytest.raises(DataError, match=r"row 0: RuntimeError: Prompt length .* is longer than 40"):
        dataset(LONG, max_prompt_tokens=40, filter_overlong_prompts=False)


@pytest.mark.parametrize(
    ("truncation", "begins", "ends"),
    [("left", False, True), ("right", True, False), ("middle", True, True)],
)
@pytest.mark.parametrize("kind", ["the class", "the file"])
def test_truncation_left_right_and_middle(
    dataset: Callable[..., PromptSource],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    truncation: str,
    begins: bool,
    ends: bool,
) -> None:
    limits: dict[str, Any] = {"max_prompt_tokens": 60, "filter_overlong_prompts": False}
    limits["truncation"] = truncation
    if kind == "the class":
        task = dataset(LONG, **limits).next()
    else:
        given = {"kind": "parquet", "path": parquet(tmp_path, LONG), "prompt_key": "prompt"}
        given |= {"label_key": "reward_model.ground_truth", "metadata_key": "extra_info"}
        source = ParquetSource.model_validate({**given, **limits})
        task = PromptSource(source, tokenizer_path=MODEL).next()
    (message,) = task["messages"]
    assert message["content"].startswith("one two") is begins
    assert message["content"].endswith("nine ten ") is ends
    assert task["truncated_tokens"] > 0
    assert f"1 of 1 prompts are cut to max_prompt_tokens = 60 (truncation: {truncation})" in (
        caplog.text
    )


def test_files_of_verls_rows_need_no_class(tmp_path: Path) -> None:
    source = ParquetSource(
        kind="parquet",
        path=parquet(tmp_path, "1 + 1 ="),
        prompt_key="prompt",
        label_key="reward_model.ground_truth",
        metadata_key="extra_info",
    )
    task = PromptSource(source).next()
    assert task["metadata"]["tools_kwargs"]["calc_gsm8k_reward"] == {
        "create_kwargs": {"ground_truth": "0"}
    }


# ── tools: _initialize_tools, tools_kwargs, the request's life ───────────────────────────────────

TOOLS = '''
class Gsm8kTool:
    """Of verl's form: (text, step reward, metrics)."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.truths, self.right, self.order = {}, {}, []

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id], self.right[instance_id] = ground_truth, 0.0
        self.order.append("create")
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        answer = str(parameters.get("answer", ""))
        right = float(answer == self.truths[instance_id])
        paid = 0.0 if right > self.right[instance_id] else -0.05
        self.right[instance_id] = right
        self.order.append("execute")
        return f"Current parsed {answer=} {right=}", paid, {"length": len(answer)}

    async def calc_reward(self, instance_id, **kwargs):
        self.order.append("calc_reward")
        return self.right[instance_id]

    async def release(self, instance_id, **kwargs):
        self.order.append("release")
        del self.truths[instance_id]
'''
TOOL_CONFIG = """
tools:
  - class_name: "{module}:Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Says whether an answer is right."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The answer, digits only"
          required: ["answer"]
"""


@pytest.fixture
def tool_config(tmp_path: Path) -> Path:
    module = tmp_path / "gsm8k_tool.py"
    module.write_text(dedent(TOOLS))
    path = tmp_path / "gsm8k_tool_config.yaml"
    path.write_text(TOOL_CONFIG.format(module=module))
    return path


def call(answer: str) -> str:
    arguments = json.dumps({"name": "calc_gsm8k_reward", "arguments": {"answer": answer}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def test_tools_come_from_verls_file_with_schema_and_name(tool_config: Path) -> None:
    box = ToolBox.from_yaml(tool_config)
    assert box.names == ["calc_gsm8k_reward"]
    whole = {"type": "function", "function": box.schemas[0]["function"]}
    assert box.schemas == [whole], "OpenAI's form"
    assert ToolBox([]).schemas == [], "no tool_config_path: no tools"


async def test_a_request_goes_through_its_tools_with_the_rows_arguments(
    worlds: Worlds,  # noqa: F811
    tool_config: Path,
    tmp_path: Path,
) -> None:
    """Multi-turn: create, execute (a step reward and metrics each), calc_reward, release; tokens of
    the assistant are trained, those of tool responses are not."""
    world = await worlds()
    for said in (call("5"), call("1"), "It is 1."):
        world.say(said)
    path = parquet(tmp_path, "0 + 0 =", "0 + 1 =")
    source = ParquetSource(
        kind="parquet",
        path=path,
        prompt_key="prompt",
        label_key="reward_model.ground_truth",
        metadata_key="extra_info",
    )
    task = PromptSource(source).all()[1]
    agent = cast(ToolAgent, load_agent(str(tool_config)))
    await agent(task, world.base_url("t", "p"), "none")
    tool = agent.tools._tools["calc_gsm8k_reward"]._tool  # type: ignore[attr-defined]
    assert tool.order == ["create", "execute", "execute", "calc_reward", "release"]
    await agent.aclose()
    await world.pool.complete_trajectory("t", 1.0)
    lease = await world.pool.lease_batch(1)
    assert lease is not None
    (trajectory,) = lease.groups[0].trajectories
    said = trajectory.metadata
    assert said["tool_rewards"] == [-0.05, 0.0]
    assert said["rollout_reward_scores"] == {"calc_gsm8k_reward": 1.0}
    assert said["tool_metrics"] == {"calc_gsm8k_reward": [{"length": 1}, {"length": 1}]}

    # As tokens: one row of all turns, whose loss mask is 0 where tools speak.
    layout = lay_out(build(trajectory.steps))
    columns = {name: column[0] for name, column in layout.tensors.items()}
    ids, mask = columns["responses"], columns["response_mask"].bool()
    trained, between = (world.tokenizer.decode(ids[m].tolist()) for m in (mask, ~mask))
    assert trained.count("calc_gsm8k_reward") == 2
    assert "It is 1." in trained
    assert "Current parsed" not in trained
    assert "Current parsed answer='5' right=0.0" in between
    assert columns["input_ids"].tolist() == [*columns["prompts"].tolist(), *ids.tolist()]
    assert columns["position_ids"].tolist() == list(range(len(columns["input_ids"])))
    assert columns["rm_scores"].sum() == 1.0


async def test_a_request_waits_for_its_own_tool_alone(
    worlds: Worlds,  # noqa: F811
) -> None:
    """Async rollout: a slow tool of one request holds up no other one."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        """Takes its time."""
        asked.set()
        await go_on.wait()
        return "done"

    world = await worlds()
    world.say('<tool_call>\n{"name": "slow", "arguments": {}}\n</tool_call>')
    agent = ToolAgent([slow])
    first = asyncio.create_task(agent.run({"question": "a"}, world.base_url("t1", "p"), "none"))
    await asked.wait()
    second = await agent.run({"question": "b"}, world.base_url("t2", "p"), "none")
    assert (second.answer, first.done()) == ("fine", False)
    go_on.set()
    assert (await first).calls == {"slow": 1}
    await agent.aclose()


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────

REWARDS = '''
import time


def my_custom_reward(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The basic form; kwargs are those of the configuration."""
    right = solution_str.strip() == ground_truth
    return float(right) if right else kwargs["threshold"] - kwargs["penalty_factor"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("\\\\boxed" in solution_str)


def advanced(data_source, solution_str, ground_truth, extra_info=None,
             threshold=0.8, penalty_factor=0.5):
    right = float(solution_str.strip().lower() == ground_truth.strip().lower())
    form = 1.0 if data_source != "openai/gsm8k" or "\\\\boxed" in solution_str else 0.5
    score = right * 0.6 + form * 0.2 + 1.0 * 0.2
    return score * penalty_factor if score < threshold else score


def detailed(data_source, solution_str, ground_truth, extra_info=None):
    accuracy = float(solution_str == ground_truth)
    return {
        "score": accuracy * 0.7 + 0.3,
        "accuracy": accuracy,
        "format_score": 1.0,
        "logic_score": 1.0,
        "detailed_feedback": f"wanted {ground_truth}",
    }


def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]


def async_code_execution_reward(data_source, solution_str, ground_truth, extra_info=None):
    """Runs a loop of its own, as the document's does."""
    import asyncio

    import aiohttp

    async def execute_code(code):
        async with aiohttp.ClientSession() as session:
            async with session.post(
                extra_info["url"] + "/execute",
                json={"code": code, "test_cases": extra_info.get("test_cases", [])},
            ) as response:
                result = await response.json()
                return result["passed_tests"] / result["total_tests"]

    loop = asyncio.get_event_loop()
    return loop.run_until_complete(execute_code(solution_str))


def hybrid(data_source, solution_str, ground_truth, extra_info=None):
    rule = float(solution_str == ground_truth)
    weights = {"rule": 0.4, "model": 0.4, "human": 0.2}
    return (
        rule * weights["rule"]
        + extra_info.get("model_score", 0.0) * weights["model"]
        + extra_info.get("human_score", 0.0) * weights["human"]
    )


def debug(data_source, solution_str, ground_truth, extra_info=None):
    print(f"[DEBUG] Data source: {data_source}")
    print(f"[DEBUG] Extra info: {extra_info['index']}")
    return 1.0


def monitored(data_source, solution_str, ground_truth, extra_info=None):
    began = time.time()
    score = float(len(solution_str))
    print(f"[PERF] Reward computation time: {time.time() - began:.4f}s")
    return score


def robust(data_source, solution_str, ground_truth, extra_info=None):
    try:
        if not solution_str or not ground_truth:
            print("[WARNING] Invalid input")
            return 0.0
        return 1.0 / int(solution_str)
    except Exception as e:
        print(f"[ERROR] Reward computation failed: {e}")
        return 0.0
'''
"""`custom_reward_function.path` of the document; `name` is behind the colon here."""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "custom_reward.py"
    path.write_text(dedent(REWARDS))
    return path


async def scores(
    config: dict[str, Any], *answers: str, source: str = "mine", truth: Any = "42", **info: Any
) -> list[Any]:
    manager = RewardManager(RewardConfig.model_validate(config))
    try:
        return await manager.score(
            [RewardSample(source, answer, truth, {"index": 3, **info}) for answer in answers]
        )
    finally:
        await manager.aclose()


MANAGERS = ("naive", "prime", "dapo", "auto")


@pytest.mark.parametrize("manager", MANAGERS)
async def test_a_custom_reward_by_path_name_and_reward_kwargs(rewards: Path, manager: str) -> None:
    """custom_reward_function: {path, name, reward_kwargs}; reward_model.reward_manager."""
    config = {
        "function": f"{rewards}:my_custom_reward",
        "kwargs": {"threshold": 0.8, "penalty_factor": 0.5},
        "manager": manager,
    }
    right, wrong = await scores(config, "42", "41")
    assert (right.score, wrong.score) == (1.0, pytest.approx(0.3))


async def test_a_file_without_a_name_is_its_compute_score(rewards: Path) -> None:
    (boxed, plain) = await scores({"function": str(rewards)}, r"\boxed{42}", "42")
    assert (boxed.score, plain.score) == (1.0, 0.0)


async def test_a_reward_with_defaults_takes_those_of_the_configuration(rewards: Path) -> None:
    config: dict[str, Any] = {"function": f"{rewards}:advanced"}
    right, wrong = await scores(config, "42", "41", source="openai/gsm8k")
    assert (right.score, wrong.score) == (pytest.approx(0.9), pytest.approx(0.15))
    config["kwargs"] = {"threshold": 0.2, "penalty_factor": 0.1}
    (wrong,) = await scores(config, "41", source="openai/gsm8k")
    assert wrong.score == pytest.approx(0.3)


async def test_a_dict_is_a_score_and_metrics(rewards: Path) -> None:
    (result,) = await scores({"function": f"{rewards}:detailed"}, "42")
    assert isinstance(result, RewardResult)
    assert result.score == pytest.approx(1.0)
    assert result.extra == {
        "accuracy": 1.0,
        "format_score": 1.0,
        "logic_score": 1.0,
        "detailed_feedback": "wanted 42",
    }


async def test_the_batch_manager_gives_lists(rewards: Path) -> None:
    config = {"function": f"{rewards}:batch", "manager": "batch"}
    assert [r.score for r in await scores(config, "42", "41")] == [1.0, 0.0]


@pytest.mark.parametrize("manager", ["naive", "prime", "auto"])
async def test_a_reward_that_runs_its_own_loop_asks_a_server(rewards: Path, manager: str) -> None:
    """The example of `launch_reward_fn_async`: a service at /execute."""
    asked = []

    async def execute(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"passed_tests": 3, "total_tests": 4})

    async with serving_posts("/execute", execute) as url:
        config = {"function": f"{rewards}:async_code_execution_reward", "manager": manager}
        results = await scores(config, "print(1)", "print(2)", url=url, test_cases=["a"])
    assert [r.score for r in results] == [0.75, 0.75]
    assert sorted(a["code"] for a in asked) == ["print(1)", "print(2)"]
    assert asked[0]["test_cases"] == ["a"]


async def test_sandbox_fusion_runs_code_by_its_url_and_max_concurrent() -> None:
    """reward_model.sandbox_fusion: {url, max_concurrent}; no function is named."""
    truth = {"inputs": ["3\n"], "outputs": ["6"]}
    async with sandbox() as server:
        config = {"sandbox_fusion": {"url": server.url, "max_concurrent": 64}}
        answer = "```python\nprint(int(input()) * 2)\n```"
        (right,) = await scores(config, answer, source="codecontests", truth=truth)
    assert right.score == 1.0
    assert server.bodies[0]["stdin"] == "3\n"


async def test_a_hybrid_of_rule_model_and_human_scores(rewards: Path) -> None:
    config = {"function": f"{rewards}:hybrid"}
    (score,) = await scores(config, "42", model_score=0.5, human_score=1.0)
    assert score.score == pytest.approx(0.4 + 0.2 + 0.2)


async def test_what_a_reward_prints_is_printed(
    rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await scores({"function": f"{rewards}:debug"}, "42")
    (measured,) = await scores({"function": f"{rewards}:monitored"}, "42")
    out = capsys.readouterr().out
    assert "[DEBUG] Data source: mine\n[DEBUG] Extra info: 3\n[PERF] Reward computation" in out
    assert measured.score == 2.0


async def test_a_reward_that_handles_its_errors_is_taken_at_its_word(
    rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = await scores({"function": f"{rewards}:robust"}, "4", "", "no number")
    assert [r.score for r in results] == [0.25, 0.0, 0.0]
    out = capsys.readouterr().out
    assert "[WARNING] Invalid input" in out
    assert "[ERROR] Reward computation failed" in out


USUAL = [
    ("openai/gsm8k", "#### 42", "42", 1.0),
    ("openai/gsm8k", "42", "42", 0.0),
    ("hendrycks_math", r"so \boxed{42}", "42", 1.0),
    ("hiyouga/geometry3k", r"<think>so</think>\boxed{42}", "42", 1.0),
    ("mbpp", "def f(): return 42", ["assert f() == 42"], 1.0),
    (
        "humaneval",
        "def f(): return 42",
        {"test": "def check(f):\n    assert f() == 42", "entry_point": "f"},
        1.0,
    ),
]


@pytest.mark.parametrize(("source", "answer", "truth", "score"), USUAL)
async def test_a_data_source_of_the_document_has_its_reward(
    source: str, answer: str, truth: Any, score: float
) -> None:
    (result,) = await scores({}, answer, source=source, truth=truth)
    assert result.score == score


async def test_a_data_source_that_no_rule_scores_is_refused_by_name() -> None:
    (missing,) = await scores({}, "4", source="llava_v1_5_mix")
    assert "'llava_v1_5_mix': its answers are free text" in str(missing)


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_loop_validates_trains_dumps_and_reports(tmp_path: Path, rewards: Path) -> None:
    """RayPPOTrainer.fit: val_before_train, test_freq, rollout_data_dir with reward_extra_infos,
    training/global_step and training/epoch."""
    config = small_config(
        tmp_path,
        f"rollout.reward={rewards}:detailed",
        "trainer.rollout_samples=null",
        "validation.every=1",
        "trainer.total_steps=2",
        "logging.names=verl",
    )
    async with small_run(config, reward=lambda task, index: None) as run:
        before = await run.trainer.evaluate(run.val_tasks)
        records = await run.train()
    assert [e.step for e in before] == [0]
    assert {e.step for e in run.evaluations} >= {1}
    dumped = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in dumped} == {1, 2}
    for row in dumped:
        assert row["reward"] == pytest.approx(0.3)
        assert row["reward_extra_info"]["detailed_feedback"] == f"wanted {row['answer']}"
        assert {"prompt", "response"} <= row.keys()

    from stepwell.track.verl_names import VerlNames

    shown: dict[str, Any] = {}
    tracker = Tables()
    tracker.write = lambda step, record: shown.update(record)  # type: ignore[method-assign]
    VerlNames(tracker, config).write(2, records[-1])
    assert shown["training/global_step"] == 2
    assert shown["training/epoch"] == 0
    assert shown["critic/score/mean"] == pytest.approx(0.3)
    assert shown["training/rollout_probs_diff_mean"] >= 0
    assert shown["training/rollout_probs_diff_max"] >= shown["training/rollout_probs_diff_mean"]


# ── names ────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = [
    "data.train_files",
    "data.cache_dir",
    "data.prompt_key",
    "data.image_key",
    "data.video_key",
    "data.max_prompt_length",
    "data.return_raw_chat",
    "data.return_full_prompt",
    "data.truncation",
    "data.filter_overlong_prompts",
    "data.filter_overlong_prompts_workers",
    "data.use_shm",
    "data.chat_template_func",
    "data.need_tools_kwargs",
    "data.filter_prompts",
    "data.custom_cls.path",
    "data.custom_cls.name",
    "data.reward_fn_key",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.total_epochs",
    "trainer.profile_steps",
    "trainer.balance_batch",
    "trainer.critic_warmup",
    "trainer.rollout_data_dir",
    "trainer.test_freq",
    "trainer.save_freq",
    "algorithm.adv_estimator",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.norm_adv_by_std_in_grpo",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.multi_turn.enable",
    "actor_rollout_ref.rollout.multi_turn.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.val_kwargs.top_k",
    "actor_rollout_ref.rollout.val_kwargs.top_p",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.actor.loss_agg_mode",
    "reward_model.launch_reward_fn_async",
    "reward_model.reward_manager",
    "reward_model.sandbox_fusion.url",
    "reward_model.sandbox_fusion.max_concurrent",
    "custom_reward_function.path",
    "custom_reward_function.name",
    "custom_reward_function.reward_kwargs",
]
"""Every option that the document names."""


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_the_document_is_answered(option: str) -> None:
    """With the key of ours, or with the reason why there is none."""
    (row,) = find("verl", option)
    assert row.ours or len(row.note) > 15
    assert known_as(option) == row.text
