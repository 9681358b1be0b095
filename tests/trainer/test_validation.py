"""Validation runs beside training, on one policy version, and its figures are what they say."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.types import VAL, Group
from stepwell.trainer.config import OverlongBufferConfig
from stepwell.trainer.errors import StarvedError
from stepwell.trainer.rewards.overlong import OVERLONG
from stepwell.trainer.samples import (
    VALIDATION_TABLE_COLUMNS,
    evaluation_table,
    question,
    read_samples,
    samples_path,
    validation_samples,
    write_samples,
)
from stepwell.trainer.scoring import EXTRA, Scorer
from stepwell.trainer.validation import (
    Evaluation,
    figures,
    interval,
    pass_at_k,
    powers_of_two,
)
from tests.builders import group, step, until
from tests.trainer.small_run import RecordingBackend, small_config, small_run

# ── figures ──────────────────────────────────────────────────────────────────────────────────────


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@given(n=st.integers(1, 30), k=st.integers(1, 30), p=st.floats(0, 1))
def test_pass_at_k_is_unbiased(n: int, k: int, p: float) -> None:
    k = min(n, k)
    expected = math.fsum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 0), (2, 1, 3)])
def test_pass_at_k_of_what_cannot_be_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c} passes in {n} rollouts"):
        pass_at_k(n, c, k)


def test_pass_at_k_is_exact_where_floats_would_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_k_are_the_powers_of_two_and_n(n: int, ks: list[int]) -> None:
    assert powers_of_two(n) == ks


def evaluated(uid: str, source: str | None, *rewards: float | None, **task: Any) -> Group:
    """A task of a data source whose rollouts were given these rewards."""
    metadata = {"task": {"instance_id": uid, "data_source": source, **task}}
    rollouts = [
        [step([1], [2, i + 3], f"{uid}.{i}", prompt_uid=uid, reward=reward)]
        for i, reward in enumerate(rewards)
    ]
    return group(*rollouts, uid=uid, n_rollouts=len(rewards), metadata=metadata)


def test_figures_are_means_over_prompts_of_each_data_source() -> None:
    groups = [
        evaluated("a", "math", 1.0, 0.0, 0.0, 0.0),
        evaluated("b", "math", 1.0, 1.0, 1.0, 1.0),
        evaluated("c", "code", 0.5, 0.5, 0.5, 0.5),
    ]
    assert figures(groups, 4, pass_reward=1.0) == {
        "val/code/mean@4": 0.5,
        "val/code/pass@1": 0.0,
        "val/code/pass@2": 0.0,
        "val/code/pass@4": 0.0,
        "val/code/truncated_ratio": 0.0,
        "val/math/mean@4": 0.625,
        "val/math/pass@1": 0.625,
        "val/math/pass@2": 0.75,
        "val/math/pass@4": 1.0,
        "val/math/truncated_ratio": 0.0,
    }
    assert figures(groups, 4, pass_reward=0.5)["val/code/pass@1"] == 1.0


async def test_a_right_answer_that_was_punished_for_its_length_passes() -> None:
    overlong = OverlongBufferConfig(max_resp_len=10, len=9)
    scorer = Scorer(None, Path("no tokenizer is needed"), overlong)
    scored = await scorer.score([evaluated("a", "math", 1.0, 0.0)])
    found = figures(scored, 2, pass_reward=1.0)
    assert found["val/math/pass@1"] == 0.5
    assert found["val/math/mean@2"] < 0.5


@pytest.mark.parametrize("own", [None, "long", 0.5])
def test_what_a_reward_function_says_under_that_key_is_no_error(own: object) -> None:
    (rollout,) = (scored := evaluated("a", "math", 1.0)).trajectories
    metadata = {EXTRA: {OVERLONG: own}}
    told = replace(scored, trajectories=(replace(rollout, metadata=metadata),))
    assert "val/math/pass@1" in figures([told], 1, pass_reward=1.0)


@pytest.mark.parametrize(
    ("prompts", "low", "high"),
    [
        # Wilson, as statsmodels' proportion_confint(…, method="wilson") has it.
        ([[1.0]] * 8 + [[0.0]] * 2, 0.490, 0.943),
        ([[1.0]] * 30, 0.886, 1.0),
        ([[0.0]] * 5, 0.0, 0.434),
        # Student: 2.5 ± 2.776 · 1.118 / √5 …
        ([[1.0], [2.0], [2.5], [3.0], [4.0]], 1.112, 3.888),
    ],
)
def test_an_interval_is_that_of_the_books(
    prompts: list[list[float]], low: float, high: float
) -> None:
    assert interval(prompts) == pytest.approx((low, high), abs=0.012)


def test_rollouts_of_one_prompt_make_an_interval_no_narrower() -> None:
    alike = interval([[r] * 8 for r in (0.0, 1.0, 1.0, 0.0, 1.0, 0.0)])
    single = interval([[r] for r in (0.0, 1.0, 1.0, 0.0, 1.0, 0.0)])
    assert alike is not None
    assert single is not None
    assert alike[1] - alike[0] > 0.9 * (single[1] - single[0])
    assert interval([[0.0, 1.0] * 50, [1.0] * 50, [0.0]]) is None, "of three prompts"


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=4))
def test_an_interval_holds_its_mean(prompts: list[list[float]]) -> None:
    found = interval(prompts)
    rewards = [r for of in prompts for r in of]
    assert found is not None
    assert found[0] - 1e-9 <= sum(rewards) / len(rewards) <= found[1] + 1e-9


def test_a_rollout_that_failed_is_missing_and_not_zero() -> None:
    groups = [
        evaluated("a", "math", 1.0),
        evaluated("b", "math", 0.0, 1.0),
        evaluated("c", "math", None),
    ]
    result = figures(groups, 2, pass_reward=1.0)
    assert result["val/math/mean@2"] == 0.75
    assert result["val/math/pass@1"] == 0.75
    assert result["val/math/pass@2"] == 1.0  # of the one prompt that two rollouts finished
    assert result["val/math/short"] == 1.0


# ── sample tables ────────────────────────────────────────────────────────────────────────────────


def test_a_sample_has_the_question_the_answer_the_reply_and_the_reward(tmp_path: Path) -> None:
    rows = validation_samples(
        [evaluated("a", "math", 1.0, 0.25, question="1+1?", answer="2")],
        lambda ids, skip_special_tokens: f"said {ids.tolist()}",
        step=20,
        version=10,
    )
    write_samples(samples_path(tmp_path, 20), rows)
    assert read_samples(tmp_path / "validation" / "step_20.jsonl") == rows
    assert read_samples(tmp_path / "validation" / "step_20.jsonl", limit=1) == rows[:1]
    assert rows[0].keys() == {*VALIDATION_TABLE_COLUMNS, "reward_extra_info", "prompt_uid", "user"}
    assert [(r["question"], r["answer"], r["reply"], r["reward"]) for r in rows] == [
        ("1+1?", "2", "said [2, 3]", 1.0),
        ("1+1?", "2", "said [2, 4]", 0.25),
    ]
    assert rows[0]["step"] == 20
    assert rows[0]["version"] == 10


def test_a_sample_has_what_the_reward_function_said_beside_the_score() -> None:
    """verl's `reward_extra_infos`."""
    extra = {"accuracy": 1.0, "feedback": "well done"}
    one = evaluated("a", "math", 1.0)
    told = replace(one.trajectories[0], metadata={"reward_extra_info": extra})
    [row] = validation_samples(
        [replace(one, trajectories=(told,))],
        lambda ids, skip_special_tokens: "",
        step=1,
        version=0,
    )
    assert row["reward_extra_info"] == extra


def test_a_sample_keeps_what_json_has_no_form_for_as_text(tmp_path: Path) -> None:
    write_samples(tmp_path / "step_1.jsonl", [{"answer": {1: Path("a")}}])
    assert read_samples(tmp_path / "step_1.jsonl") == [{"answer": {"1": "a"}}]


def test_a_sample_keeps_numbers_and_text_that_only_python_has(tmp_path: Path) -> None:
    """An answer of a data set in JSON may have any number of digits, and a reward may say so."""
    large = 2**70
    row = {"answer": [large, -large, 2**64 - 1], "reward_extra_info": {"said \ud83d": large}}
    write_samples(tmp_path / "step_1.jsonl", [row, {"answer": 1}])
    (found, other) = read_samples(tmp_path / "step_1.jsonl")
    assert found["answer"] == [str(large), str(-large), 2**64 - 1]
    assert found["reward_extra_info"] == {"said ?": str(large)}
    assert other == {"answer": 1}


def test_a_sample_keeps_keys_that_json_does_not_know_as_text(tmp_path: Path) -> None:
    """Such as those of a Counter of pairs, or of NumPy's numbers."""
    said = {("a", "\ud83d"): 1, np.int64(3): {(1,): 2}, 2**70: None, None: 1.5}
    write_samples(tmp_path / "step_1.jsonl", [{"reward_extra_info": said}])
    (found,) = read_samples(tmp_path / "step_1.jsonl")
    assert found["reward_extra_info"] == {
        "('a', '\\ud83d')": 1,
        "3": {"(1,)": 2},
        str(2**70): None,
        "null": 1.5,
    }


class NoText:
    def __str__(self) -> str:
        return self.text


def test_a_sample_is_written_whatever_a_reward_has_said(tmp_path: Path) -> None:
    """Python writes no integer of more than 4300 digits."""
    longest = 10**5000
    extra = {"n": longest, "of": NoText()}
    done = group((step([1], [2], reward=1.0),))
    (trajectory,) = done.trajectories
    said = replace(trajectory, metadata={"reward_extra_info": extra})
    scored = replace(done, trajectories=(said,))
    rows = validation_samples([scored], lambda ids, **_: "a", step=1, version=0)
    write_samples(tmp_path / "step_1.jsonl", rows)
    (found,) = read_samples(tmp_path / "step_1.jsonl")
    assert found["reward_extra_info"] == {"n": hex(longest), "of": ""}


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ({"question": "why?"}, "why?"),
        (
            {
                "messages": [
                    {"role": "user", "content": "first"},
                    {"role": "assistant", "content": "yes"},
                    {"role": "user", "content": [{"type": "text", "text": "last"}, {"type": "x"}]},
                    {"role": "assistant", "content": "no"},
                ]
            },
            "last",
        ),
        ({}, ""),
    ],
)
def test_the_question_is_that_of_the_task_or_its_last_user_message(
    task: dict[str, Any], asked: str
) -> None:
    assert question(task) == asked


# ── beside training ──────────────────────────────────────────────────────────────────────────────


class Validation:
    """Validation rollouts that end when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    def hold(self, task: Any, channel: str) -> asyncio.Event | None:
        return self.may_end if channel == VAL else None


EVERY_2 = ("validation.every=2", "trainer.total_steps=8", "validation.n=2")


async def test_training_goes_on_and_the_next_publication_waits_for_the_evaluation(
    tmp_path: Path,
) -> None:
    validation = Validation()
    async with small_run(small_config(tmp_path, *EVERY_2), hold=validation.hold) as run:
        training = asyncio.create_task(run.train(7))
        await run.trained(4)  # 2 updates while it runs; at 4 the next evaluation is due
        assert run.engine.version == 2
        assert run.evaluations == []
        validation.may_end.set()
        await training
        assert run.trainer.progress.published[3] == 4  # what was due at 3 and at 4, once
    first, second, third = run.evaluations
    assert [e.step for e in run.evaluations] == [2, 4, 6]
    assert (first.version, first.weights_step) == (2, 2)
    assert (second.version, second.weights_step) == (3, 4)
    assert [e.mixed for e in (first, second, third)] == [0, 0, 0]
    assert [e.rollouts for e in (first, second, third)] == [6, 6, 6]
    assert first.score == 0.5
    assert [r["policy_version"] for r in run.records][1:4] == [2, 2, 2]
    assert run.trainer.progress.evaluations == run.evaluations


async def test_the_figures_of_an_evaluation_are_its_own_and_in_no_other_steps_record(
    tmp_path: Path,
) -> None:
    async with small_run(small_config(tmp_path, *EVERY_2)) as run:
        await run.train(4)
        figures = run.evaluations[0].as_metrics()
    assert not [k for record in run.records for k in record if k.startswith("val/")]
    assert (figures["val/step"], figures["val/version"]) == (2.0, 2.0)
    assert figures["val/val/mean@2"] == figures["val/score"] == 0.5
    assert figures["val/val/pass@2"] == 1.0
    assert figures["val/reward/max"] == 1.0
    assert figures["val/response_length/mean"] == 2.0
    assert not [k for k in figures if k.startswith("val/reward/") and k.endswith("/mean")]
    table = read_samples(samples_path(tmp_path, 2))
    assert [r["question"] for r in table[::2]] == ["val 0?", "val 1?", "val 2?"]
    assert {r["version"] for r in table} == {2}


async def test_samples_that_cannot_be_written_end_no_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "validation").write_text("in the way")
    async with small_run(small_config(tmp_path, *EVERY_2)) as run:
        (evaluation,) = await run.trainer.evaluate(run.val_tasks)
    assert evaluation.score == 0.5
    assert "the samples of the evaluation at step 0 are not written" in caplog.text


@pytest.mark.parametrize("content", [None, b'{"answer":"2","digest":"0123456789abcdef"}\n'])
def test_a_table_that_cannot_be_read_is_left_out_of_the_trackers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "validation").mkdir()
        samples_path(tmp_path, 3).write_bytes(content)
    assert evaluation_table(tmp_path, 3) == []
    assert "the table of the evaluation at step 3 is left out" in caplog.text
    assert str(samples_path(tmp_path, 3)) in caplog.text


class Gated(RecordingBackend):
    """Its fourth update takes until the publication that waited for an evaluation waits for it."""

    def __init__(self, validation: Validation) -> None:
        super().__init__()
        self._validation = validation
        self._loop = asyncio.get_running_loop()
        self.saved: list[int] = []
        """Updates in the weights of each version."""

    def save_weights(self, path: str | Path) -> None:
        self.saved.append(self.updates)
        super().save_weights(path)

    def train_step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.updates == 3:
            self._loop.call_soon_threadsafe(self._validation.may_end.set)
            time.sleep(0.5)  # the evaluation ends, and the publication queues for this thread
        return super().train_step(*args, **kwargs)


async def test_a_version_that_is_published_during_an_update_is_of_the_updates_it_contains(
    tmp_path: Path,
) -> None:
    """Also while the engines' memory is lent: then the trainer goes on only after the write."""
    lends = ("engine.release_memory=true", "cluster.placement=colocated")
    pauses = ("async_training.partial_rollout=true",)
    validation = Validation()
    config = small_config(tmp_path, *EVERY_2, *lends, *pauses)
    backend = Gated(validation)
    async with small_run(config, hold=validation.hold, backend=backend) as run:
        await run.train(6)
        published = run.trainer.progress.published
    assert list(published.values()) == [0, *backend.saved]
    assert published[3] == 4


async def test_an_evaluation_of_which_nothing_is_pinned_has_no_score_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A roll-back, which waits for nobody, can come in an evaluation's first moment."""
    async with small_run(small_config(tmp_path, "validation.n=2")) as run:

        def hold(task: Any, channel: str) -> None:
            run.engine.version = 1

        run.rollouts.hold = hold
        with caplog.at_level(logging.WARNING, "stepwell.trainer.validation"):
            assert await run.trainer.evaluate(run.val_tasks) == []
    assert "no evaluation at step 0" in caplog.text


async def test_where_generation_waits_for_publications_so_does_the_trainer(tmp_path: Path) -> None:
    validation = Validation()
    config = small_config(
        tmp_path,
        *EVERY_2,
        "async_training.mode=sync",
        "async_training.trigger_parameter_sync_step=2",
    )
    async with small_run(config, hold=validation.hold) as run:
        publisher: Any = run.trainer.publisher
        publish, due = publisher.publish, asyncio.Event()

        async def note() -> None:
            if run.trainer.progress.updates == 4:
                due.set()
            await publish()

        publisher.publish = note
        training = asyncio.create_task(run.train(5))
        await run.trained(3)  # within the window it goes on; the publication at 4 has to wait
        either = [asyncio.ensure_future(due.wait()), asyncio.ensure_future(run.engine.serves(2))]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        assert run.engine.version == 1
        validation.may_end.set()
        await training
        await asyncio.gather(*either)
    assert [e.version for e in run.evaluations] == [1, 2]
    assert [e.mixed for e in run.evaluations] == [0, 0]
    assert run.trainer.progress.published == {0: 0, 1: 2, 2: 4}


async def test_a_rollout_with_a_token_of_another_version_does_not_count(tmp_path: Path) -> None:
    """However it came about: an engine that somebody else updated, say."""
    async with small_run(small_config(tmp_path, "validation.n=2")) as run:

        def hold(task: Any, channel: str) -> None:
            run.engine.version = 1 if task["instance_id"] == "val2" else 0

        run.rollouts.hold = hold
        (evaluation,) = await run.trainer.evaluate(run.val_tasks)
    assert (evaluation.rollouts, evaluation.mixed, evaluation.failed) == (4, 2, 0)


async def test_an_evaluation_of_which_nothing_finished_says_where_to_look(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path), reward=lambda task, index: None) as run:
        with pytest.raises(StarvedError, match="none of 6 evaluation rollouts finished"):
            await run.trainer.evaluate(run.val_tasks)


async def test_an_evaluation_of_which_nothing_was_scored_says_what_the_reward_does(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.py").write_text("def score(*given):\n    raise KeyError('answer')\n")
    reward = f"rollout.reward={tmp_path / 'broken.py'}:score"
    async with small_run(small_config(tmp_path, reward), reward=lambda task, index: None) as run:
        said = r"^without a score: 6 × .*; the last: .*KeyError at .*broken.py:2.*Look into .*/logs"
        with pytest.raises(StarvedError, match=said):
            await run.trainer.evaluate(run.val_tasks)


async def test_an_evaluation_that_fails_beside_training_fails_the_training(tmp_path: Path) -> None:
    def reward(task: Any, index: int) -> float | None:
        return None if task["instance_id"].startswith("val") else float(index)

    async with small_run(small_config(tmp_path, *EVERY_2), reward=reward) as run:
        with pytest.raises(StarvedError, match="none of 6 evaluation rollouts finished"):
            await run.train(8)


async def test_an_evaluation_beside_training_that_nothing_finished_of_is_begun_again(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    def reward(task: Any, index: int) -> float | None:
        if task["instance_id"].startswith("val"):
            asked.append(task["instance_id"])
            return None if len(asked) <= 6 else 1.0
        return float(index)

    async with small_run(small_config(tmp_path, *EVERY_2), reward=reward) as run:
        await run.train(3)
    assert len(asked) == 12
    assert [(e.step, e.version, e.score) for e in run.evaluations] == [(2, 2, 1.0)]


async def test_beside_training_an_evaluation_takes_half_of_the_slots(tmp_path: Path) -> None:
    validation = Validation()
    config = small_config(tmp_path, *EVERY_2, "rollout.concurrency=8", val=20)
    async with small_run(config, hold=validation.hold) as run:
        await run.trainer.begin_evaluation(run.val_tasks)
        for _ in range(500):
            await asyncio.sleep(0)
        assert run.rollouts.running[VAL] == 2  # groups of two rollouts: 4 of 8 slots
        validation.may_end.set()
        await run.trainer.validator.join()
        assert run.rollouts.most_running[VAL] == 2

        validation.may_end.clear()
        evaluating = asyncio.create_task(run.trainer.evaluate(run.val_tasks))
        await until(lambda: run.rollouts.running[VAL] >= 20)
        validation.may_end.set()
        await evaluating


async def test_what_others_put_into_the_channel_is_no_part_of_an_evaluation(
    tmp_path: Path,
) -> None:
    async with small_run(small_config(tmp_path)) as run:
        await run.pool.open_group("theirs", 4, channel=VAL)
        await run.rollouts.run_group({"instance_id": "x"}, "theirs", 4, VAL)
        (evaluation,) = await run.trainer.evaluate(run.val_tasks)
    assert evaluation.rollouts == 6
    assert evaluation.score == 0.5  # theirs are 0, 1, 2 and 3


async def test_an_evaluation_that_a_kill_took_away_is_due_again(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path, *EVERY_2)) as run:
        trainer: Any = run.trainer
        due = []
        for updates in range(9):
            trainer.progress.updates = updates
            due.append(trainer.evaluation_due())
        assert due == [True, False, True, False, True, False, True, False, False]  # 8 is the last
        trainer.progress.updates = 4
        trainer.progress.evaluations.append(Evaluation(4, 0.5, 0.0, 1, 0))
        assert not trainer.evaluation_due()


async def test_a_checkpoint_taken_meanwhile_knows_nothing_of_the_evaluation_under_way(
    tmp_path: Path,
) -> None:
    validation = Validation()
    config = small_config(tmp_path, *EVERY_2, "trainer.checkpoint_every=2")
    async with small_run(config, hold=validation.hold) as run:
        training = asyncio.create_task(run.train(3))
        await run.trained(3)
        state = run.trainer.checkpoints.load(tmp_path / "checkpoints" / "step_2")
        assert state["progress"].evaluations == []
        validation.may_end.set()
        await training
