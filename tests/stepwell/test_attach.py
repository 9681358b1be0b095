"""The run that a trainer is attached to, and the configuration by which it trains there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

import stepwell
from stepwell import RunUnavailableError, load_config
from stepwell.backends.weights import WeightStore
from stepwell.cli.main import main
from stepwell.cluster.address import RayPart
from stepwell.cluster.parts import POOL_NAME
from stepwell.cluster.placement import Node, Placement, Plan
from stepwell.cluster.ray import ray_here
from stepwell.config.load import attached_config
from stepwell.config.run import RunConfig
from stepwell.datapool import start_data_pool
from stepwell.layout import RUN_FILE
from stepwell.run import train
from stepwell.run.checks import Checked
from stepwell.run.find import find_run
from stepwell.run.folder import (
    EnginesPart,
    GatewayPart,
    PoolPart,
    RunFile,
    begin,
    left_by_trainer,
    only_run_in,
    only_trainer_in,
    refuse_second_trainer,
)
from stepwell.run.record import record_run
from stepwell.run.serve import forget_weights
from stepwell.trainer.errors import ConfigError
from tests.stepwell.configuring import fails

HERE, THERE = Node("10.0.0.2", "a", 0, is_driver=True), Node("10.0.0.3", "b", 0)
TRAINER = """
import sys, time
from pathlib import Path
from stepwell.run.folder import only_trainer_in
with only_trainer_in(Path(sys.argv[1])):
    print("begun", flush=True)
    time.sleep(600)
"""


def live(folder: Path, *overrides: str) -> RunConfig:
    return load_config("live", [f"run.dir={folder}", *overrides])


# -- the configuration ---------------------------------------------------------------------------


def test_agents_that_come_by_themselves_need_no_data_and_agents_of_ours_do(tmp_path: Path) -> None:
    config = live(tmp_path)
    assert (config.rollout.agent, config.data, config.trainer.total_steps) == (None, None, None)
    assert config.max_outstanding_groups is None
    assert "data is missing: there are no tasks to run it on" in fails(
        "rollout.agent=mine:agent", config="live"
    )
    assert "rollout.agent is null: nobody runs an agent on its tasks" in fails("rollout.agent=null")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("async_training.mode=sync", "wait for nobody; set async_training.mode=async"),
        ("algorithm.adv_estimator=remax", "agents that come by themselves make none"),
    ],
)
def test_what_traffic_cannot_do_is_refused(override: str, said: str) -> None:
    assert said in fails(override, config="live")


def attached(folder: Path, own: RunConfig, *overrides: str, name: str | None = None) -> RunConfig:
    """Configuration of a trainer that is attached to a run with the configuration `own`."""
    return attached_config(folder, begin(own).config, name, overrides)


def test_an_attached_trainer_is_configured_as_its_run_but_for_what_it_is_given(
    tmp_path: Path,
) -> None:
    keys = "gateway.admin_keys=[a-key-of-sixteen]"
    own = live(tmp_path, "engine.port=4711", "run.resume=never", keys)
    config = attached(tmp_path, own, "trainer.total_steps=5", "backend.lr=0.5")
    assert (config.trainer.total_steps, config.backend.lr) == (5, 0.5)
    assert (config.engine, config.pool, config.model) == (own.engine, own.pool, own.model)
    assert config.run.resume == "auto"
    assert attached(tmp_path, own, name="live").trainer == own.trainer


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.port=5", r"engine\.port is 5, but the run in .* goes by 0 since it was started"),
        ("run.resume=never", "would remove the pool that agents fill"),
        ("trainer.total_step=5", "did you mean 'total_steps'"),
        ("async_training.max_queue_size=9", r"max_queue_size is 9, but the pool .* goes by 256;"),
        (
            "rollout.agent=a:b data=x.jsonl",
            r"groups is 16, but the pool .* goes by null; start .*agent",
        ),
        ("rollout.reward=math", "leaves out what its agents have not scored"),
    ],
)
def test_what_an_attached_trainer_cannot_have_otherwise_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        attached(tmp_path, live(tmp_path), *override.split())


def test_a_secret_of_the_trainers_is_asked_for_again(tmp_path: Path) -> None:
    judge = "rollout.reward={function: remote, kwargs: {url: 'http://r', api_key: of-the-judge}}"
    with pytest.raises(ConfigError, match=r"rollout\.reward\.kwargs\.api_key is a secret, which"):
        attached(tmp_path, live(tmp_path, judge))
    again = "rollout.reward.kwargs.api_key=of-the-judge"
    config = attached(tmp_path, live(tmp_path, judge), again)
    assert config.rollout.reward == live(tmp_path, judge).rollout.reward


def test_a_secret_of_the_runs_environment_is_the_trainers_too_once_it_is_given_again(
    tmp_path: Path,
) -> None:
    own = live(tmp_path, "cluster.env={HF_TOKEN: hf_mine, NCCL_SOCKET_IFNAME: eth1}")
    with pytest.raises(ConfigError, match=r"cluster\.env\.HF_TOKEN is a secret, which .* again"):
        attached(tmp_path, own)
    config = attached(tmp_path, own, "cluster.env.HF_TOKEN=hf_mine")
    assert config.cluster.env == own.cluster.env
    with pytest.raises(ConfigError, match=r"cluster\.env is .*eth0") as refused:
        attached(
            tmp_path,
            own,
            "cluster.env.HF_TOKEN=hf_mine",
            "cluster.env.NCCL_SOCKET_IFNAME=eth0",
        )
    assert "hf_mine" not in str(refused.value)


def test_text_of_a_run_that_looks_like_a_reference_is_none(tmp_path: Path) -> None:
    stops = r"rollout.stop=['\${HOME}', '\\\${HOME}', '$HOME {x}']"
    own = live(tmp_path, stops)
    assert own.rollout.stop == ("${HOME}", r"\${HOME}", "$HOME {x}")
    assert attached(tmp_path, own).rollout.stop == own.rollout.stop


def test_a_preset_beside_the_command_is_that_and_not_what_the_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, here = tmp_path / "started", tmp_path / "here"
    for folder in (started / "run", here / "configs"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(started)
    begin(live(started / "run"))
    (here / "configs" / "mine.yaml").write_text("trainer: { total_step: 5 }\n")
    monkeypatch.chdir(here)
    with only_run_in(started / "run"):
        assert main(["train", "--attach", str(started / "run"), "--config", "mine"]) == 2
    assert "did you mean 'total_steps'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--attach", "nowhere"], 2, "nowhere does not exist"),
        (["--attach", "127.0.0.1:9"], 1, "nothing answers (Connection refused); the run has ended"),
        ([], 2, "--config is missing"),
    ],
)
def test_what_cannot_be_attached_to_is_told_in_one_line(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


async def test_nodes_are_looked_at_and_variables_set_before_an_attached_trainer_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the Ray of several machines that `make test-cluster` has."""
    config = live(tmp_path, "cluster.env={STEPWELL_TEST_VARIABLE: eth1}", "trainer.total_steps=1")
    on_two = Placement(Plan("plain", cpu_ranks=(HERE, THERE)))
    joined: dict[str, Any] = {}

    @contextmanager
    def join(part: RayPart, run_dir: str, **options: Any) -> Iterator[None]:
        joined.update(options)
        yield

    def look(found: RunConfig, used: Mapping[str, str]) -> None:
        assert os.environ["STEPWELL_TEST_VARIABLE"] == "eth1"
        assert dict(used) == {"a": "rank 0", "b": "rank 1"}
        raise ConfigError("node 10.0.0.3 does not see run.dir")

    monkeypatch.setattr(train, "attached", join)
    monkeypatch.setattr(train, "connect_pool", lambda name, namespace: None)
    monkeypatch.setattr(train, "place", lambda config, serves: on_two)
    monkeypatch.setattr(train, "check_nodes", look)
    begun = begin(config).model_copy(update={"host": "another"})
    begun.write(tmp_path)
    begun = begun.model_copy(
        update={
            "ray": RayPart(address="10.0.0.2:6379", namespace="n", auth_mode="disabled"),
            "pool": PoolPart(name=POOL_NAME),
            "engines": EnginesPart(urls=(), weights_dir=tmp_path),
            "gateway": GatewayPart(urls=("http://10.0.0.2:1",)),
        }
    )
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.3 does not see"):
        await train.attach(config, begun, Checked(None))
    assert joined == {"runtime_env": {"env_vars": {"STEPWELL_TEST_VARIABLE": "eth1"}}}
    assert "STEPWELL_TEST_VARIABLE" not in os.environ
    begin(config)  # on this machine another run was in a folder of that path
    with pytest.raises(RunUnavailableError, match=rf"{tmp_path} on another, is not on this mach"):
        await train.attach(config, begun, Checked(None))


# -- one trainer at a time -----------------------------------------------------------------------


def test_a_second_trainer_is_told_which_process_trains_and_a_killed_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_by_trainer(tmp_path) as pid:
        assert pid is None
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "begun\n"
        with (
            pytest.raises(ConfigError, match=rf"process {trainer.pid} trains in {tmp_path}"),
            only_trainer_in(tmp_path),
        ):
            pass
        with pytest.raises(ConfigError, match=rf"process {trainer.pid} trains in {tmp_path}"):
            refuse_second_trainer(tmp_path)
        with left_by_trainer(tmp_path) as pid:
            assert pid is None
        trainer.send_signal(signal.SIGKILL)
    finally:
        trainer.kill()
        trainer.wait()
    refuse_second_trainer(tmp_path)
    with left_by_trainer(tmp_path) as pid, monkeypatch.context() as at_once:
        assert pid == trainer.pid
        at_once.setattr("stepwell.run.folder.REPAIR_S", 0.0)
        with (
            pytest.raises(ConfigError, match=rf"process {trainer.pid}, .* is being put right"),
            only_trainer_in(tmp_path),
        ):
            pass
    with only_trainer_in(tmp_path):
        pass
    with left_by_trainer(tmp_path) as pid:
        assert pid is None  # it ended by itself
    with only_trainer_in(tmp_path) as lock:
        lock.leaves_undone = True
    with left_by_trainer(tmp_path) as pid:
        assert pid == os.getpid(), "engines may be paused"
    with left_by_trainer(tmp_path) as pid:
        assert pid is None


# -- where the run is ----------------------------------------------------------------------------


async def test_a_run_is_found_by_the_address_of_its_ray_alone(cluster: str, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    with pytest.raises(RunUnavailableError, match=f"the Ray at {address} has no run"):
        find_run(address)

    def up(name: str) -> tuple[RunFile, Any]:
        """A run as far as another process sees it, that has not recorded itself yet; its pool."""
        (tmp_path / name).mkdir()
        part = ray_here(f"{cluster}-{name}")
        pool = start_data_pool(name=POOL_NAME, namespace=part.namespace)
        parts = {"ray": part, "pool": PoolPart(name=POOL_NAME)}
        return begin(live(tmp_path / name, f"run.name={name}")).model_copy(update=parts), pool

    one, pool_of_one = up("one")
    with pytest.raises(RunUnavailableError, match=f"the Ray at {address} has no run"):
        find_run(address)  # it is still starting
    record_run(one, f"{cluster}-one")
    assert find_run(address) == (tmp_path / "one", one)
    two, pool_of_two = up("two")
    record_run(two, f"{cluster}-two")
    (tmp_path / "two" / RUN_FILE).unlink()  # as on a machine that has no such folder
    with pytest.raises(RunUnavailableError, match=f"several runs; name one: {address}/one in .*"):
        find_run(address)
    assert find_run(f"{address}/two") == (tmp_path / "two", two)
    async with stepwell.connect(f"{address}/two") as pool:
        await pool.open_group("of two", 2)
        assert [group.prompt_uid for group in (await pool.list_groups()).items] == ["of two"]
    with pytest.raises(RunUnavailableError, match="has no run 'three'"):
        find_run(f"{address}/three")
    ray.kill(pool_of_two)  # as Ray does when a run is killed
    assert find_run(address) == (tmp_path / "one", one)
    ray.kill(pool_of_one)
    with pytest.raises(RunUnavailableError, match=f"the Ray at {address} has no run"):
        find_run(address)


def test_engines_begin_with_the_weights_of_the_last_run_if_it_had_the_same_model(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights" / "v3"
    weights.mkdir(parents=True)
    begin(live(tmp_path))
    for trains in (False, True):
        forget_weights(live(tmp_path), trains=trains)
        assert weights.exists()
    same = os.path.relpath(live(tmp_path).model.path)
    forget_weights(live(tmp_path, f"model.path={same}"), trains=False)
    assert weights.exists()
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text("{}")
    forget_weights(live(tmp_path, f"model.path={other}"), trains=False)
    assert not weights.exists()
    disk = tmp_path / "disk"
    (disk / "v3").mkdir(parents=True)
    (disk / "current.json").write_text("{}")
    (tmp_path / "weights").symlink_to(disk)
    forget_weights(live(tmp_path, f"model.path={other}"), trains=False)
    assert not (tmp_path / "weights").exists()
    assert (disk / "v3").is_dir()

    weights.mkdir(parents=True)
    forget_weights(load_config("quickstart", [f"run.dir={tmp_path}"]), trains=True)
    assert not weights.exists()  # no agent comes before the checkpoint's weights are published

    store = WeightStore(weights.parent, base=other)
    store.commit(4, store.write_again(4, 0))
    forget_weights(load_config("quickstart", [f"run.dir={tmp_path}"]), trains=True)
    assert store.path(4).exists(), "the checkpoint may not know of a roll-back"
