"""Figures reach wandb, TensorBoard and Prometheus, secrets do not."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from prometheus_client.parser import text_string_to_metric_families

from stepwell.config.load import load_config
from stepwell.run import checks
from stepwell.track.prometheus import TRAINER, PrometheusTracker
from stepwell.track.trackers import build_trackers
from stepwell.track.verl_names import (
    DUAL_CLIP,
    KL_COEF,
    KL_LOSS,
    KL_REWARD,
    NAMES,
    POLICY_LOSS,
    PPO_KL,
    REWARDS,
    TOKEN_MEAN,
)
from stepwell.trainer.errors import ConfigError, TrainerError
from stepwell.trainer.metrics import METRICS, MetricsWriter, read_metrics
from tests.documented_metrics import documented


def writer(folder: Path, *overrides: str) -> MetricsWriter:
    chosen = [f"run.dir={folder}", "logging.wandb=disabled", *overrides]
    return MetricsWriter(folder, build_trackers(folder, load_config("quickstart", chosen)))


def events(folder: Path) -> dict[tuple[str, int], Any]:
    """(tag, step) -> scalar or text of the event files, read record by record."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[tuple[str, int], Any] = {}
    for file in folder.glob("events.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                text = value.tensor.string_val
                found[value.tag, event.step] = text[0].decode() if text else value.simple_value
    return found


def test_tensorboard_gets_every_number_and_the_tables(tmp_path: Path) -> None:
    with writer(tmp_path, "logging.tensorboard=true") as metrics:
        metrics.write({"step": 7, "loss": 0.5, "reward/mean": math.inf, "name": "x"})
        metrics.evaluation(5, {"val/step": 5.0, "val/score": 0.75})  # ended two steps later
        metrics.table(7, "val/samples", ["prompt", "score"], [{"prompt": "1|2\n3", "score": 1.0}])
    found = events(tmp_path / "tensorboard")
    assert found["loss", 7] == 0.5
    assert found["val/score", 5] == 0.75
    assert "reward/mean" not in {tag for tag, _ in found}
    table = next(text for (tag, step), text in found.items() if tag.startswith("val/samples"))
    assert table.splitlines() == ["| prompt | score |", "| --- | --- |", "| 1\\|2 3 | 1.0 |"]


@pytest.mark.slow
def test_a_table_may_have_answers_of_several_types(tmp_path: Path) -> None:
    """wandb takes one type a column, also of what is inside."""
    answers = ["4", 4, None, [1, 2], ["a"], {"inputs": ["1"]}, {"inputs": [1]}, True, 2**70]
    rows = [{"answer": answer, "reward": 1.0, "n": i} for i, answer in enumerate(answers)]
    with writer(tmp_path, "logging.wandb=offline", "logging.tensorboard=true") as metrics:
        metrics.table(7, "val/samples", ["answer", "reward", "n"], rows)
    (text,) = events(tmp_path / "tensorboard").values()
    assert len(text.splitlines()) == 2 + len(answers)
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/val/samples_*.json")
    data = json.loads(table.read_text())["data"]
    assert [row[0] for row in data] == [None if a is None else str(a) for a in answers]
    assert [row[1:] for row in data] == [[1.0, i] for i in range(len(answers))]


VERL = {
    "": {"critic/score/mean": 0.25, "critic/rewards/mean": 0.25, "actor/pg_loss": 0.5},
    "algorithm.kl.place=loss": {"critic/rewards/mean": 0.25, "actor/kl_loss": 0.125},
    "algorithm.kl.place=reward": {"critic/score/mean": 0.25, "actor/reward_kl_penalty": 0.125},
    "algorithm.loss.entropy_coeff=0.1": {"actor/grad_norm": 2.0, "critic/score/mean": 0.25},
}


@pytest.mark.parametrize("setting", VERL)
def test_verls_names_stand_beside_ours_where_the_figure_is_the_same(
    tmp_path: Path, setting: str
) -> None:
    chosen = ["logging.tensorboard=true", "logging.names=verl", *filter(None, [setting])]
    record = {"loss": 0.5, "grad_norm": 2.0, "reward/mean": 0.25, "kl/ref": 0.125}
    record |= {"policy/clip_frac_low": 0.25, "policy/clip_frac_high": 0.5, "time/step_s": 4.0}
    with writer(tmp_path, *chosen) as metrics:
        metrics.write({"step": 7, **record})
        metrics.evaluation(5, {"val/step": 5.0, "val/gsm8k/mean@4": 0.75})
        [kept] = [each for each in metrics.read() if each["step"] == 7]
        assert kept.keys() == {"step", *record}, "the file has ours alone"
    found = events(tmp_path / "tensorboard")
    for name, value in {**record, **VERL[setting]}.items():
        assert found[name, 7] == value
    assert found["actor/pg_clipfrac", 7] == 0.75
    assert found["timing_s/step", 7] == found["perf/time_per_step", 7] == 4.0
    assert found["val-core/gsm8k/reward/mean_4", 5] == 0.75, "TensorBoard has no @"
    assert (("actor/pg_loss", 7) in found) is (setting == "")
    assert (("critic/rewards/mean", 7) in found) is (setting != "algorithm.kl.place=reward")


ANOTHER_FIGURE = {
    "algorithm.loss.policy=kl_cov": {
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
    },
    "algorithm.loss.policy=geo_mean": {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"},
    "algorithm.loss.policy=cispo": {"actor/pg_clipfrac_lower"},
    "algorithm.loss.loss_agg_mode=trajectory-mean": {"actor/entropy"},
}
"""Names that verl gives a figure which ours is not, by the setting."""


@pytest.mark.parametrize("setting", ANOTHER_FIGURE)
def test_a_figure_that_verl_takes_another_way_does_not_get_its_name(
    tmp_path: Path, setting: str
) -> None:
    ours = {"policy/kl_k1": 0.1, "policy/entropy": 0.2, "policy/dual_clip_frac": 0.3}
    ours |= {"policy/clip_frac_low": 0.25, "policy/clip_frac_high": 0.5}
    names = {"actor/ppo_kl", "actor/entropy", "actor/pg_clipfrac_lower", "actor/pg_clipfrac"}
    with writer(tmp_path, "logging.tensorboard=true", "logging.names=verl", setting) as metrics:
        metrics.write({"step": 7, **ours})
    given = {tag for tag, _ in events(tmp_path / "tensorboard")} & names
    assert given == names - ANOTHER_FIGURE[setting]


def test_the_page_names_verls_figures_as_trackers_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| verl: `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    of_kl = (KL_COEF, KL_LOSS, KL_REWARD, PPO_KL)
    tables = (NAMES, REWARDS, POLICY_LOSS, TOKEN_MEAN, DUAL_CLIP, *of_kl)
    ours = {(v, name) for table in tables for name, vs in table.items() for v in vs}
    assert ours == set(rows[:-1])
    known = documented(always=True) | documented(always=False)
    assert {name for _, name in ours} <= known


def test_prometheus_reads_the_newest_figures_under_names_that_stay(tmp_path: Path) -> None:
    tracker = PrometheusTracker("127.0.0.1", 0)
    with MetricsWriter(tmp_path, [tracker]) as metrics:
        assert "stepwell_trainer_optimizer_steps_total 0.0" in scraped(tracker)
        metrics.write({"step": 7, "loss": 0.5, "reward/mean": 0.25, "time/train_s": 2.0})
        metrics.write({"step": 8, "loss": -0.5, "name": "x", "reward/gsm8k/mean": 1.0})
        tracker.write(5, {"step": 5, "val/score": 0.75})
        page = scraped(tracker)
    families = {f.name: f for f in text_string_to_metric_families(page)}
    found = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert found["stepwell_trainer_optimizer_steps_total",] == 8
    assert found["stepwell_trainer_loss",] == -0.5
    assert found["stepwell_trainer_reward_mean",] == 0.25
    assert found["stepwell_trainer_phase_seconds", "train"] == 2.0
    assert found["stepwell_trainer_metric", "reward/gsm8k/mean"] == 1.0
    assert found["stepwell_trainer_metric", "val/score"] == 0.75
    assert {(f.name, f.type, f.documentation) for f in families.values()} >= {
        (f.name, f.kind, f.help) for f in TRAINER
    }
    with pytest.raises(OSError, match="refused"):
        scraped(tracker)


def scraped(tracker: PrometheusTracker) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=5) as page:
        return str(page.read().decode())


def test_a_port_that_is_taken_is_told_before_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config("quickstart", [f"logging.prometheus_port={port}"])
        with pytest.raises(ConfigError, match=f"logging.prometheus_port is {port}, which cannot"):
            checks.prometheus(config)


@pytest.mark.parametrize("names", ["stepwell", "verl"])
def test_wandbs_run_ends_where_a_later_tracker_cannot_begin(tmp_path: Path, names: str) -> None:
    """One that nobody ends is a live run in wandb until it is missed there."""
    import wandb

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"logging.prometheus_port={taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"logging\.prometheus_port"):
            writer(tmp_path, "logging.wandb=offline", f"logging.names={names}", port)
    assert wandb.run is None


def test_wandb_is_offline_without_a_key_and_the_same_run_in_every_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for step in (1, 2):
        with writer(tmp_path, "logging.wandb=auto") as metrics:
            metrics.write({"step": step, "loss": 0.5})
            metrics.evaluation(step - 1, {"val/step": step - 1, "val/score": 0.5})
            metrics.table(step - 1, "val/samples", ["prompt"], [{"prompt": "1 + 1"}])
    runs = [p.name for p in (tmp_path / "wandb").glob("offline-run-*")]
    # offline-run-TIME-ID, and -1 behind it where both began in one second
    assert len({name.split("-")[3] for name in runs}) == 1
    assert all((tmp_path / "wandb" / name).glob("*.wandb") for name in runs)


def test_a_wandb_that_cannot_begin_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def init(**settings: Any) -> None:
        raise wandb.Error("Run initialization has timed out")  # as where no server is reached

    monkeypatch.setattr(wandb, "init", init)
    with (
        pytest.raises(TrainerError, match=r"wandb is 'online', and wandb cannot begin .*timed out"),
        writer(tmp_path, "logging.wandb=online"),
    ):
        pass


KILLED = """
import logging, sys, time
from pathlib import Path
import psutil
from tests.stepwell.test_trackers import writer

logging.basicConfig(format="%(name)s: %(message)s")
with writer(Path(sys.argv[1]), "logging.wandb=offline", "logging.tensorboard=true") as metrics:
    metrics.write({"step": 1, "loss": 0.5})
    children = psutil.Process().children(recursive=True)
    services = [child for child in children if child.name().startswith("wandb")]
    for service in services:
        service.kill()
        service.wait()
    assert services
    for step in range(2, 12):  # the first may still reach the socket's buffer
        metrics.write({"step": step, "loss": 0.5})
        time.sleep(0.02)
    metrics.table(11, "val/samples", ["prompt"], [{"prompt": "1"}])
"""


@pytest.mark.slow
def test_a_run_goes_on_where_wandbs_service_was_killed(tmp_path: Path) -> None:
    # A service of its own: a process and its children share one, by their environment.
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("stepwell.track")]
    assert [line.partition(" (")[0] for line in told] == [
        "stepwell.track.trackers: wandb got not all figures"
    ]
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == [*range(1, 12)]
    seen = {step for tag, step in events(tmp_path / "tensorboard") if tag == "loss"}
    assert seen == {*range(1, 12)}


def wandb_records(data: bytes) -> Iterator[Any]:
    """Records of an offline run's file: after 7 bytes of header blocks of 32 KiB, in them chunks of
    CRC, length, kind (1 whole, 2 first, 3 middle, 4 last) and bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        left = 32_768 - at % 32_768
        if left < 7 or kind == 0:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Name -> value of each row of an offline run's file."""
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    while True:  # wandb's service writes it after the run has finished
        with suppress(DecodeError):  # in the middle of a write
            records = list(wandb_records(file.read_bytes()))
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                break
        time.sleep(0.05)
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_a_file_of_wandb_has_our_names_and_verls(tmp_path: Path) -> None:
    record = {"loss": 0.5, "grad_norm": 2.0, "reward/mean": 0.25, "time/step_s": 4.0}
    with writer(tmp_path, "logging.wandb=offline", "logging.names=verl") as metrics:
        metrics.evaluation(0, {"val/step": 0.0, "val/gsm8k/mean@4": 0.5})
        metrics.write({"step": 1, **record})
        metrics.table(1, "train/samples", ["prompt"], [{"prompt": "1 + 1"}])
        metrics.write({"step": 2, **record})
    before, first, second = wandb_history(tmp_path)
    assert before["val/gsm8k/mean@4"] == before["val-core/gsm8k/reward/mean@4"] == 0.5
    for step, row in enumerate((first, second), 1):
        assert {**record, "step": step}.items() <= row.items()
        assert row["_step"] == row["training/global_step"] == step
        assert row["actor/pg_loss"] == 0.5
        assert row["actor/grad_norm"] == 2.0
        assert row["critic/score/mean"] == row["critic/rewards/mean"] == 0.25
        assert row["timing_s/step"] == row["perf/time_per_step"] == 4.0
    assert first["train/samples/nrows"] == 1, "a table is of its step"


def test_wandb_whose_step_cannot_go_back_draws_evaluations_over_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    defined: dict[str, Any] = {}
    run = SimpleNamespace(
        finish=lambda **_: None,
        define_metric=lambda name, **given: defined.update({name: given}),
        log=lambda record, step: logged.append((step, record)),
    )
    fake = SimpleNamespace(init=lambda **_: run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with writer(tmp_path, "logging.wandb=offline") as metrics:
        metrics.write({"step": 7, "loss": 0.5})
        metrics.evaluation(5, {"val/step": 5.0, "val/score": 0.75})
        metrics.write({"step": 8, "loss": 0.25})
    assert [step for step, _ in logged] == [7, 7, 8]
    assert logged[1][1] == {"val/step": 5.0, "val/score": 0.75}
    assert defined["val/*"] == {"step_metric": "val/step"}


def test_wandb_is_told_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    run = SimpleNamespace(finish=lambda **_: None, define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(init=lambda **given: told.update(given) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    reward = (
        "{function: remote, kwargs: {url: 'http://r', headers: {Authorization: Bearer s3cret}}}"
    )
    overrides = ("logging.wandb=offline", f"rollout.reward={reward}", "engine.env.HF_TOKEN=s3cret")
    with writer(tmp_path, *overrides):
        assert "s3cret" not in str(told)
    assert told["config"]["rollout"]["reward"]["kwargs"]["url"] == "http://r"
    assert told["config"]["data"]["train"]["kind"] == "reasoning_gym"
