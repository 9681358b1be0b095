"""Checkpoints are whole or absent, old ones make room, and the one that was asked for is found."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.torch.backend import TorchBackend
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig, RunSection
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.sealed import seal
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.types import Group
from stepwell.gateway.config import LAST_START
from stepwell.layout import CHECKPOINTS
from stepwell.run.folder import begin, only_trainer_in
from stepwell.run.serve import start_over
from stepwell.run.train import _finished
from stepwell.track.summary import write_summary
from stepwell.trainer.checkpoint import (
    CheckpointStore,
    export_checkpoint,
    rng_state,
    set_rng_state,
)
from stepwell.trainer.errors import CheckpointError, ConfigError, NoCheckpointError
from stepwell.trainer.loop import checkpoint_due
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import record_batch

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def latest(store: CheckpointStore) -> dict[str, Any] | None:
    path = store.find("auto")
    return None if path is None else store.load(path)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(10, {"weights": torch.arange(3), "pending": [{"question": "1 + 1"}]})
    state = latest(store)
    assert state is not None
    assert state["weights"].tolist() == [0, 1, 2]
    assert state["pending"] == [{"question": "1 + 1"}]


def test_a_flipped_bit_in_any_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.save(10, {"weights": torch.arange(3000.0)}, {"backend": "torch"})
    store.score(10, 0.5)
    sound = {p: p.read_bytes() for p in (*path.iterdir(), tmp_path / "scores.json")}
    assert len(sound) == 4
    for k, (file, data) in enumerate(sorted(sound.items()) * 20):
        damaged = bytearray(data)
        damaged[random.Random(k).randrange(len(data))] ^= 1 << k % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=re.escape(str(file))):
            store.scores(), store.load(path), store.about(path)
        file.write_bytes(data)
    for file in path.iterdir():
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(DamagedFileError, match=re.escape(str(file))):
            store.load(path)
        file.write_bytes(data)
    assert store.load(path)["weights"].tolist() == list(range(3000))


def test_scores_that_are_gone_are_missed_until_somebody_goes_on_without_them(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    store.save(1, {})
    store.score(1, 0.5)
    (tmp_path / "scores.json").unlink()
    with pytest.raises(CheckpointError, match=r"scores\.json cannot be read .* write \{\} into it"):
        store.save(2, {})
    (tmp_path / "scores.json").write_text("{}\n")
    store.save(3, {})
    store.score(3, 0.4)
    assert store.scores() == {3: 0.4}


def test_a_run_is_not_started_over_while_a_pool_or_a_trainer_lives_in_its_folder(
    tmp_path: Path,
) -> None:
    for pool in (tmp_path / "pool", tmp_path / "pool" / "shard-1"):
        journal = Journal(pool, "process")
        journal.append("train", "step", b"head")
        journal.flush()
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} has the pool .* run.name"):
            start_over(tmp_path)
        journal.close()
    with only_trainer_in(tmp_path), pytest.raises(ConfigError, match=r"trains in"):
        start_over(tmp_path)  # attached, it outlived the run that was served
    assert (tmp_path / "pool" / "pool.acked").exists()
    (tmp_path / LAST_START).touch()
    start_over(tmp_path)
    assert not (tmp_path / "pool").exists()
    assert not (tmp_path / LAST_START).exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_that_is_started_over_has_no_journal_elsewhere_either(
    tmp_path: Path, shards: int
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "fast"
    folders = [elsewhere] if shards == 1 else [elsewhere / f"shard-{k}" for k in range(shards)]
    run.mkdir()
    begin(load_config("quickstart", [f"run.dir={run}", f"pool.journal_dir={elsewhere}"]))
    for folder in folders:
        journal = Journal(folder, "process")
        journal.append("train", "step", b"head")
        journal.flush()
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} has the pool .* run.name"):
            start_over(run)
        journal.close()
    (elsewhere / "mine").write_text("")
    (elsewhere / "shards").write_text("")
    shutil.copytree(run, tmp_path / "copy")
    start_over(tmp_path / "copy")
    assert all((folder / "pool.acked").is_file() for folder in folders)
    start_over(run)
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]


def test_the_newest_is_found_by_number_and_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (9, 10, 100):
        store.save(step, {"step": step})
    assert latest(store) == {"step": 100}


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, {})
    assert names(tmp_path) == ["step_2", "step_3"]


def test_the_best_are_kept_besides_the_last_and_the_later_of_equals(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=2)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.5), (5, 0.2)):
        store.save(step, {})
        store.score(step, score)
    assert store.steps() == [2, 4, 5]
    assert store.best() == 2


def test_a_score_that_comes_later_than_the_next_checkpoint_still_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_best=1)
    store.save(1, {})
    store.save(2, {})
    store.score(1, 0.7)
    store.save(3, {})
    assert store.steps() == [1, 2, 3]
    assert CheckpointStore(tmp_path).scores() == {1: 0.7}


def test_an_evaluation_is_scored_while_another_thread_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {})
    ranked, both = CheckpointStore._ranked, threading.Barrier(2)

    def look(self: CheckpointStore) -> list[int]:
        with suppress(threading.BrokenBarrierError):  # one waits for the other to end
            both.wait(0.5)
        return ranked(self)

    with ThreadPoolExecutor(1) as beside:
        monkeypatch.setattr(CheckpointStore, "_ranked", look)
        saved = beside.submit(store.save, 2, {})
        until_there = time.monotonic() + 10
        while 2 not in store.steps() and time.monotonic() < until_there:
            time.sleep(0.01)
        store.score(1, 0.5)
        saved.result()
    assert store.steps() == [2]
    assert store.scores() == {1: 0.5}


def test_an_evaluation_that_ends_while_ranks_save_prunes_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two threads, of which each may find the checkpoint that the other removes."""
    store, beside = (CheckpointStore(tmp_path, keep=1) for _ in range(2))
    store.save(1, {})
    scores = store.scores

    def scored_meanwhile() -> dict[int, float]:
        beside.score(2, 0.5)
        return scores()

    monkeypatch.setattr(store, "scores", scored_meanwhile)
    store.save(2, {"which": "new"})
    assert names(tmp_path) == ["step_2"]
    assert latest(beside) == {"which": "new"}


@pytest.mark.parametrize("died_after", ["the draft", "the first rename", "the second rename"])
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_after: str
) -> None:
    """Also of the very step that is saved once more: then the older one must not go first."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(2, {"which": "old"})
    renames = 0
    rename, rmtree = Path.rename, shutil.rmtree

    class KilledError(BaseException):
        pass

    def counted(self: Path, target: Path) -> Path:
        nonlocal renames
        if renames == ["the draft", "the first rename", "the second rename"].index(died_after):
            raise KilledError
        renames += 1
        return rename(self, target)

    def removed(path: Path, ignore_errors: bool = False) -> None:
        if renames == 2 and path.suffix == ".old":
            raise KilledError
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(Path, "rename", counted)
    monkeypatch.setattr(shutil, "rmtree", removed)
    with pytest.raises(KilledError):
        store.save(2, {"which": "new"})
    monkeypatch.undo()

    after = CheckpointStore(tmp_path, keep=1)
    expected = "new" if died_after == "the second rename" else "old"
    assert latest(after) == {"which": expected}
    after.set_aside(after=1)
    again = CheckpointStore(tmp_path, keep=1)
    assert again.steps() == [], "what made way is gone: it comes back in nobody's place"
    (tmp_path / "step_2.aside").rename(tmp_path / "step_2")
    after.save(2, {"which": "newer"})
    assert latest(after) == {"which": "newer"}
    after.save(3, {})
    assert after.steps() == [3]


def test_an_interrupted_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"step": 1})
    (tmp_path / "step_2.tmp").mkdir()
    (tmp_path / "step_2.tmp" / "state.pt").write_bytes(b"half")
    assert latest(store) == {"step": 1}
    store.save(3, {"step": 3})
    assert latest(store) == {"step": 3}
    assert names(tmp_path) == ["step_1", "step_3"]


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "not there", keep=1)
    assert store.find("auto") is None
    assert store.find("never") is None
    store.score(0, 0.5)  # evaluated before anything was saved
    assert not (tmp_path / "not there").exists()


def test_a_run_goes_back_to_the_step_it_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        store.save(step, {"step": step})
        store.score(step, step / 10)
    for asked in (2, tmp_path / "step_2"):
        path = store.find(asked)
        assert path is not None
        assert store.load(path) == {"step": 2}
    store.set_aside(after=2)
    assert latest(store) == {"step": 2}
    assert store.scores() == {1: 0.1, 2: 0.2}
    assert "step_3.aside" in names(tmp_path)
    with pytest.raises(NoCheckpointError, match=r"step_3\.aside', .* once it is renamed to step_N"):
        store.find(tmp_path / "step_3.aside")
    with pytest.raises(CheckpointError, match=r"run\.resume is 7, .* it has 1, 2"):
        store.find(7)


def test_a_run_starts_from_anothers_checkpoint_until_it_has_its_own(tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other", keep=1).save(20, {"of": "other"})
    store = CheckpointStore(tmp_path / "mine", keep=1)
    assert store.find(other) == other
    store.save(21, {"of": "mine"})
    assert store.find(other) == tmp_path / "mine" / "step_21"
    with pytest.raises(CheckpointError, match=r"run\.resume is .*atuo.* has no state\.pt"):
        CheckpointStore(tmp_path / "new", keep=1).find(Path("atuo"))


@pytest.mark.parametrize(
    ("given", "read"),
    [("auto", "auto"), ("never", "never"), (10, 10), ("a/step_3", Path("a/step_3"))],
)
def test_the_configuration_takes_a_word_a_step_or_a_path(given: object, read: object) -> None:
    section = TypeAdapter(RunSection).validate_python({"name": "r", "dir": "d", "resume": given})
    assert section.resume == read
    assert type(section.resume) is type(read)


def test_a_damaged_checkpoint_is_an_error_that_names_it_and_the_remedy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(3, {})
    (path / "state.pt").write_bytes(b"damaged")
    with pytest.raises(DamagedFileError, match=r"state\.pt is damaged .* delete .*step_3"):
        store.load(path)


@pytest.mark.parametrize("other", [None, 1, 99])
def test_a_checkpoint_of_another_format_is_refused_by_name_before_anything_starts(
    tmp_path: Path, other: int | None
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.save(3, {"x": 1}, {"backend": "torch"})
    about = {**store.about(path), "format": other}
    if other is None:
        del about["format"]  # as releases did that had one only
    (path / "about.json").write_text(json.dumps(about))
    (path / "state.pt").write_bytes(b"what only that release can read")
    seal(path)
    refused = rf"{re.escape(str(path))} has format {other or 1}, .*=never to start over"
    for read in (store.about, store.load, lambda _: store.find("auto"), store.find):
        with pytest.raises(CheckpointError, match=refused):
            read(path)
    assert store.find("never") is None


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, {})


def test_a_disk_that_is_full_is_a_clear_error_and_costs_no_older_checkpoint(
    tmp_path: Path,
) -> None:
    """torch's zip writer makes a RuntimeError of it."""
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"x": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="free space"):
            store.save(2, {"x": torch.zeros(1_000_000)})
        with pytest.raises(CheckpointError, match="cannot be written"):
            record_batch(str(tmp_path / "recorded"), [Group("p" * 1_000_000, ())], Progress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest(store) == {"x": 1}


@pytest.mark.parametrize(("resume", "is_complete"), [("auto", True), (4, True), (2, False)])
def test_a_complete_run_can_be_taken_back_to_a_step(
    tmp_path: Path, resume: str | int, is_complete: bool
) -> None:
    checkpoints = CheckpointStore(tmp_path / CHECKPOINTS, keep=2)
    for step in (2, 4):
        checkpoints.save(step, {})
    write_summary(tmp_path, {"optimizer_steps": 4})
    config = SimpleNamespace(
        run=SimpleNamespace(dir=tmp_path, resume=resume), trainer=SimpleNamespace(total_steps=4)
    )
    assert (_finished(cast(RunConfig, config)) is not None) == is_complete


def test_evaluated_steps_have_a_checkpoint_when_the_best_are_kept() -> None:
    due = [s for s in range(1, 13) if checkpoint_due(s - 1, s, every=5, eval_every=4, keep_best=1)]
    assert due == [4, 5, 8, 10, 12]
    due = [s for s in range(1, 13) if checkpoint_due(s - 1, s, every=5, eval_every=4, keep_best=0)]
    assert due == [5, 10]


def test_random_numbers_go_on_where_they_were() -> None:
    state = rng_state()
    drawn = (random.random(), float(np.random.rand()))
    set_rng_state(state)
    assert (random.random(), float(np.random.rand())) == drawn


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two policies: step 1 is the start, in step 2 a weight is 1."""
    folder = tmp_path_factory.mktemp("run")
    config = TorchBackendConfig()
    backend = TorchBackend(config, MODEL)
    store = CheckpointStore(folder / "checkpoints", keep=2)
    about = {
        "model_path": str(MODEL),
        "backend": "torch",
        "backend_config": config.model_dump(mode="json"),
    }

    def save(step: int) -> None:
        draft = store.draft(step)
        state = backend.save_state(draft / "backend")
        backend.wait_saved()
        store.save(step, {"backend": state}, about, draft)

    save(1)
    weights = backend.state_dict()["model"]
    weights[next(n for n in weights if n.endswith("norm.weight"))].fill_(1.0)
    save(2)
    store.score(1, 0.8)
    store.score(2, 0.3)
    return folder


def test_an_exported_checkpoint_loads_in_transformers_with_its_tokenizer(
    run_dir: Path, tmp_path: Path
) -> None:
    exported = export_checkpoint(run_dir, "latest", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    norms = [w for n, w in model.state_dict().items() if n.endswith("norm.weight")]
    assert any(bool((w == 1).all()) for w in norms)
    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    original = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    assert tokenizer("347 - 91").input_ids == original("347 - 91").input_ids
    assert tokenizer.chat_template == original.chat_template
    assert names(tmp_path) == ["model"]


def test_the_best_checkpoint_or_a_step_is_exported_on_request(
    run_dir: Path, tmp_path: Path
) -> None:
    start = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).state_dict()
    for number, which in enumerate(("best", 1)):
        exported = export_checkpoint(run_dir, which, tmp_path / str(number))
        model = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
        assert all(torch.equal(w, start[n]) for n, w in model.state_dict().items())


@pytest.mark.parametrize(
    "trained_by",
    [
        {"ranks": 4, "context_parallel": 2},
        {"reference_path": Path("a/reference/by/its/path/there")},
        {"attention": "flash_attention_2"},
    ],
    ids=["ranks that share rows", "a reference", "attention of a GPU"],
)
def test_what_was_trained_elsewhere_is_exported_by_one_process_here(
    run_dir: Path, tmp_path: Path, trained_by: dict[str, Any]
) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    newest = store.chosen("latest")
    there = TorchBackendConfig(**trained_by).model_dump(mode="json")
    about = {**store.about(newest), "backend_config": there}
    run = tmp_path / "run"
    copied = CheckpointStore(run / "checkpoints")
    draft = copied.draft(2)
    shutil.copytree(newest / "backend", draft / "backend")
    copied.save(2, store.load(newest), about, draft)
    exported = export_checkpoint(run, "latest", tmp_path / "model")
    assert (exported / "model.safetensors").is_file()


def test_what_a_gpu_trained_is_exported_in_the_type_that_engines_were_served(
    run_dir: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    newest = store.chosen("latest")
    state = store.load(newest)
    state["backend"]["rng"]["cuda"] = state["backend"]["rng"]["cpu"]
    run = tmp_path / "run"
    copied = CheckpointStore(run / "checkpoints")
    draft = copied.draft(2)
    shutil.copytree(newest / "backend", draft / "backend")
    copied.save(2, state, store.about(newest), draft)
    exported = export_checkpoint(run, "latest", tmp_path / "model")
    weights = load_file(exported / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model cannot be written"):
            export_checkpoint(run_dir, "latest", tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_an_export_refuses_a_folder_that_is_there_and_a_run_without_checkpoints(
    run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="exists; remove it"):
        export_checkpoint(run_dir, 1, tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        export_checkpoint(tmp_path, "latest", tmp_path / "model")
    CheckpointStore(tmp_path / "checkpoints", keep=1).save(1, {})
    with pytest.raises(CheckpointError, match="has no scored checkpoint"):
        export_checkpoint(tmp_path, "best", tmp_path / "model")
