"""slime's rollout function and data source over a real pool: what slime gets, when groups are
acked, and what a slime that was killed finds when it starts again."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoTokenizer

import stepwell.datapool.remote.lease_keeper
import stepwell.trainer.slime.data_source
import stepwell.trainer.slime.pool
from stepwell.backends.errors import BatchError
from stepwell.backends.slime.sample import SlimeSample, as_slime
from stepwell.datapool import DataPoolClient, PoolConfig, Step, connect, start_data_pool
from stepwell.datapool.errors import DamagedFileError
from stepwell.trainer.errors import CheckpointError, ConfigError, DataError, StarvedError
from stepwell.trainer.slime.config import SlimeConfig
from stepwell.trainer.slime.data_source import (
    PoolDataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
)
from stepwell.trainer.slime.rollout import REWARD_HOOK, generate_rollout
from tests.backends.test_vision_training import Album
from tests.vision_model import make_vision_model

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

MakeSource = Callable[..., PoolDataSource]


POOL = f"slime-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[None]:
    handle = start_data_pool(PoolConfig(), name=POOL)
    yield
    ray.kill(handle)


@pytest.fixture
def channel(pool: None) -> str:
    """A channel of this test's own, beside `…-val`, so that tests share the pool."""
    return uuid.uuid4().hex


def slime_args(**given: Any) -> Namespace:
    """slime's arguments as its parser leaves them, as far as they are read."""
    plain = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "num_rollout": 100,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "custom_reward_post_process_path": REWARD_HOOK,
        "custom_convert_samples_to_train_data_path": None,
        "reward_key": None,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_global_dataset": True,
        "save_interval": 1,
        "async_save": False,
        "save": None,
        "load": None,
        "hf_checkpoint": None,
        "prompt_data": None,
        "input_key": "input",
        "label_key": None,
        "metadata_key": "metadata",
        "tool_key": "tools",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_max_prompt_len": None,
        "rollout_shuffle": True,
        "rollout_seed": 42,
        "buffer_filter_path": None,
    }
    return Namespace(**plain | given)


@pytest.fixture
def make_source(channel: str, tmp_path: Path) -> Iterator[MakeSource]:
    """A data source as a slime process makes it that saves to, and loads from, one folder."""
    made: list[PoolDataSource] = []

    def make(**given: Any) -> PoolDataSource:
        folder = str(tmp_path / "checkpoints")
        ours = {"pool": POOL, "channel": channel, "val_channel": f"{channel}-val"}
        args = {f"stepwell_{name}": value for name, value in ours.items()}
        made.append(PoolDataSource(slime_args(**args | {"save": folder, "load": folder} | given)))
        return made[-1]

    yield make
    for source in made:
        source.pool.close()


def in_pool(use: Callable[[DataPoolClient], Any]) -> Any:
    """Await `use(client)`."""

    async def run() -> Any:
        return await use(connect(POOL))

    return asyncio.run(run())


async def finish(
    pool: DataPoolClient,
    uid: str,
    channel: str,
    rewards: tuple[float | None, ...] = (1.0, 0.0),
    **metadata: Any,
) -> None:
    """A group of one trajectory for each reward, each of two turns."""
    await pool.open_group(uid, len(rewards), metadata=metadata, channel=channel)
    for i, reward in enumerate(rewards):
        who: dict[str, Any] = {"trajectory_uid": f"{uid}-{i}", "prompt_uid": uid}
        first = Step(prompt_ids=[1, 2], response_ids=[3], rollout_log_probs=[-0.5], **who)
        second = Step(
            prompt_ids=[1, 2, 3, 9],
            response_ids=[4],
            rollout_log_probs=[-0.25],
            step_index=1,
            policy_version=1,
            **who,
        )
        await pool.submit_steps([first, second], channel)
        await pool.complete_trajectory(f"{uid}-{i}", reward, channel=channel)


def fill(channel: str, *uids: str, **kwargs: Any) -> None:
    async def use(pool: DataPoolClient) -> None:
        for uid in uids:
            await finish(pool, uid, channel, **kwargs)

    in_pool(use)


def stats(channel: str) -> dict[str, Any]:
    found: dict[str, Any] = in_pool(lambda pool: pool.get_statistics(channel))["groups"]
    return found


def counts(channel: str) -> dict[str, int]:
    found = stats(channel)
    return {k: found[k] for k in ("ready", "leased", "acked", "dropped")}


def uids_of(output: Any) -> set[str]:
    """prompt_uids of a rollout function's result."""
    return {s.metadata["prompt_uid"] for group in output.samples for r in group for s in r}


def generate(source: PoolDataSource, rollout_id: int) -> set[str]:
    return uids_of(generate_rollout(source.args, rollout_id, source))


# -- what slime gets ---------------------------------------------------------------------------


def test_a_rollout_is_whole_groups_by_prompt_and_by_trajectory(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", data_source="gsm8k")
    source = make_source()
    output = generate_rollout(source.args, 3, source)
    assert [[[len(s.loss_mask) for s in r] for r in g] for g in output.samples] == [[[3], [3]]] * 2
    samples = [s for g in output.samples for r in g for s in r]
    assert [s.metadata["trajectory_uid"] for s in samples] == ["p0-0", "p0-1", "p1-0", "p1-1"]
    assert [(s.group_index, s.rollout_id) for s in samples] == [(6, 12), (6, 13), (7, 14), (7, 15)]
    assert [s.reward for s in samples] == [1.0, 0.0, 1.0, 0.0]
    assert samples[0].tokens == [1, 2, 3, 9, 4]
    assert samples[0].loss_mask == [1, 0, 1]
    assert samples[0].rollout_log_probs == [-0.5, 0.0, -0.25]
    assert samples[0].weight_versions == ["0", "1"]
    assert samples[0].metadata["source_name"] == "gsm8k"
    assert output.metrics["stepwell/policy_version_max"] == 1
    assert output.metrics["stepwell/samples_per_rollout"] == 1


def test_a_rollout_and_an_evaluation_of_groups_with_pictures(
    make_source: MakeSource, channel: str, tmp_path: Path
) -> None:
    folder = make_vision_model(tmp_path / "model")
    album = Album(folder)

    async def show(pool: DataPoolClient, to: str) -> None:
        for n in range(2):
            await pool.open_group(f"g{n}", 2, channel=to)
            for i in range(2):
                uid = f"g{n}-{i}"
                step = album.step(uid, 0, 40, album.picture(n), 41, response=[50])
                picture = {p.digest: album.pngs[p.digest] for p in step.pictures}
                await pool.put_pictures(uid, picture, prompt_uid=f"g{n}", channel=to)
                await pool.submit_steps([replace(step, prompt_uid=f"g{n}")], to)
                await pool.complete_trajectory(uid, float(i), channel=to)

    in_pool(lambda pool: show(pool, channel))
    in_pool(lambda pool: show(pool, f"{channel}-val"))
    source = make_source(hf_checkpoint=str(folder))
    output = generate_rollout(source.args, 0, source)
    samples = [s for g in output.samples for r in g for s in r]
    assert len(samples) == 4
    for sample in samples:
        png = album.pngs[album.picture(sample.group_index).digest]
        for name, value in album.processor.features([png]).items():
            assert torch.equal(sample.multimodal_train_inputs[name], torch.from_numpy(value))
    looked = generate_rollout(source.args, 0, source, evaluation=True).data["unknown"]
    assert sorted(looked["rewards"]) == [0.0, 0.0, 1.0, 1.0]
    assert all(s.multimodal_train_inputs is None for s in looked["samples"])


def test_groups_that_slime_cannot_train_are_dropped_with_a_reason(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "large", rewards=(1.0, 0.0, 1.0))
    fill(channel, "unscored", rewards=(1.0, None))
    fill(channel, "p0", "p1")
    source = make_source()
    output = generate_rollout(source.args, 0, source)
    assert uids_of(output) == {"p0", "p1"}
    assert stats(channel)["drop_reasons"] == {"group_size": 1, "unscored": 1}
    assert output.metrics["stepwell/dropped_groups/unscored"] == 1


def test_a_group_that_lost_a_rollout_still_counts_for_slime(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "short", rewards=(1.0,))
    fill(channel, "p1")
    source = make_source()
    output = generate_rollout(source.args, 0, source)
    assert [len(group) for group in output.samples] == [2, 2]
    assert output.metrics["stepwell/padded_rollouts"] == 1


def test_tokens_at_a_temperature_that_slime_does_not_score_at_are_not_trained(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1")
    source = make_source(rollout_temperature=0.7)
    with pytest.raises(BatchError, match="other_temperature"):
        generate_rollout(source.args, 0, source)


@pytest.mark.parametrize("wait_s", [3600.0, 0.01])
def test_a_channel_that_was_shut_down_ends_the_wait(
    make_source: MakeSource, channel: str, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setattr(stepwell.trainer.slime.pool, "WAIT_S", wait_s)
    fill(channel, "p0")
    in_pool(lambda pool: pool.shutdown(channel))
    source = make_source()
    with pytest.raises(StarvedError, match=r"wants 2 groups of channel .* \(1 are ready"):
        generate_rollout(source.args, 0, source)


def test_an_evaluation_takes_the_val_channels_rewards_by_data_source(
    make_source: MakeSource, channel: str
) -> None:
    fill(f"{channel}-val", "v0", rewards=(1.0, 0.5), data_source="aime")
    fill(f"{channel}-val", "v1", rewards=(0.0, None), data_source="math")
    source = make_source()
    output = generate_rollout(source.args, 0, source, evaluation=True)
    assert {name: d["rewards"] for name, d in output.data.items()} == {
        "aime": [1.0, 0.5],
        "math": [0.0],
    }
    assert output.data["aime"]["truncated"] == [False, False]
    assert [s.reward for s in output.data["aime"]["samples"]] == [1.0, 0.5]
    assert output.metrics == {"stepwell/val_groups": 2, "stepwell/val_unscored": 1}
    assert stats(f"{channel}-val")["acked"] == 2
    assert generate_rollout(source.args, 0, source, evaluation=True).data == {}


def test_an_evaluation_waits_for_as_many_groups_as_it_was_told_to(
    make_source: MakeSource, channel: str
) -> None:
    fill(f"{channel}-val", "v0", "v1", "v2")
    source = make_source(stepwell_val_groups=2)
    output = generate_rollout(source.args, 0, source, evaluation=True)
    assert len(output.data["unknown"]["rewards"]) == 4
    assert stats(f"{channel}-val")["ready"] == 1


# -- when groups are acked ---------------------------------------------------------------------


def test_groups_are_acked_once_slime_has_saved_and_not_before(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source()
    source.load(-1)
    generate(source, 0)
    assert counts(channel) == {"ready": 2, "leased": 2, "acked": 0, "dropped": 0}
    generate(source, 1)  # as train_async does: before rollout 0 is trained
    source.save(0)
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 2, "dropped": 0}
    source.save(1)
    assert counts(channel) == {"ready": 0, "leased": 0, "acked": 4, "dropped": 0}


def test_a_slime_that_never_saves_acks_a_rollout_when_it_asks_for_the_next(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source(save=None, load=None, save_interval=None)
    generate(source, 0)
    assert counts(channel)["acked"] == 0
    generate(source, 1)
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 2, "dropped": 0}


def test_with_async_save_a_checkpoint_is_durable_when_the_next_one_is_begun(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, *(f"p{i}" for i in range(6)))
    source = make_source(async_save=True, num_rollout=3)
    source.load(-1)
    generate(source, 0)
    source.save(0)
    assert counts(channel)["acked"] == 0
    generate(source, 1)
    source.save(1)
    assert counts(channel)["acked"] == 2
    generate(source, 2)
    source.save(2)  # the last one, for which slime waits
    assert counts(channel)["acked"] == 6


@pytest.mark.slow
def test_leases_are_renewed_while_slime_trains(
    make_source: MakeSource, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepwell.datapool.remote.lease_keeper, "RENEWALS", 40)
    fill(channel, "p0", "p1")
    source = make_source(stepwell_lease_s=2.0)
    generate(source, 0)
    time.sleep(3.0)
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 0, "dropped": 0}


def test_groups_whose_lease_ran_out_are_recognised_and_not_trained_twice(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source()
    first = generate(source, 0)
    in_pool(lambda pool: pool.release_leases(channel))
    second = generate(source, 1)
    assert (first, second) == ({"p0", "p1"}, {"p2", "p3"})
    assert source.pool.redelivered == 2
    source.save(0)
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 2, "dropped": 0}


# -- what a restarted slime finds --------------------------------------------------------------


@pytest.mark.slow
def test_a_slime_killed_between_two_rollouts_loses_nothing_and_trains_nothing_twice(
    channel: str, tmp_path: Path
) -> None:
    @ray.remote(num_cpus=0)
    class Manager:
        """Actor that uses source and rollout function as slime's RolloutManager does."""

        def __init__(self, args: Namespace) -> None:
            self.source = PoolDataSource(args)

        def generate(self, rollout_id: int) -> set[str]:
            output = generate_rollout(self.source.args, rollout_id, self.source)
            return {s.metadata["prompt_uid"] for g in output.samples for r in g for s in r}

        def save(self, rollout_id: int) -> None:
            self.source.save(rollout_id)

        def load(self, rollout_id: int) -> None:
            self.source.load(rollout_id)

    everything = {f"p{i}" for i in range(8)}
    fill(channel, *sorted(everything))
    args = slime_args(
        save=str(tmp_path), load=str(tmp_path), stepwell_pool=POOL, stepwell_channel=channel
    )
    manager: Any = Manager.remote(args)  # type: ignore[attr-defined]
    ray.get(manager.load.remote(-1))
    trained = ray.get(manager.generate.remote(0))
    ray.get(manager.save.remote(0))
    lost = ray.get(manager.generate.remote(1))
    ray.kill(manager)

    manager = Manager.remote(args)  # type: ignore[attr-defined]
    ray.get(manager.load.remote(0))
    rollouts = []
    for rollout_id in (1, 2, 3):
        rollouts.append(ray.get(manager.generate.remote(rollout_id)))
        ray.get(manager.save.remote(rollout_id))
    ray.kill(manager)
    assert rollouts[0] == lost  # served again, first
    assert sorted([*trained, *rollouts[0], *rollouts[1], *rollouts[2]]) == sorted(everything)
    assert counts(channel) == {"ready": 0, "leased": 0, "acked": 8, "dropped": 0}


def test_a_kill_between_the_checkpoint_and_the_word_of_it_trains_nothing_twice(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source()
    first = generate(source, 0)
    source.pool.close()  # the checkpoint of rollout 0 was written, save(0) was not reached
    again = make_source()
    again.load(0)
    assert first & generate(again, 1) == set()
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 2, "dropped": 0}


def test_trained_groups_whose_lease_ran_out_meanwhile_are_dropped_at_the_restart(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source()
    first = generate(source, 0)
    source.pool.close()
    in_pool(lambda pool: pool.release_leases(channel))
    again = make_source()
    again.load(0)
    assert first & generate(again, 1) == set()
    assert stats(channel)["drop_reasons"] == {"trained_before_restart": 2}


def test_a_run_that_starts_from_an_earlier_checkpoint_is_served_what_it_lacks(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2", "p3")
    source = make_source(save_interval=2)
    first, second = generate(source, 0), generate(source, 1)
    source.pool.close()
    again = make_source(save_interval=2)
    again.load(-1)
    assert {*generate(again, 0), *generate(again, 1)} == first | second
    assert counts(channel)["leased"] == 4


def test_a_lease_of_two_rollouts_is_told_apart_at_a_restart(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1", "p2")
    source = make_source(rollout_batch_size=1)
    assert generate(source, 0) == {"p0"}
    in_pool(lambda pool: pool.release_leases(channel))
    source.args.rollout_batch_size = 2
    assert generate(source, 1) == {"p1", "p2"}  # p0 came with p1, and slime has it
    source.save(0)
    assert counts(channel)["acked"] == 0  # the lease holds p1 too
    source.pool.close()
    again = make_source(rollout_batch_size=2)
    again.load(0)
    assert generate(again, 1) == {"p1", "p2"}
    assert counts(channel) == {"ready": 0, "leased": 2, "acked": 0, "dropped": 1}


def test_a_rollout_that_fails_gives_its_groups_back(
    make_source: MakeSource, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(channel, "p0", "p1")
    source = make_source()

    def no_disk(path: Path, content: bytes) -> None:
        raise OSError("no space left on device")

    source.load(-1)
    generate(source, 0)  # the pool was told of the start
    fill(channel, "p2", "p3")
    monkeypatch.setattr(stepwell.trainer.slime.pool, "write_durably", no_disk)
    with pytest.raises(OSError, match="no space left"):
        generate_rollout(source.args, 1, source)
    assert counts(channel)["ready"] == 2
    assert source.pool.held == 2


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"custom_reward_post_process_path": None}, "-post-process-path stepwell.backends"),
        ({"reward_key": "score"}, "reward_key is 'score'"),
        ({"rollout_top_p": 0.9}, "rollout_top_p is 0.9"),
    ],
)
def test_arguments_with_which_slime_would_train_something_else_are_refused(
    make_source: MakeSource, given: dict[str, Any], message: str
) -> None:
    source = make_source(**given)
    with pytest.raises(ConfigError, match=message):
        generate_rollout(source.args, 0, source)


def test_rewards_that_slime_does_not_normalise_need_no_hook(
    make_source: MakeSource, channel: str
) -> None:
    fill(channel, "p0", "p1")
    source = make_source(advantage_estimator="ppo", custom_reward_post_process_path=None)
    assert generate(source, 0) == {"p0", "p1"}


def test_another_data_source_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"given a list; set --data-source-path to stepwell\.trainer\.slime"
    ):
        generate_rollout(slime_args(), 0, [])


def test_settings_come_from_slimes_arguments() -> None:
    config = SlimeConfig.of(slime_args(stepwell_lease_s=60))
    assert (config.namespace, config.lease_s, config.pool) == (None, 60, "data_pool")
    with pytest.raises(ConfigError, match=r"stepwell_chanel is 'x'.*known: stepwell_pool"):
        SlimeConfig.of(slime_args(stepwell_chanel="x"))


# -- the data source ---------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = ({"input": f"q{i}", "label": f"a{i}", "metadata": {"level": i}} for i in range(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(prompts: Path, folder: Path, **given: Any) -> PoolDataSource:
    """Needs no pool."""
    args = {"prompt_data": str(prompts), "label_key": "label", "rollout_shuffle": False}
    return PoolDataSource(slime_args(**args | {"save": folder, "load": folder} | given))


def test_prompts_are_handed_out_in_groups_of_samples(prompts: Path, tmp_path: Path) -> None:
    source = source_of(prompts, tmp_path)
    assert len(source) == 5
    groups = source.get_samples(2)
    assert [[s.prompt for s in g] for g in groups] == [["q0", "q0"], ["q1", "q1"]]
    assert [[(s.group_index, s.index) for s in g] for g in groups] == [
        [(0, 0), (0, 1)],
        [(1, 2), (1, 3)],
    ]
    assert groups[1][0].label == "a1"
    assert groups[1][0].metadata == {"level": 1}
    groups[0][0].metadata["level"] = 7
    assert groups[0][1].metadata["level"] == 0  # samples share nothing that they may change


def test_a_restarted_source_goes_on_where_the_checkpoint_was_made(
    prompts: Path, tmp_path: Path
) -> None:
    source = source_of(prompts, tmp_path)
    source.get_samples(2)
    begun = as_slime(
        SlimeSample(
            prompt="q0", tokens=[1, 2], response_length=1, status=SlimeSample.Status.ABORTED
        )
    )
    source.add_samples([[begun, begun]])
    source.save(4)
    expected = [[s.to_dict() for s in g] for g in source.get_samples(3)]
    assert expected[0][0]["tokens"] == [1, 2]  # what came back goes out first, as it is

    again = source_of(prompts, tmp_path)
    again.load(4)
    assert [[s.to_dict() for s in g] for g in again.get_samples(3)] == expected


def test_a_checkpoint_without_state_starts_the_data_from_the_beginning(
    prompts: Path, tmp_path: Path
) -> None:
    source = source_of(prompts, tmp_path)
    source.load(-1)
    assert source.get_samples(1)[0][0].prompt == "q0"


def test_a_damaged_state_is_an_error_with_its_path(prompts: Path, tmp_path: Path) -> None:
    source_of(prompts, tmp_path).save(4)
    path = tmp_path / "rollout" / "global_dataset_state_dict_4.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"0" + whole[-8:])
    with pytest.raises(DamagedFileError, match=r"state_dict_4\.pt is damaged"):
        source_of(prompts, tmp_path).load(4)
    path.write_bytes(whole[: whole.index(b'"digest":')])
    with pytest.raises(DamagedFileError, match="its digest is gone"):
        source_of(prompts, tmp_path).load(4)
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"state_dict_4\.pt cannot be read .*; remove it to"):
        source_of(prompts, tmp_path).load(4)


def test_slimes_buffer_filter_chooses_what_goes_out_again(prompts: Path, tmp_path: Path) -> None:
    path = f"{__name__}.take_the_last"
    source = source_of(prompts, tmp_path, buffer_filter_path=path)
    source.add_samples([[as_slime(SlimeSample(prompt=p))] * 2 for p in ("old", "new")])
    assert [g[0].prompt for g in source.get_samples(2)] == ["new", "q0"]


def take_the_last(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    taken, buffer[:] = buffer[-1:], []
    return taken


def test_without_a_global_dataset_samples_are_empty_but_for_their_numbers(
    prompts: Path, tmp_path: Path
) -> None:
    source = source_of(prompts, tmp_path, rollout_global_dataset=False)
    assert len(source) == 0
    groups = source.get_samples(2)
    assert [[(s.group_index, s.index) for s in g] for g in groups] == [
        [(0, 0), (0, 1)],
        [(1, 2), (1, 3)],
    ]
    assert [s.to_dict() for s in groups[0]] == [
        SlimeSample(group_index=0, index=i).to_dict() for i in range(2)
    ]
    source.save(0)  # slime does not call it then
    assert not list(tmp_path.glob("rollout/*"))


def test_slimes_documented_data_sources_have_its_names_and_methods(
    prompts: Path, tmp_path: Path
) -> None:
    """Sources: `slime/rollout/data_source.py`, docs/en/get_started/customization.md, section 15
    (THUDM/slime, commit 624b824)."""
    args = source_of(prompts, tmp_path).args
    data_source = RolloutDataSourceWithBuffer(args)
    samples = data_source.get_samples(num_samples=3)
    assert [len(group) for group in samples] == [2, 2, 2]
    for sample in samples[0]:
        sample.status = SlimeSample.Status.ABORTED
    data_source.add_samples([samples[0]])
    assert data_source.get_buffer_length() == 1
    data_source.update_metadata({"stage": 1})
    assert data_source.get_metadata() == {"stage": 1}
    data_source.save(rollout_id=5)

    again = RolloutDataSourceWithBuffer(args)
    again.load(rollout_id=5)
    assert (again.get_metadata(), again.get_buffer_length(), len(again)) == ({"stage": 1}, 1, 5)
    assert (again.sample_group_index, again.sample_index, again.epoch_id) == (3, 6, 0)
    prompts_left = [g[0].prompt for g in again.get_samples(4)]
    assert prompts_left == [samples[0][0].prompt, "q3", "q4", "q0"]
    assert again.epoch_id == 1


def test_a_source_without_buffer_takes_nothing_back(prompts: Path, tmp_path: Path) -> None:
    source = RolloutDataSource(source_of(prompts, tmp_path).args)
    with pytest.raises(DataError, match=r"is read-only; set --data-source-path to .*WithBuffer"):
        source.add_samples(source.get_samples(1))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (([],), "samples is a tuple"),
        ([SlimeSample()], r"samples\[0\] is a SlimeSample; .* add \[group\], not group"),
        ([[SlimeSample()] * 2, [SlimeSample()]], r"samples\[1\] has 1 samples, but n_samples_per"),
        ([[SlimeSample(), {}]], r"samples\[0\] holds a dict; a group holds SlimeSamples"),
    ],
)
def test_malformed_groups_are_refused_and_none_is_added(
    prompts: Path, tmp_path: Path, samples: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepwell.trainer.slime.data_source, "sample_class", lambda: SlimeSample)
    source = source_of(prompts, tmp_path)
    with pytest.raises(DataError, match=message):
        source.add_samples(samples)
    assert source.get_buffer_length() == 0


@pytest.mark.slow
def test_a_chat_template_makes_prompts_of_text(prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set --hf-checkpoint"):
        source_of(prompts, tmp_path, apply_chat_template=True)
    source = source_of(prompts, tmp_path, apply_chat_template=True, hf_checkpoint=str(MODEL))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q0"}], tokenize=False, add_generation_prompt=True
    )
    assert source.get_samples(1)[0][0].prompt == expected != "q0"
