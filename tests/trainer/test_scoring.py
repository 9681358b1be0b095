"""The reward stage: what gets a reward, what is left out, and what is said of it."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from stepwell.datapool import DataPoolClient
from stepwell.datapool.types import SUPERSEDES, TRAIN, VAL, Group, Trajectory
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.config import (
    AdvantageConfig,
    DataConfig,
    JsonlSource,
    OverlongBufferConfig,
    RewardConfig,
    RolloutConfig,
)
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import RewardError
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.rollout.worker import COMPLETE
from stepwell.trainer.samples import read_samples, validation_samples, write_samples
from stepwell.trainer.scoring import EXTRA, GROUP_TOO_SMALL, NOT_CONFIGURED, Scorer
from tests.builders import step
from tests.trainer.small_run import RecordingBackend, small_config, small_run

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TASK = {
    "instance_id": "p1",
    "data_source": "sums",
    "question": "2 + 2 =",
    "answer": "4",
    "metadata": {"level": 3, "answer": "hidden"},
}
SIGNATURE = "(data_source, solution_str, ground_truth, extra_info, **kwargs)"


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def make(encode: Callable[[str], list[int]]) -> Callable[..., Group]:
    """A group whose trajectories end in the given answers; (answer, reward) is scored already."""

    def make(
        *answers: str | tuple[str, float], uid: str = "p1", n: int | None = None, **task: Any
    ) -> Group:
        trajectories = []
        for i, answer in enumerate(answers):
            text, reward = answer if isinstance(answer, tuple) else (answer, None)
            name = f"{uid}-t{i}"
            steps = tuple(
                step([1], encode(said), name, k, prompt_uid=uid, reward=r, finish_reason="stop")
                for k, (said, r) in enumerate([("call", None), (text, reward)])
            )
            trajectories.append(Trajectory(name, uid, steps))
        return Group(uid, tuple(trajectories), n, {"task": {**TASK, **task}})

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "reward.py"
        path.write_text(f"seen = []\ndef score{SIGNATURE}:\n    {body}\n")
        return f"{path}:score"

    return write


@asynccontextmanager
async def scoring(reward: Any, **config: Any) -> AsyncIterator[Scorer]:
    if reward is not None:
        reward = RewardConfig(function=reward, **config)
    scorer = Scorer(reward, MODEL)
    try:
        yield scorer
    finally:
        await scorer.aclose()


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[t.reward for t in g.trajectories] for g in groups]


async def test_what_the_agents_scored_is_left_as_it_is_and_the_rest_is_scored(make: Any) -> None:
    async with scoring("exact_match") as scorer:
        groups = await scorer.score([make(("4", 0.25), "4", "5")])
    assert rewards(groups) == [[0.25, 1.0, 0.0]]
    scored = groups[0].trajectories[1]
    assert [s.reward for s in scored.steps] == [None, 1.0]


async def test_a_reward_may_be_given_by_its_name_alone(make: Any) -> None:
    assert rewards(await Scorer("exact_match", MODEL).score([make("4")])) == [[1.0]]


async def test_the_function_gets_the_last_answer_and_all_that_is_known_of_the_rollout(
    make: Any, write: Any, encode: Any
) -> None:
    body = "return {'score': 1.0, 'seen': [data_source, solution_str, ground_truth, extra_info]}"
    async with scoring(write(body)) as scorer:
        (group,) = await scorer.score([make("four")])
    source, answer, truth, info = group.trajectories[0].metadata[EXTRA]["seen"]
    assert (source, answer, truth) == ("sums", "four", "4")
    assert info == {
        **TASK,
        "level": 3,  # of the metadata, where functions written for verl look for it
        "trajectory_uid": "p1-t0",
        "prompt_uid": "p1",
        "responses": ["call", "four"],
        "num_turns": 2,
        "response_length": len(encode("call")) + len(encode("four")),
        "truncated": False,
        "agent_reward": None,
        "tool_rewards": [],  # as verl's tool loop says them
        "turn_scores": [],
        "rollout_reward_scores": {},
    }


async def test_what_agent_and_tools_said_of_a_rollout_reaches_the_function(
    make: Any, write: Any
) -> None:
    group = make("4")
    said = {"tool_rewards": [0.5, 1], "note": "n", "level": 9, "question": "another"}
    group = replace(group, trajectories=(replace(group.trajectories[0], metadata=said),))
    async with scoring(write("return {'score': 1.0, 'seen': extra_info}")) as scorer:
        (scored,) = await scorer.score([group])
    info = scored.trajectories[0].metadata[EXTRA]["seen"]
    assert (info["tool_rewards"], info["note"], info["level"]) == ([0.5, 1], "n", 9)
    assert info["question"] == TASK["question"]  # what the task says is not the agent's to change


async def test_a_reward_per_step_stands_on_its_step(make: Any, write: Any) -> None:
    async with scoring(write("return [0.25, 1.0] if solution_str == '4' else [None, 0]")) as scorer:
        (group,) = await scorer.score([make("4", "5")])
    assert [[s.reward for s in t.steps] for t in group.trajectories] == [[0.25, 1.0], [None, 0.0]]
    assert rewards([group]) == [[1.25, 0.0]]


@pytest.mark.parametrize(
    ("credit", "of_first_step", "of_second_step"),
    [("step", 0.875, 0.375), ("trajectory", 0.75, 0.75)],
)
async def test_a_step_is_credited_with_what_came_after_it(
    make: Any, write: Any, credit: Any, of_first_step: float, of_second_step: float
) -> None:
    """Minus the mean of the group: returns to go (1.5, 1) beside (0, 0), or sums 1.5 beside 0."""
    async with scoring(write("return [0.5, 1] if solution_str == '4' else [0, 0]")) as scorer:
        groups = await scorer.score([make("4", "5")])
    config = AdvantageConfig(adv_estimator="dr_grpo", credit=credit)
    column = compute_advantages(groups, config).columns["advantages"].tolist()
    lengths = [len(s.response_ids) for s in groups[0].trajectories[0].steps]
    first, second = column[0], column[lengths[0]]
    assert (first, second) == (of_first_step, of_second_step)


async def test_without_a_reward_a_usual_data_set_is_scored_as_usual(make: Any) -> None:
    async with scoring(None) as scorer:
        groups = [
            make("#### 4", "4", ("4", 0.5), data_source="openai/gsm8k"),
            make("4", uid="p2", metadata={"rm_type": "exact_match"}),
            make("4", uid="p3"),
        ]
        assert rewards(await scorer.score(groups)) == [[1.0, 0.0, 0.5], [1.0]]
        assert scorer.unscored == {NOT_CONFIGURED: 1}


async def test_a_run_on_verls_rows_needs_no_reward_function(tmp_path: Path, encode: Any) -> None:
    """Rows as verl's examples/data_preprocess/gsm8k.py writes them; the agent scores nothing."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    keys = {"prompt_key": "prompt", "label_key": "reward_model.ground_truth"}
    source = {"kind": "jsonl", "path": str(tmp_path / "gsm8k.jsonl"), **keys}
    config = small_config(tmp_path, "trainer.total_steps=1", "rollout.reward=null")
    data = DataConfig.model_validate({"train": {**source, "metadata_key": "extra_info"}})

    def says(task: Any, index: int) -> dict[str, Any]:
        ids = encode(f"It is #### {3 + index}")
        return {"response_ids": ids, "rollout_log_probs": [-0.5] * len(ids)}

    async with small_run(
        config.model_copy(update={"data": data}), reward=lambda task, index: None, step=says
    ) as run:
        (record,) = await run.train()
    assert record["reward/mean"] == 0.5
    assert record["reward/missing"] == 0.0


async def test_a_data_set_that_no_rule_scores_is_refused_by_name(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with scoring(None) as scorer:
        assert await scorer.score([make("4", data_source="llava_v1_5_mix")]) == []
    assert "'llava_v1_5_mix': its answers are free text about images" in caplog.text


async def test_a_score_that_is_missing_takes_its_trajectory_out_with_a_reason(
    make: Any, write: Any
) -> None:
    async with scoring(write("return 1 / int(solution_str)")) as scorer:
        groups = await scorer.score([make("4", "0", "2", "5"), make("0", "0", uid="p2")], 2)
        assert rewards(groups) == [[0.25, 0.5, 0.2]]
        assert scorer.unscored == {"RewardCrashError": 3}
        assert scorer.metrics(groups) == {
            "reward/missing": 3.0,
            "reward/missing/RewardCrashError": 3.0,
        }


async def test_a_reward_that_fails_alike_on_many_is_logged_in_one_line(
    make: Any, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with scoring(write("return 1 / 0")) as scorer:
        await scorer.score([make("1", "2"), make("3", "4", uid="p2")])
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith("4 aborted (the first is p1-t0): ")


async def test_a_group_that_loses_too_many_is_not_trained(make: Any, write: Any) -> None:
    async with scoring(write("return 1 / int(solution_str)")) as scorer:
        assert await scorer.score([make("1", "0", n=2)], 2) == []
        assert scorer.unscored == {"RewardCrashError": 1, GROUP_TOO_SMALL: 1}
        assert rewards(await scorer.score([make("1", "0", n=2)])) == [[1.0]]  # an evaluation
        assert rewards(await scorer.score([make(("3", 3.0), uid="p3", n=1)], 2)) == [[3.0]]


ASKED: list[str] = []
NEXT_IS_SCORED = threading.Event()


def slow(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    ASKED.append(str(extra_info["prompt_uid"]))
    if len(set(ASKED)) > 2:  # two groups are a batch
        NEXT_IS_SCORED.set()
    return float(len(ASKED) % 2)


class Waiting(RecordingBackend):
    """Its first batch is trained until the next one is being scored."""

    def train_step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        assert self.updates or NEXT_IS_SCORED.wait(20), "scored while a batch is trained"
        return super().train_step(*args, **kwargs)


async def test_the_next_batch_is_scored_while_one_is_trained(tmp_path: Path) -> None:
    """verl's `launch_reward_fn_async`."""
    keys = (f"rollout.reward={__name__}:slow", "trainer.total_steps=2", "rollout.min_n=1")
    config = small_config(tmp_path, *keys)
    async with small_run(config, backend=Waiting(), reward=lambda task, index: None) as run:
        records = await run.train()
    assert len(records) == 2
    assert all(record["time/score_s"] >= 0 for record in records)


async def test_a_reward_that_never_works_stops_the_run_with_the_causes(
    make: Any, write: Any
) -> None:
    async with scoring(write("raise OSError('no disc')")) as scorer:
        for _ in range(2):
            assert await scorer.score([make("1")], 1) == []
        assert rewards(await scorer.score([make(("1", 1.0))], 1)) == [[1.0]]
        for _ in range(2):
            assert await scorer.score([make("1")], 1) == []
        with pytest.raises(RewardError, match=r"in 3 batches running .*5 × RewardCrashError"):
            await scorer.score([make("1")], 1)


async def test_a_few_tasks_without_a_score_end_no_run(make: Any, write: Any) -> None:
    """A batch of which one was lost is filled up with one at a time, and those may fail, too."""
    body = "return 1.0 if solution_str == '4' else int('no number')"
    async with scoring(write(body)) as scorer:
        assert len(await scorer.score([make("4", uid=f"p{i}") for i in range(8)], 1)) == 8
        for _ in range(7):
            assert await scorer.score([make("x")], 1) == []
        with pytest.raises(RewardError, match=r"in 8 batches running .*8 × RewardCrashError"):
            await scorer.score([make("x")], 1)


async def test_a_reply_that_nobody_saw_is_not_scored(make: Any, write: Any, encode: Any) -> None:
    """A try that its client had left was answered when the agent had ended."""
    body = "return {'score': 1.0, 'seen': [solution_str, extra_info['truncated']]}"
    asked = make("four")
    (trajectory,) = asked.trajectories
    late = step(
        [1],
        encode("five"),
        "p1-t0",
        2,
        prompt_uid="p1",
        finish_reason="length",
        metadata={SUPERSEDES: [2]},
    )
    asked = replace(asked, trajectories=(replace(trajectory, steps=(*trajectory.steps, late)),))
    most = OverlongBufferConfig(max_resp_len=len(encode("call")) + len(encode("four")) + 1, len=1)
    scorer = Scorer(write(body), MODEL, most)
    (group,) = await scorer.score([asked])
    await scorer.aclose()
    assert group.trajectories[0].metadata[EXTRA]["seen"] == ["four", False]
    assert group.trajectories[0].reward == 1.0  # it is not too long
    (row,) = validation_samples(
        [group], AutoTokenizer.from_pretrained(MODEL).decode, step=1, version=0
    )
    assert row["reply"] == "four"


@pytest.mark.parametrize(("branches", "scored"), [(("main",), "four"), (None, "a title")])
async def test_a_side_call_that_comes_last_is_not_scored_where_such_are_not_trained(
    make: Any, write: Any, encode: Any, tmp_path: Path, branches: Any, scored: str
) -> None:
    (trajectory,) = make("four").trajectories
    worked = [replace(s, metadata={"tool_calls": 1}) for s in trajectory.steps]
    title = step([9], encode("a title"), "p1-t0", 2, prompt_uid="p1", finish_reason="length")
    asked = replace(make(), trajectories=(replace(trajectory, steps=(*worked, title)),))
    body = "return {'score': 1.0, 'seen': [solution_str, extra_info['truncated']]}"
    scorer = Scorer(write(body), MODEL, branches=branches)
    (group,) = await scorer.score([asked])
    await scorer.aclose()
    assert group.trajectories[0].metadata[EXTRA]["seen"] == [scored, scored == "a title"]
    (tmp_path / "slimes.py").write_text(
        "def custom_rm(args, sample):\n"
        "    return {'score': 1.0, 'seen': [sample.response, sample.tokens, sample.status.value]}\n"
    )
    scorer = Scorer(f"{tmp_path / 'slimes.py'}:custom_rm", MODEL, branches=branches)
    (group,) = await scorer.score([asked])
    await scorer.aclose()
    ids, status = ([1], "completed") if branches else ([9], "truncated")
    assert group.trajectories[0].metadata[EXTRA]["seen"] == [
        scored,
        [*ids, *encode(scored)],
        status,
    ]


async def test_without_a_reward_the_unscored_are_counted_and_the_run_told(make: Any) -> None:
    async with scoring(None) as scorer:
        assert rewards(await scorer.score([make("4", ("4", 1.0))], 1)) == [[1.0]]
        assert scorer.unscored == {NOT_CONFIGURED: 1}
        for _ in range(2):
            assert await scorer.score([make("4")], 1) == []
        with pytest.raises(RewardError, match=r"set rollout\.reward"):
            await scorer.score([make("4")], 1)


async def test_the_further_keys_of_a_result_are_metrics(make: Any, write: Any) -> None:
    body = "return {'score': 0, 'acc': solution_str == '4', 'pred': solution_str, 'n': 2}"
    async with scoring(write(body)) as scorer:
        groups = await scorer.score([make("4", "5", "4", "4", ("4", 1.0))])
        assert groups[0].trajectories[0].metadata[EXTRA] == {"acc": True, "pred": "4", "n": 2}
        assert scorer.metrics(groups) == {
            "reward_extra/acc": 0.75,
            "reward_extra/n": 2.0,
            "reward/missing": 0.0,
        }


async def test_the_further_keys_may_be_numpys_or_what_json_has_no_form_for(
    make: Any, write: Any
) -> None:
    body = (
        "import numpy as np; return {'score': np.float32(1), 'acc': np.bool_(True), "
        "'n': np.int64(3), 'share': np.array(0.5), 'of': {(1, 2): {7}}, 'each': np.arange(2)}"
    )
    async with scoring(write(body)) as scorer:
        groups = await scorer.score([make("4")])
    said = groups[0].trajectories[0].metadata[EXTRA]
    assert said == {"acc": True, "n": 3, "share": 0.5, "of": {"(1, 2)": "{7}"}, "each": [0, 1]}
    assert json.loads(json.dumps(said)) == said
    assert scorer.metrics(groups) == {
        "reward_extra/acc": 1.0,
        "reward_extra/n": 3.0,
        "reward_extra/share": 0.5,
        "reward/missing": 0.0,
    }


async def test_what_a_reply_nests_ends_no_run(make: Any, write: Any, tmp_path: Path) -> None:
    body = "import json; return {'score': 0, 'read': json.loads('[' * 600 + '1' + ']' * 600)}"
    async with scoring(write(body)) as scorer:
        groups = await scorer.score([make("4")])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = validation_samples(groups, tokenizer.decode, step=1, version=0)
    write_samples(tmp_path / "step_1.jsonl", rows)
    ((row,), read) = read_samples(tmp_path / "step_1.jsonl"), groups[0].trajectories[0]
    inner: Any = row["reward_extra_info"]["read"]
    while isinstance(inner, list):
        (inner,) = inner
    assert inner.strip("[]") == "1"
    assert read.metadata[EXTRA] == row["reward_extra_info"]


async def test_keys_that_make_no_metric_end_no_run(make: Any, write: Any) -> None:
    """What a policy wrote may have a thousand digits."""
    body = "return {'score': 0, 'pred': 7 * 10 ** len(solution_str), 2: 0.5, 'acc': 1}"
    async with scoring(write(body)) as scorer:
        groups = await scorer.score([make("4" * 1000, "4")])
        assert scorer.metrics(groups) == {
            "reward_extra/2": 0.5,
            "reward_extra/acc": 1.0,
            "reward_extra/pred": 70.0,
            "reward/missing": 0.0,
        }


async def test_a_group_reward_sees_every_trajectory_and_scores_the_unscored(
    make: Any, write: Any
) -> None:
    body = "return [len(solution_str) + (i['agent_reward'] or 0) for i in extra_info]"
    async with scoring(write(body), manager="group") as scorer:
        groups = await scorer.score([make("a", ("b", 0.5), "c"), make(("d", 1.0), uid="p2")])
    assert rewards(groups) == [[3.0, 0.5, 3.0], [1.0]]


async def test_long_trajectories_are_fined_whoever_scored_them(make: Any, encode: Any) -> None:
    """Tokens of all steps count: call + 4 is half way into the buffer, a long one beyond."""
    short, length = len(encode("call")) + len(encode("4")), len(encode("call" + "4" * 40))
    buffer = OverlongBufferConfig(max_resp_len=short + 1, len=2)
    assert length > short + 1
    scorer = Scorer("exact_match", MODEL, buffer)
    groups = await scorer.score([make("4", ("4", 0.75), ("4" * 40, 0.75)), make(("4", 1.0))])
    assert rewards(groups) == [[0.5, 0.25, -0.25], [0.5]]
    assert scorer.metrics(groups)["reward_extra/overlong_reward"] == -2.5 / 4
    assert scorer.metrics(groups)["reward_extra/overlong"] == 1.0
    await scorer.aclose()


async def test_nobody_is_fined_for_a_missing_score(make: Any) -> None:
    scorer = Scorer(None, MODEL, OverlongBufferConfig(max_resp_len=1, len=1))
    (group,) = await scorer.score([make("4", ("4", 1.0))], min_rollouts=1)
    assert rewards([group]) == [[0.0]]
    assert scorer.metrics([group])["reward_extra/overlong"] == 1.0


def test_a_buffer_that_begins_below_no_tokens_is_refused() -> None:
    with pytest.raises(ValidationError, match="len smaller"):
        RolloutConfig.model_validate({"overlong_buffer": {"max_resp_len": 9, "len": 10}})


class Writer:
    """A worker whose rollouts say what they are told."""

    def __init__(self, pool: DataPoolClient, ids: list[int]) -> None:
        self._pool, self._ids = pool, ids

    async def run_group(
        self, task: Any, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        for i in range(n):
            uid = f"{prompt_uid}-{i}"
            await self._pool.submit_step(
                step([1], self._ids, uid, prompt_uid=prompt_uid, is_last=True), channel
            )
        return {COMPLETE: n}

    async def ready(self) -> None:
        return


async def test_a_task_with_numbers_and_text_that_only_python_has_reaches_the_reward(
    tmp_path: Path, write: Callable[[str], str], encode: Callable[[str], list[int]]
) -> None:
    """A data set in JSON may have any of both."""
    rows = [
        {"question": "?", "answer": 2**70, "metadata": {"n": 1}},
        {"question": "?", "answer": "4", "metadata": {"n": 2, "said": "\ud83d"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = PromptSource(JsonlSource(kind="jsonl", path=path))
    body = "return {'score': 1.0, 'seen': repr((data_source, ground_truth, extra_info['n']))}"
    async with DataPoolClient.local() as pool, scoring(write(body)) as scorer:
        config = RolloutConfig(agent="a:b")
        producer = Producer(config, source, pool, [Writer(pool, encode("4"))])
        uids = await producer.evaluate(source.all(), 1, VAL)
        lease = await pool.lease_batch(channel=VAL, batch_size=2)
        assert lease is not None
        scored = {g.prompt_uid: g for g in await scorer.score(lease.groups)}
    seen = [scored[uid].trajectories[0].metadata[EXTRA]["seen"] for uid in uids]
    assert seen == [repr(("rows", str(2**70), 1)), repr(("rows", "4", 2))]
