"""The example plug-in, installed as a user would, and used."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from stepwell.backends.base import build_backend
from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import GenerateRequest, PromptPictures, Sampling
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import BackendConfigError, EngineRequestError
from stepwell.backends.registry import BACKEND_NAMES, ENGINE_NAMES
from stepwell.cli.main import main
from stepwell.config.keys import show_keys
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient
from stepwell.datapool.types import Group, Trajectory
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.losses import make_loss_fn
from stepwell.trainer.algorithms.off_policy.correction import correct
from stepwell.trainer.config import AlgorithmConfig
from stepwell.trainer.errors import ConfigError
from tests.builders import step

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the plug-in has been installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLES / "plugin", source)  # a build leaves files in its source
    subprocess.run([*PIP, *OFFLINE, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def read(paths: list[Path]) -> list[dict[str, object]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_command_lists_both_with_their_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = {line.split()[0]: line for line in lines}
    for name in ("jsonl", "background", "lines", "hinge", "quantile", "tempered"):
        assert "ready" in rows[name]
        assert "stepwell-example 0.1.0" in rows[name]
    assert "built in" in rows["torch"]


def test_a_conversation_is_one_line_and_its_reward_counts_once(tmp_path: Path) -> None:
    steps = [
        step([7, 8], [9], "t", reward=0.25, policy_version=5),
        step([7, 8, 9, 3], [5, 6], "t", reward=1.0, index=1, parent_index=0, policy_version=4),
    ]
    (line,) = read(build_backend("jsonl", tmp_path).convert(steps))  # type: ignore[attr-defined]
    assert line == {
        "prompt_uid": "p",
        "trajectory_uid": "t",
        "reward": 1.25,
        "policy_version": 4,
        "input_ids": [7, 8, 9, 3, 5, 6],
        "loss_mask": [0, 0, 1, 0, 1, 1],
        "rollout_log_probs": [None, None, -0.5, None, -0.5, -0.5],
    }


def test_branches_share_a_reward_and_train_each_token_once(tmp_path: Path) -> None:
    steps = [
        step([1], [2], "t"),
        step([1, 2, 3], [4], "t", index=1, parent_index=0),
        step([1, 2, 5], [6], "t", index=2, parent_index=0, reward=1.0),
    ]
    lines = read(build_backend("jsonl", tmp_path).convert(steps))  # type: ignore[attr-defined]
    assert [line["loss_mask"] for line in lines] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert [line["reward"] for line in lines] == [1.0, 1.0]


def test_what_is_not_known_is_null_and_never_zero(tmp_path: Path) -> None:
    (line,) = read(
        build_backend("jsonl", tmp_path).convert(  # type: ignore[attr-defined]
            [step([1], [2], "t", rollout_log_probs=None)]
        )
    )
    assert (line["reward"], line["rollout_log_probs"]) == (None, [None, None])
    assert line["loss_mask"] == [0, 1]


async def test_a_group_that_the_pool_delivers_again_replaces_its_file(tmp_path: Path) -> None:
    backend = build_backend("jsonl", tmp_path)
    async with DataPoolClient.local() as pool:
        for prompt in ("p1", "p2"):
            await pool.open_group(prompt, 2)
            for i in range(2):
                uid = f"{prompt}-{i}"
                await pool.submit_step(step([1], [2], uid, prompt_uid=prompt, reward=float(i)))
                await pool.complete_trajectory(uid)
        first = await pool.lease_batch(batch_size=1)
        assert first is not None
        backend.convert(first.steps)
        await pool.nack(first.lease_id)  # the exporter was killed before its ack
        for _ in range(2):
            lease = await pool.lease_batch(batch_size=1)
            assert lease is not None
            backend.convert(lease.steps)
            await pool.ack(lease.lease_id)
    lines = read(files(tmp_path))
    assert sorted(str(line["trajectory_uid"]) for line in lines) == ["p1-0", "p1-1", "p2-0", "p2-1"]


def test_a_training_run_with_it_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["trainer.backend=jsonl", f"run.dir={tmp_path / 'run'}", "logging.console=quiet"]
    assert main(["train", "--config", "quickstart", *overrides]) == 2
    assert "'jsonl', which does not implement compute_log_probs" in capsys.readouterr().err


@pytest.mark.slow
def test_its_engine_serves_at_low_priority(tmp_path: Path) -> None:
    config = EngineConfig(
        kind="background", model_path=EXAMPLES / "quickstart" / "model", startup_timeout_s=240
    )
    supervisor = Supervisor(config, tmp_path)
    try:
        supervisor.start()
        engine = psutil.Process(supervisor.pid)
        assert engine.nice() == min(19, psutil.Process().nice() + 10)
        assert engine.environ()["OMP_WAIT_POLICY"] == "passive"
    finally:
        supervisor.stop()


async def test_an_engine_in_one_file_refuses_what_it_cannot_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "plugin")
    pictures = PromptPictures([], dict, 1)  # type: ignore[arg-type]  # never read
    ids, settings = np.array([1], np.int32), Sampling(1, 1.0)
    config = EngineConfig(kind="stepwell_lines:Lines", urls=("http://127.0.0.1:9",))
    async with connect(config, config.urls[0]) as engine:
        with pytest.raises(EngineRequestError, match="takes no pictures"):
            await engine.sample(
                GenerateRequest("r", ids, settings, 1, pictures=pictures), lambda _: None
            )


def test_without_the_package_its_names_are_unknown(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(site)])
    with pytest.raises(BackendConfigError, match="is 'jsonl'"):
        BACKEND_NAMES.entry("jsonl")
    with pytest.raises(BackendConfigError, match="is 'background'"):
        ENGINE_NAMES.entry("background")


# --- mathematics

TOKENS = {
    "coef": torch.full((2,), 0.5),
    "weights": torch.ones(2),
    "prox_log_probs": torch.zeros(2),
    "advantages": torch.tensor([2.0, -1.0]),
}


def algorithm(*options: str) -> AlgorithmConfig:
    return load_config("quickstart", [f"algorithm.{o}" for o in options]).algorithm


@pytest.mark.parametrize("name", ["hinge", "stepwell_hinge:HINGE"])
def test_a_package_adds_a_policy_loss_with_a_hyper_parameter(name: str) -> None:
    """r = e^0.1 for both: the good token has 0.2 - 0.105 to go, the bad one 0.2 + 0.105."""
    loss = algorithm(f"loss.policy={name}", "loss.options.margin=0.2").loss
    output = make_loss_fn(loss)(torch.tensor([0.1, 0.1]), None, TOKENS)
    gone = math.exp(0.1) - 1
    assert float(output.loss) == pytest.approx(0.5 * 2 * (0.2 - gone) + 0.5 * (0.2 + gone))
    assert float(output.metrics["policy/hinge_frac"].total) == 0
    near = algorithm(f"loss.policy={name}", "loss.options.margin=0.1").loss
    output = make_loss_fn(near)(torch.tensor([0.1, 0.1]), None, TOKENS)
    assert float(output.metrics["policy/hinge_frac"].total) == 1


@pytest.mark.parametrize("name", ["quantile", "stepwell_quantile:QUANTILE"])
def test_a_package_adds_an_advantage_with_a_hyper_parameter(name: str) -> None:
    steps = [step([1], [2], f"t{i}", reward=float(r)) for i, r in enumerate((0, 1, 2, 9))]
    group = Group("p", tuple(Trajectory(s.trajectory_uid, "p", (s,)) for s in steps))
    for options, baseline in (([], 1.5), (["adv_options.at=1"], 9.0)):
        config = algorithm(f"adv_estimator={name}", *options)
        got = compute_advantages([group], config).columns["advantages"]
        assert got.tolist() == [r - baseline for r in (0, 1, 2, 9)]


@pytest.mark.parametrize("name", ["tempered", "stepwell_tempered:TEMPERED"])
def test_a_package_adds_an_off_policy_method_with_a_hyper_parameter(name: str) -> None:
    config = algorithm(
        f"off_policy.method={name}", "off_policy.options.power=0.5", "off_policy.band=[0.0,4.5]"
    )
    mu = torch.log(torch.tensor([0.25, 0.1, 0.5, math.nan]))
    weights, _ = correct(
        torch.log(torch.tensor([1.0, 0.9, 0.5, 0.5])),
        mu,
        [1, 1, 1, 1],
        [5.0, 5.0, 0.0, 5.0],
        staleness_threshold=1.0,
        config=config.off_policy,
    )
    # √4; 9 is out of the band; 1; without μ it is dropped.
    assert weights.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("loss.policy=hinge", "loss.options.margin=-1"),
            "algorithm.loss.options.margin is -1; it should be greater than 0",
        ),
        (
            ("loss.policy=hinge", "loss.options.margn=1"),
            "margn is unknown to 'hinge'; did you mean margin? it has margin",
        ),
        (
            ("adv_estimator=quantile", "adv_options.at=2"),
            "algorithm.adv_options.at is 2; it should",
        ),
        (("loss.policy=hing",), "policy is 'hing'; did you mean hinge?"),
        (
            ("off_policy.method=stepwell_tempered:tempered",),
            "method 'stepwell_tempered:tempered' is no OffPolicyMethod",
        ),
        (("loss.options.margin=0.1",), "margin is unknown to 'ppo'; it has none"),
    ],
)
def test_a_wrong_hyper_parameter_is_told_by_key_value_and_remedy(
    options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        algorithm(*options)
    assert message in str(e.value)


def test_the_hyper_parameters_of_a_package_are_listed_and_survive_the_runs_record() -> None:
    config = load_config("quickstart", ["algorithm.loss.policy=hinge"])
    told = show_keys("algorithm.loss.options.*", config, width=100)
    assert "algorithm.loss.options.margin: float > 0, default 0.2, for kind hinge" in told
    assert "algorithm.loss.options.tau_positive: float > 0, default 1.0, for kind sapo" in told
    assert "for kind clip_cov or kl_cov" in told
    assert RunConfig.model_validate(config.model_dump()) == config
