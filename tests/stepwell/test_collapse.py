"""A score that collapses is a finding, at the run's end and in `doctor`, and names its suspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from stepwell import load_config
from stepwell.datapool.sealed import sealed
from stepwell.show import doctor
from stepwell.track.collapse import find_collapse
from stepwell.track.console import Display


def records(*scores: float, **newest: Any) -> list[dict[str, Any]]:
    """Lines of a run that was evaluated every twenty steps, the last with `newest`, too."""
    lines = [{"step": 20 * i, "val/score": score} for i, score in enumerate(scores)]
    return [*lines[:-1], lines[-1] | newest]


def test_a_score_that_falls_to_nothing_names_the_step_the_size_of_the_update_and_the_rate() -> None:
    found = find_collapse(records(0.1, 0.35, 0.0, **{"lr": 0.01, "lora/relative_norm": 1.5}))
    assert found == (
        "the evaluation score fell from 0.35 to 0.00 after step 20; |sBA|/|W| 1.5: "
        "the learning rate (0.01) is the first suspect"
    )


@pytest.mark.parametrize("scores", [(0.3, 0.9), (0.9, 0.8), (0.04, 0.0), (-1.0, -3.0), (0.5,)])
def test_learning_noise_and_penalties_are_no_collapse(scores: tuple[float, ...]) -> None:
    assert find_collapse(records(*scores, lr=0.01)) is None


def test_four_conversations_of_live_traffic_are_no_collapse() -> None:
    lines = records(1.0, 0.9, 0.0, lr=0.01)
    live = [line | {"val/pooled/rollouts": 4.0} for line in lines]
    assert find_collapse(lines) is not None
    assert find_collapse(live) is None
    enough = [line | {"val/pooled/score": line["val/score"]} for line in live]
    assert find_collapse(enough) is not None


def test_without_evaluations_the_rewards_of_training_are_looked_at() -> None:
    rewards = [0.4] * 5 + [0.6] * 5 + [0.0] * 5
    lines = [{"step": i, "reward/mean": reward} for i, reward in enumerate(rewards, 1)]
    found = find_collapse(lines)
    assert found == "the training reward fell from 0.60 to 0.00 after step 10"


def test_doctor_looks_at_the_score_of_the_run(tmp_path: Path) -> None:
    lines = records(0.35, 0.0, lr=0.01)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(sealed(orjson.dumps(r)) for r in lines))
    (found,) = doctor.learning(tmp_path / "metrics.jsonl")
    assert (found.state, "fell from 0.35 to 0.00 after step 0" in found.text) == ("warning", True)
    assert "backend.lr" in found.remedy


def test_the_last_screen_has_the_finding_and_nothing_that_is_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = dict.fromkeys(("eval_before", "eval_after", "tool_use_before", "tool_use_after"))
    summary |= {"optimizer_steps": 10, "wall_s": 5.0, "trajectories_trained": 160, "rewards": []}
    summary |= {"steps_per_trajectory_mean": None, "off_policy_share": None}
    summary |= {"peak_memory_gb": 1.0, "finding": "the training reward fell from 0.60 to 0.00"}
    Display("sft1", "plain").summary(summary, tmp_path)
    shown = capsys.readouterr().out
    assert "10 optimizer steps in 5 s, 160 trajectories, peak memory 1.0 GB" in shown
    assert "warning: the training reward fell" in shown


def test_adapters_get_ten_times_the_rate_unless_one_is_set() -> None:
    bare = ["run.name=x", "model.path=configs", "rollout.agent=a:b", "data.train.path=x.jsonl"]
    full = load_config(None, [*bare, "data.train.kind=jsonl"], here=False)
    adapted = load_config(
        None, [*bare, "data.train.kind=jsonl", "backend.lora.rank=16"], here=False
    )
    assert adapted.backend.lr == pytest.approx(10 * full.backend.lr)
    given = load_config("instructions", here=False)
    assert given.backend.lr == 5e-4


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["backend.lora.rank=16"], True),
        (["backend.lora.rank=16", "backend.lr=1e-3"], False),
        ([], False),
    ],
)
def test_a_presets_rate_of_full_fine_tuning_is_warned_of_with_adapters(
    overrides: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load_config("quickstart", overrides)
    said = [r.getMessage() for r in caplog.records if "backend.lora" in r.getMessage()]
    assert len(said) == warns
    assert not warns or "backend.lr=0.001" in said[0]
