"""The weight store: versions appear whole, one is committed, old ones go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stepwell.backends.errors import WeightsNotWrittenError
from stepwell.backends.weights import Published, WeightStore, check_version, read_current
from stepwell.backends.weights.store import kept_versions
from stepwell.datapool.errors import DamagedFileError


def save(content: str):  # type: ignore[no-untyped-def]  # a closure for `write`
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text(content)

    return write


def test_a_version_appears_under_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)

    def looking(folder: Path) -> None:
        assert folder != store.path(1)
        assert not store.path(1).exists()
        save("one")(folder)

    assert store.write(1, looking) == tmp_path / "v1"
    assert (tmp_path / "v1" / "model.safetensors").read_text() == "one"
    assert store.versions() == [1]


def test_a_write_that_fails_leaves_nothing_and_the_old_version_stays(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.write(1, save("one"))

    def failing(folder: Path) -> None:
        save("half")(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.write(1, failing)
    with pytest.raises(ValueError, match="save wrote nothing"):
        store.write(2, lambda folder: None)
    assert (store.path(1) / "model.safetensors").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_a_disk_that_takes_no_more_is_one_error_with_its_remedy(tmp_path: Path) -> None:
    """safetensors says it in an error of its own, which is no OSError."""
    import resource

    def too_large(folder: Path) -> None:
        folder.mkdir()
        save_file({"w": np.zeros(100_000, np.float32)}, folder / "model.safetensors")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with pytest.raises(WeightsNotWrittenError, match=r"v1 cannot be written .*; free space"):
            WeightStore(tmp_path).write(1, too_large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_of_two_who_write_the_same_version_the_second_gets_the_next_number(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    assert store.write(3, save("first")) == store.path(3)
    second = store.write(3, save("second"))
    assert store.number(second) == 4
    assert (store.path(3) / "model.safetensors").read_text() == "first"
    assert (second / "model.safetensors").read_text() == "second"
    store.discard(second)
    assert [p.name for p in tmp_path.iterdir()] == ["v3"]
    assert store.number(store.write(2, save("an old trainer's"))) == 2


def test_commit_names_the_version_and_prunes_the_oldest(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=2)
    assert store.current() is None
    for version in range(1, 5):
        store.write(version, save(str(version)))
        store.commit(version)
    assert store.versions() == [3, 4]
    assert read_current(tmp_path) == Published(4, str(tmp_path / "v4"))


def test_a_history_reaches_back_a_week_with_fewer_versions_the_older_they_are() -> None:
    hour, day = 3600, 86_400
    now = 11_000.0 * day + 12 * hour
    count = 9 * 24 * 6  # one every ten minutes, for nine days
    written = {count - n: now - n * 600 for n in range(count)}
    kept = kept_versions(written, "history", now)
    assert set(range(count - 9, count + 1)) <= kept
    hours = {(now - age) // hour for age in range(0, day, 600)}
    days = {(now - age) // day for age in range(0, 7 * day, 600)}
    times = [written[version] for version in kept]
    assert {t // hour for t in times} >= hours
    assert {t // day for t in times} == days
    assert len(kept) <= 10 + len(hours) + len(days)
    # Pruning goes on from what is left, commit after commit.
    for later in range(1, 40):
        written = {version: written[version] for version in kept} | {count + later: now}
        now += 600
        kept = kept_versions(written, "history", now)
    assert {written[version] // day for version in kept} >= {now // day - n for n in range(6)}


def test_a_history_prunes_by_when_versions_were_written(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep="history")
    long_ago = time.time() - 3 * 86_400
    for version in range(1, 15):
        path = store.write(version, save(str(version)))
        if version <= 3:
            os.utime(path, (long_ago, long_ago))
        store.commit(version)
    assert store.versions()[0] == 3
    assert store.versions()[-10:] == [*range(5, 15)]


def test_the_committed_version_is_never_pruned(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=1)
    for version in range(4):
        store.write(version, save(str(version)))
    store.commit(1)
    assert 1 in store.versions()


def test_a_version_that_is_being_pruned_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever prunes may be killed, and engines may be told to load it, while files go."""
    store = WeightStore(tmp_path, keep=1)
    store.write(1, save("1"))
    store.write(2, save("2"))
    monkeypatch.setattr("shutil.rmtree", lambda *args, **options: None)
    store.commit(2)
    assert store.versions() == [2]


def test_who_commits_beside_a_trainer_removes_none_of_the_versions_that_it_keeps(
    tmp_path: Path,
) -> None:
    trainers = WeightStore(tmp_path, keep=4)
    for version in (1, 2, 3, 4):
        trainers.commit(version, trainers.write(version, save(str(version))))
    beside = WeightStore(tmp_path, keep=2, prunes=False)
    beside.commit(5, beside.write_again(5, 3))
    assert beside.versions() == [1, 2, 3, 4, 5]
    trainers.commit(6, trainers.write(6, save("6")))
    assert trainers.versions() == [3, 4, 5, 6]


def test_a_roll_back_that_was_killed_takes_nothing_back(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=9)
    for version in (1, 2, 3):
        store.commit(version, store.write(version, save(str(version))))
    store.write_again(4, of=1)  # and no engine has it
    assert store.find(None, now=3) == 2
    written = store.write(4, save("5"))
    assert store.number(written) == 5, "no number has two meanings"
    store.commit(5, written)
    assert store.versions() == [1, 2, 3, 5]
    assert store.find(None, now=5) == 3
    store.commit(6, store.write_again(6, of=2))
    store.commit(7, store.write(7, save("7")))
    assert store.versions() == [1, 2, 3, 5, 6, 7], "one that was served stays"


def test_versions_that_cannot_be_pruned_undo_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path, keep=1)
    store.write(2, save("2"))
    monkeypatch.setattr(store, "versions", lambda: [1, 2])  # another process has removed 1
    store.commit(2)
    assert store.current() == Published(2, str(tmp_path / "v2"))


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    writes = "import os, sys; from stepwell.backends.weights import WeightStore\n"
    writes += "WeightStore(sys.argv[1]).write(1, lambda draft: (draft.mkdir(), os._exit(0)))"
    subprocess.run([sys.executable, "-c", writes, str(tmp_path)], check=True)
    assert len(list(tmp_path.iterdir())) == 1
    store = WeightStore(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert store.versions() == []


def test_a_draft_of_another_machine_is_its_writers_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store on a shared disk: `stepwell rollback` opens it on one node while the trainer writes
    on another."""

    def elsewhere() -> None:
        with monkeypatch.context() as there:
            there.setattr("socket.gethostname", lambda: "another")
            there.setattr("psutil.pid_exists", lambda pid: False)
            WeightStore(tmp_path)

    def writes(draft: Path) -> None:
        save("1")(draft)
        elsewhere()

    store = WeightStore(tmp_path)
    assert store.write(1, writes) == tmp_path / "v1"

    def is_killed(draft: Path) -> None:
        save("2")(draft)
        os.utime(draft, (0, 0))
        elsewhere()

    with pytest.raises(ValueError, match="save wrote nothing"):
        store.write(2, is_killed)


def test_what_is_committed_is_found_in_a_run_that_was_moved_or_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = WeightStore(tmp_path / "first")
    store.write(1, save("1"))
    store.commit(1)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    (tmp_path / "first").rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        assert read_current(tmp_path / name) == Published(1, str(tmp_path / name / "v1"))
        assert read_current(Path(name)) == Published(1, str(tmp_path / name / "v1"))
    elsewhere = WeightStore(tmp_path / "moved")
    elsewhere.commit(0, "a-model")
    assert read_current(tmp_path / "moved") == Published(0, str(tmp_path / "a-model"))


def test_a_damaged_pointer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text('{"version": ')
    with pytest.raises(ValueError, match=r"current\.json is damaged"):
        read_current(tmp_path)


def test_bounds_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        WeightStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="version is -1"):
        WeightStore(tmp_path).write(-1, save(""))


def test_a_byte_that_changed_in_a_version_is_found_and_its_file_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    path = store.write(1, save("the tensors"))
    check_version(tmp_path, path)
    for file in sorted(path.iterdir()):
        sound = file.read_bytes()
        file.write_bytes(bytes([*sound[:-3], sound[-3] ^ 1, *sound[-2:]]))
        with pytest.raises(DamagedFileError, match=rf"v1/{file.name} is damaged"):
            check_version(tmp_path, path)
        file.unlink()
        with pytest.raises(DamagedFileError, match=rf"v1/{file.name} is missing"):
            check_version(tmp_path, path)
        file.write_bytes(sound)
    check_version(tmp_path, path)


def test_a_model_that_somebody_else_made_needs_no_checksums(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    check_version(tmp_path / "weights", tmp_path / "model")
