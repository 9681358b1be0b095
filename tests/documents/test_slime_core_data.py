"""The document of slime's core, what it says of data: filters, rewards, debug files and train data.
Where slime is installed (`make test-slime`), its own functions give the same answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from stepwell.backends.errors import BatchError
from stepwell.backends.slime.backend import SlimeBackend, train_data
from stepwell.backends.slime.sample import SlimeSample, as_slime, sample_class
from stepwell.backends.slime.samples import to_samples
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.copies import TrainerCopies
from stepwell.datapool.types import Group, Trajectory
from stepwell.run.replay import replay as train_on_recording
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import Recorder, recordings, replay
from stepwell.trainer.slime.debug_data import SlimeForm
from stepwell.trainer.slime.filters import check_reward_nonzero_std, sort_by_reward_std
from stepwell.trainer.slime.rm_hub import async_rm, batched_async_rm
from stepwell.trainer.slime.rollout import REWARD_HOOK
from stepwell.trainer.updater import Updater
from tests.backends.slime_itself import HAS_SLIME, rollout_manager, slime
from tests.builders import group, step
from tests.stepwell.configuring import fails
from tests.trainer.small_run import RecordingBackend, small_config, small_run

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

needs_slime = pytest.mark.skipif(not HAS_SLIME, reason="make test-slime runs it, where slime is")


def rewarded(*rewards: Any) -> list[Any]:
    return [sample_class()(index=i, reward=reward) for i, reward in enumerate(rewards)]


# -- filters -------------------------------------------------------------------------------------


ARGS = Namespace(reward_key=None)


def test_a_group_whose_rewards_are_equal_is_not_kept() -> None:
    different = check_reward_nonzero_std(ARGS, rewarded(1.0, 0.0))
    equal = check_reward_nonzero_std(ARGS, rewarded(0.75, 0.75))
    assert (different.keep, different.reason) == (True, None)
    assert (equal.keep, equal.reason) == (False, "zero_std_0.8")
    by_key = Namespace(reward_key="score")
    scores = rewarded({"score": 1.0, "format": 0.0}, {"score": 1.0, "format": 1.0})
    assert not check_reward_nonzero_std(by_key, scores).keep


@pytest.mark.skipif(HAS_SLIME, reason="slime's own answer has no truth value")
def test_the_documents_filter_answers_as_a_truth_value() -> None:
    assert check_reward_nonzero_std(ARGS, rewarded(1.0, 0.0))
    assert not check_reward_nonzero_std(ARGS, rewarded(0.5, 0.5), evaluation=True)


def test_groups_that_differ_the_most_come_first_and_equals_stay_in_order() -> None:
    groups = [rewarded(0.0, 0.0), rewarded(1.0, 0.0), rewarded(0.5, 0.0), rewarded(1.0, 1.0)]
    ordered = sort_by_reward_std(ARGS, groups)
    assert [groups.index(group) for group in ordered] == [1, 2, 0, 3]


@needs_slime
def test_slimes_own_filter_answers_the_same() -> None:
    theirs = slime("rollout.filter_hub.dynamic_sampling_filters").check_reward_nonzero_std
    chance = random.Random(7)
    for n in (1, 2, 8):
        for _ in range(20):
            rewards = [chance.choice((0.0, 0.1, 0.3, 1.0)) for _ in range(n)]
            ours, other = (f(ARGS, rewarded(*rewards)) for f in (check_reward_nonzero_std, theirs))
            assert type(ours) is type(other)
            assert (ours.keep, ours.reason) == (bool(other.keep), other.reason)


# -- rewards -------------------------------------------------------------------------------------


def answered(response: str, label: Any = "4", **given: Any) -> Any:
    return sample_class()(prompt="2 + 2?", response=response, label=label, **given)


def by_type(rm_type: str | None, path: str | None = None) -> Namespace:
    return Namespace(rm_type=rm_type, custom_rm_path=path, reward_key=None)


RESPONSES = (
    "So it is \\boxed{4}.",
    "So it is \\boxed{5}.",
    "</think>\\boxed{4}",
    "</think>\\boxed{3}",
    "Answer: 4",
    "Answer: 7",
    "nothing",
)


@pytest.mark.parametrize(
    ("rm_type", "response", "expected"),
    [
        ("math", "So it is \\boxed{4}.", 1),
        ("math", "So it is \\boxed{5}.", 0),
        ("deepscaler", "</think>\\boxed{4}", 1),
        ("deepscaler", "\\boxed{4}", 0),
        ("f1", "4", 1.0),
        ("gpqa", "The answer is B", 0.0),
        ("boxed_f1", "\\boxed{4}", 1.0),
        (" boxed_math ", "\\boxed{4}", 1),
    ],
)
async def test_a_sample_is_scored_by_the_type_of_its_reward(
    rm_type: str, response: str, expected: float
) -> None:
    label = "A" if rm_type == "gpqa" else "4"
    assert await async_rm(by_type(rm_type), answered(response, label)) == expected


async def test_dapo_says_what_it_took_for_the_answer() -> None:
    reward = await async_rm(by_type("dapo"), answered("Answer: 4"))
    assert (reward["score"], reward["acc"], reward["pred"]) == (1.0, True, "4")


async def test_the_type_of_a_samples_metadata_counts_before_that_of_the_run() -> None:
    sample = answered("Answer: 4", metadata={"rm_type": "f1"})
    assert isinstance(await async_rm(by_type("dapo"), sample), float)


@pytest.mark.parametrize("rm_type", [None, "", "ifbench_2", "boxed_remote_rm"])
async def test_a_type_that_there_is_not_is_an_error_that_names_them(rm_type: str | None) -> None:
    with pytest.raises(NotImplementedError, match=r"rm_type is .*; use one of deepscaler, dapo"):
        await async_rm(by_type(rm_type), answered("4"))


async def by_length(args: Any, sample: Any, **kwargs: Any) -> float:
    return len(sample.response) + kwargs.get("more", 0)


def at_once(args: Any, samples: list[Any], **kwargs: Any) -> list[int]:
    return [len(samples)] * len(samples)


async def test_a_function_of_ones_own_scores_a_sample_or_all_of_them() -> None:
    args = by_type("math", f"{__name__}.by_length")
    assert await async_rm(args, answered("four"), more=3) == 7
    assert await batched_async_rm(by_type("f1"), [answered("4"), answered("5")]) == [1.0, 0.0]
    batch = by_type(None, f"{__name__}.at_once")
    assert await batched_async_rm(batch, [answered("4")] * 3) == [3, 3, 3]
    own = answered("ab", custom_rm_path=f"{__name__}.by_length")
    assert await async_rm(by_type("math"), own) == 2


async def test_a_server_is_asked_again_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    async def score(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if len(bodies) % 3:
            raise web.HTTPServiceUnavailable
        return web.json_response(0.25)

    async def at_once(delay: float) -> None:
        return None

    app = web.Application()
    app.router.add_post("/score", score)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(asyncio, "sleep", at_once)
    try:
        args = by_type("remote_rm")
        args.rm_url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        assert await async_rm(args, answered("4")) == 0.25
    finally:
        await runner.cleanup()
    assert bodies == [{"prompt": "2 + 2?", "response": "4", "label": "4"}] * 3


@needs_slime
@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1"])
async def test_slimes_own_rewards_are_the_same(rm_type: str) -> None:
    theirs = slime("rollout.rm_hub").async_rm
    for response, label in itertools.product(RESPONSES, ("4", "7")):
        sample = answered(response, label)
        ours, other = [await rm(by_type(rm_type), sample) for rm in (async_rm, theirs)]
        if rm_type == "dapo":
            ours, other = ours["score"], other["score"]
        assert ours == pytest.approx(other), (response, label)


# -- debug files -----------------------------------------------------------------------------------


def answer_of(group: int, index: int, reward: Any, **given: Any) -> SlimeSample:
    """Two turns, with a tool's answer between them."""
    plain: dict[str, Any] = {
        "group_index": group,
        "index": index,
        "prompt": f"question {group}",
        "tokens": [1, 2, 3, 9, 4, 5],
        "response": "an answer",
        "response_length": 4,
        "label": "42",
        "reward": reward,
        "loss_mask": [1, 0, 1, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25, -0.125],
        "weight_versions": ["3", "4"],
        "status": SlimeSample.Status.COMPLETED,
        "metadata": {"level": group},
    }
    return SlimeSample(**plain | given)


def two_groups(**given: Any) -> list[SlimeSample]:
    rewards = enumerate((1.0, 0.0, 0.5, 0.0))
    return [answer_of(i // 2, i, reward, **given) for i, reward in rewards]


def as_documented(sample: SlimeSample) -> dict[str, Any]:
    """The fields of the document's `Sample`, which has no groups, versions and log-probs."""
    names = "index prompt tokens response response_length label reward loss_mask status metadata"
    return {name: value for name, value in sample.to_dict().items() if name in names.split()}


def save(folder: Path, rollout_id: int, samples: list[dict[str, Any]]) -> Path:
    path = folder / f"{rollout_id}.pt"
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def trained_on(where: Path | str, form: SlimeForm | None = None, *keys: str) -> RecordingBackend:
    backend = RecordingBackend()
    updater = Updater(
        AlgorithmConfig(), AsyncTrainingConfig(trigger_parameter_sync_step=1), backend
    )
    per_rollout = 1 if form is None else form.updates_per_rollout
    list(replay(updater, recordings(str(where), per_rollout), 1, form))
    return backend


def test_slimes_debug_files_are_trained_on(tmp_path: Path) -> None:
    for rollout_id in (0, 1):
        save(tmp_path, rollout_id, [s.to_dict() for s in two_groups()])
    first, second = trained_on(tmp_path / "{rollout_id}.pt", SlimeForm(temperature=0.8)).steps
    assert len(first) == len(second) == 8
    assert first[0].prompt_ids.tolist() == [1, 2]
    assert (first[0].response_ids.tolist(), first[1].response_ids.tolist()) == ([3], [4, 5])
    assert first[1].prompt_ids.tolist() == [1, 2, 3, 9]
    assert [p.tolist() for s in first[:2] if (p := s.rollout_log_probs) is not None] == [
        [-0.5],
        [-0.25, -0.125],
    ]
    assert [s.reward for s in first] == [None, 1.0, None, 0.0, None, 0.5, None, 0.0]
    assert len({s.prompt_uid for s in first}) == 2
    assert len({s.trajectory_uid for s in first}) == 4
    assert [s.policy_version for s in first] == [3, 4] * 4
    assert {s.temperature for s in first} == {0.8}


def test_a_file_as_the_document_has_it_is_trained_on(tmp_path: Path) -> None:
    """Without group_index, versions, log-probs and masks, and with a reward for `--reward-key`."""
    samples = [as_documented(s) for s in two_groups(loss_mask=None)]
    for sample in samples:
        sample["reward"] = {"accuracy": sample["reward"], "score": -1.0}
    save(tmp_path, 0, samples)
    form = SlimeForm(group_size=2, reward_key="accuracy")
    (steps,) = trained_on(tmp_path, form).steps
    assert [s.response_ids.tolist() for s in steps] == [[3, 9, 4, 5]] * 4
    assert [s.reward for s in steps] == [1.0, 0.0, 0.5, 0.0]
    assert [steps[i].prompt_uid for i in (0, 2)] == [steps[i].prompt_uid for i in (1, 3)]
    assert {s.rollout_log_probs for s in steps} == {None}
    assert {s.policy_version for s in steps} == {0}


def test_a_run_trains_on_slimes_files_by_its_own_settings(tmp_path: Path) -> None:
    """`stepwell train trainer.load_debug_rollout_data=…`, with slime's other arguments as keys."""
    dump = tmp_path / "rollout_data"
    dump.mkdir()
    for rollout_id in (0, 1):
        samples = [as_documented(s) for s in two_groups()]
        for sample in samples:
            sample["reward"] = {"accuracy": sample["reward"]}
        save(dump, rollout_id, samples)
    config = small_config(
        tmp_path,
        f"trainer.load_debug_rollout_data={dump}/{{rollout_id}}.pt",
        "rollout.n=2",
        "rollout.temperature=0.8",
        "rollout.reward={function: math, reward_key: accuracy}",
    )
    backend = RecordingBackend()
    assert train_on_recording(config, backend)["optimizer_steps"] == 2
    assert [s.reward for s in backend.steps[1] if s.is_last] == [1.0, 0.0, 0.5, 0.0]
    assert {s.temperature for s in backend.steps[1]} == {0.8}


def test_samples_of_one_rollout_are_branches_of_one_trajectory(tmp_path: Path) -> None:
    branches = [answer_of(0, 0, 1.0, rollout_id=7), answer_of(0, 0, 1.0, rollout_id=7)]
    save(tmp_path, 0, [s.to_dict() for s in (*branches, answer_of(0, 1, 0.0, rollout_id=8))])
    (steps,) = trained_on(tmp_path).steps
    assert len({s.trajectory_uid for s in steps}) == 2
    assert [s.reward for s in steps] == [None, None, None, 1.0, None, 0.0]


def test_arrays_are_read_and_nothing_else_of_a_files_code(tmp_path: Path) -> None:
    sample = answer_of(0, 0, np.float64(1.0), metadata={"scores": np.arange(3)})
    save(tmp_path, 0, [sample.to_dict(), answer_of(0, 1, 0.0).to_dict()])
    assert len(trained_on(tmp_path).steps[0]) == 4
    path = save(tmp_path, 0, [answer_of(0, 0, 1.0, metadata={"path": tmp_path}).to_dict()])
    with pytest.raises(DamagedFileError, match=rf"{path} is damaged \(Weights only load failed"):
        trained_on(tmp_path)


def test_versions_of_samples_are_lags_of_their_steps(tmp_path: Path) -> None:
    save(tmp_path, 0, [s.to_dict() for s in two_groups(weight_versions=["5"])])
    save(tmp_path, 1, [s.to_dict() for s in two_groups(weight_versions=["5"])])
    backend = RecordingBackend()
    updater = Updater(
        AlgorithmConfig(), AsyncTrainingConfig(trigger_parameter_sync_step=1), backend
    )
    records = list(replay(updater, recordings(str(tmp_path)), 1))
    assert [r["staleness/max"] for r in records] == [0.0, 1.0]


def test_what_trains_nothing_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    aborted = SlimeSample(group_index=0, index=2, status=SlimeSample.Status.ABORTED)
    removed = answer_of(0, 3, None, remove_sample=True)
    half = answer_of(0, 4, None, status=SlimeSample.Status.ABORTED)
    given = [answer_of(0, 0, 1.0), answer_of(0, 1, 0.0), aborted, removed, half]
    save(tmp_path, 0, [s.to_dict() for s in given])
    caplog.set_level(logging.WARNING)
    assert len(trained_on(tmp_path).steps[0]) == 4
    assert "0.pt: 3 rollouts train nothing and are left out" in caplog.text


WRONG: dict[str, tuple[list[SlimeSample], str]] = {
    "no reward": ([answer_of(0, 0, None)], "sample 0 has the reward None; each trained one has"),
    "short mask": ([answer_of(0, 0, 1.0, loss_mask=[1])], r"sample 0 cannot be trained: .*mask"),
    "versions": ([answer_of(0, 0, 1.0, weight_versions=["?"])], "weight_versions of its samples"),
    "some groups": (
        [answer_of(0, 0, 1.0), answer_of(None, 1, 1.0)],  # type: ignore[arg-type]
        "1 of 2 samples have no group_index",
    ),
    "other prompts": (
        [answer_of(None, 0, 1.0, prompt="a"), answer_of(None, 1, 1.0)],  # type: ignore[arg-type]
        r"those from 0 on are no 2 of one prompt; set rollout\.n",
    ),
    "images": ([answer_of(0, 0, 1.0, multimodal_inputs={"images": [1]})], "has multimodal_inputs"),
    "nothing": ([SlimeSample(group_index=0)], "has no sample with a trained token"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_cannot_be_trained_on_says_why(tmp_path: Path, wrong: str) -> None:
    samples, message = WRONG[wrong]
    save(tmp_path, 0, [s.to_dict() for s in samples])
    with pytest.raises(CheckpointError, match=message):
        trained_on(tmp_path, SlimeForm(group_size=2))


def test_a_missing_file_and_one_of_another_kind_are_named(tmp_path: Path) -> None:
    save(tmp_path, 2, [s.to_dict() for s in two_groups()])
    with pytest.raises(CheckpointError, match=r"2\.pt begins after optimizer step 4, but the mod"):
        trained_on(tmp_path, SlimeForm(updates_per_rollout=2))
    torch.save({"rollout_id": 0}, tmp_path / "0.pt")
    with pytest.raises(CheckpointError, match=r"0\.pt is no recording of ours and has no `samples"):
        trained_on(tmp_path)


def test_a_sample_may_have_no_metadata(tmp_path: Path) -> None:
    save(tmp_path, 0, [s.to_dict() for s in two_groups(metadata=None)])
    assert len(trained_on(tmp_path).steps[0]) == 8


async def test_a_run_writes_slimes_form_and_is_trained_on_as_its_own(tmp_path: Path) -> None:
    both: dict[str, RecordingBackend] = {}
    for ending in (".pt", ".slime.pt"):
        folder = tmp_path / ending
        folder.mkdir()
        where = f"{folder}/batches/{{rollout_id}}{ending}"
        keys = (f"trainer.save_debug_rollout_data={where}", "trainer.total_steps=3")
        async with small_run(small_config(folder, *keys)) as run:
            await run.train()
        both[ending] = trained_on(where, SlimeForm(group_size=2))
    ours, slimes = both.values()
    assert len(ours.steps) == len(slimes.steps) == 3
    for name in ("rollout_log_probs", "advantages", "weights", "coef"):
        for wanted, found in zip(ours.columns, slimes.columns, strict=True):
            torch.testing.assert_close(found[name], wanted[name])
    file = torch.load(tmp_path / ".slime.pt" / "batches" / "1.slime.pt", weights_only=False)
    assert file["rollout_id"] == 1
    assert [s["group_index"] for s in file["samples"]] == [0, 0, 1, 1]
    sample = file["samples"][0]
    assert (sample["status"], sample["label"], sample["reward"]) == ("completed", "2", 0.0)
    assert sample["prompt"]
    assert sample["response"]


def test_conversations_in_slimes_form_are_refused_before_anything_starts(tmp_path: Path) -> None:
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    where = tmp_path / "{rollout_id}.slime.pt"
    keys = ["algorithm.kind=sft", f"data.sft={conversations}", f"run.dir={tmp_path / 'run'}"]
    said = fails(*keys, f"trainer.save_debug_rollout_data={where}")
    assert "of slime's form, which holds rollouts alone" in said


def test_a_damaged_file_of_ours_is_an_error_with_its_path(tmp_path: Path) -> None:
    where = str(tmp_path / "{rollout_id}.slime.pt")
    _record(where, [_group()])
    path = tmp_path / "0.slime.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    with pytest.raises(DamagedFileError, match=r"0\.slime\.pt is damaged"):
        trained_on(where)


@needs_slime
def test_slime_reads_our_files_and_we_read_slimes(tmp_path: Path) -> None:
    utils = slime("observability.rollout_data_utils")
    where = str(tmp_path / "{rollout_id}.slime.pt")
    _record(where, [_group()])
    samples = utils.load_debug_rollout_data(where, rollout_id=0)
    assert [(s.reward, s.response_length, s.loss_mask) for s in samples] == [
        (1.0, 2, [1, 1]),
        (0.0, 2, [1, 1]),
    ]
    theirs = str(tmp_path / "theirs_{rollout_id}.pt")
    utils.save_debug_rollout_data(theirs, samples, rollout_id=0, evaluation=False)
    (ours,), (again,) = trained_on(where).steps, trained_on(theirs).steps
    for one, other in zip(ours, again, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.reward, one.policy_version) == (other.reward, other.policy_version)


def _group(**metadata: Any) -> Group:
    trajectories = []
    for i, reward in enumerate((1.0, 0.0)):
        only = step(
            [65, 66],
            [67, 68],
            f"t{i}",
            rollout_log_probs=[-0.5, -0.25],
            reward=reward,
            is_last=True,
        )
        own = {name: values[i] for name, values in metadata.items()}
        trajectories.append(Trajectory(f"t{i}", "p", (only,), own))
    return group(*trajectories, n_rollouts=2)


def _record(where: str, groups: list[Group]) -> None:
    Recorder(where, MODEL, 1, TrainerCopies(Path(where).parent)).write(groups, Progress())


# -- train data ------------------------------------------------------------------------------------


def test_train_data_has_the_raw_reward_and_the_round_of_a_rollout_buffer() -> None:
    group = _group(round_number=[3, 4], raw_reward=[10.0, 20.0])
    samples = to_samples([group], group_size=3).flat
    data = train_data(SlimeBackend(), samples)
    assert data["round_number"] == [3, 4, 3]  # the last stands for a rollout that is missing
    assert data["raw_reward"] == [10.0, 20.0, 0.5]
    assert data["truncated"] == [0, 0, 0]
    assert data["sample_indices"] == sorted(data["sample_indices"])
    plain = train_data(SlimeBackend(), to_samples([_group()]).flat)
    assert "round_number" not in plain
    assert plain["raw_reward"] == [1.0, 0.0]


def test_a_round_that_only_some_rollouts_have_is_refused() -> None:
    with pytest.raises(BatchError, match="metadata of sample 2 has no round_number"):
        train_data(SlimeBackend(), to_samples([_group(round_number=[1, 2]), _group()]).flat)


@needs_slime
def test_slimes_own_conversion_gives_the_same_train_data() -> None:
    args = Namespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        custom_reward_post_process_path=REWARD_HOOK,
        reward_key=None,
        rollout_top_p=1.0,
    )
    samples = to_samples([_group(round_number=[3, 4], raw_reward=[10.0, 20.0])]).flat
    theirs = rollout_manager(args)._convert_samples_to_train_data([as_slime(s) for s in samples])
    ours = train_data(SlimeBackend(), samples)
    assert theirs == {name: ours[name] for name in theirs}
    assert theirs["round_number"] == [3, 4]
