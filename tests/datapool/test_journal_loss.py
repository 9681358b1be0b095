"""Acknowledged transactions that are gone from disk are missed when the journal is opened."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from stepwell.datapool import clock
from stepwell.datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalFencedError,
    JournalLockedError,
    JournalVersionError,
)
from stepwell.datapool.store import journal as journal_module
from stepwell.datapool.store.folder import ACKED_NAME
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.segments import segment_path, segments_in
from tests.datapool.conftest import newest_segment

Durability = Literal["process", "power"]
REPOSITORY = Path(__file__).parents[2]
N = 60


@pytest.fixture(params=["process", "power"])
def durability(request: pytest.FixtureRequest) -> Durability:
    chosen: Durability = request.param
    return chosen


CHILD = """
import os, signal, sys
from pathlib import Path
from stepwell.datapool.store.journal import Journal

journal = Journal(Path(sys.argv[1]), sys.argv[2])
for k in range(int(sys.argv[3])):
    journal.append("train", "step", b"%d" % k, b"%d," % k * 100)
    journal.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Durability, Path]:
    """Folders of killed processes that wrote N rows, each in a transaction of its own."""
    folders: dict[Durability, Path] = {}
    for durability in ("process", "power"):
        folder = tmp_path_factory.mktemp("killed") / durability
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), durability, str(N)], cwd=REPOSITORY
        )
        assert child.returncode == -signal.SIGKILL
        folders[durability] = folder
    return folders


@pytest.fixture
def left(killed: dict[Durability, Path], durability: Durability, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed[durability], tmp_path / "left"))


def open_and_read(folder: Path, durability: Durability = "process") -> list[int]:
    journal = Journal(folder, durability, lock_timeout_s=0.1)
    try:
        journal.states()
        return [int(row.head) for row in journal.rows()]
    finally:
        journal.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_killed_process_is_no_damage(left: Path, durability: Durability) -> None:
    assert open_and_read(left, durability) == list(range(N))


def test_a_flipped_bit_anywhere_in_the_log_loses_nothing_in_silence(
    left: Path, durability: Durability, tmp_path: Path
) -> None:
    size = newest_segment(left).stat().st_size
    n_raised = 0
    for k in range(40):
        folder = Path(shutil.copytree(left, tmp_path / f"copy-{k}"))
        log = newest_segment(folder)
        data = bytearray(log.read_bytes())
        data[size * k // 40] ^= 1 << k % 8
        log.write_bytes(data)
        before = contents(folder)
        try:
            found = open_and_read(folder, durability)
        except JournalCorruptError as e:
            n_raised += f"to {N} are lost: rows " in str(e)
            found = list(range(N))
            assert contents(folder) == before  # for those who want to save what can be read
        assert found == list(range(N))
    assert n_raised > 20


def test_a_log_that_was_removed_or_cut_is_missed(left: Path, durability: Durability) -> None:
    log = newest_segment(left)
    size = log.stat().st_size
    for cut in (size - 1, size // 2, 10, 0):
        os.truncate(log, cut)
        with pytest.raises(JournalCorruptError, match=rf"to {N} are lost: .* data salvage"):
            open_and_read(left, durability)
    log.unlink()
    with pytest.raises(JournalCorruptError, match=f"transactions 1 to {N} are lost.* data salvage"):
        open_and_read(left, durability)


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed journal of 20 rows in as many transactions, in several segments."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    folder = tmp_path / "segments"
    journal = Journal(folder, "process")
    for k in range(20):
        journal.append("train", "step", b"%d" % k)
        journal.flush()
    journal.close()
    assert len(segments_in(folder)) > 4
    return folder


@pytest.mark.parametrize("how", ["removed", "emptied", "cut", "flipped", "earlier", "swapped"])
def test_no_segment_can_be_lost_or_changed_unnoticed(segments: Path, how: str) -> None:
    numbers = segments_in(segments)
    for number, other in zip(numbers, numbers[1:] + numbers[:1], strict=True):
        path = segment_path(segments, number)
        whole = path.read_bytes()
        changed = {
            "removed": b"",
            "emptied": b"",
            "cut": whole[:-1],
            "flipped": whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:],
            "earlier": whole[: len(whole) // 2],
            "swapped": segment_path(segments, other).read_bytes(),
        }[how]
        path.write_bytes(changed)
        if how == "removed":
            path.unlink()
        with pytest.raises(JournalCorruptError, match=r"missing|damaged|are lost"):
            open_and_read(segments)
        path.write_bytes(whole)
    assert open_and_read(segments) == list(range(20))


def test_a_file_of_an_earlier_time_is_missed(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder, "process")
    journal.append("train", "step", b"0")
    journal.close()
    earlier = newest_segment(folder).read_bytes()
    journal = Journal(folder, "process")
    journal.append("train", "step", b"1")
    journal.close()
    newest_segment(folder).write_bytes(earlier)
    with pytest.raises(JournalCorruptError, match="transactions 2 to 2 are lost: rows 1 to 1"):
        open_and_read(folder)


def test_another_ending_than_the_acknowledged_one_is_missed(tmp_path: Path) -> None:
    """Deletions, rows or states of a past that took another way."""
    folder = tmp_path / "journal"
    journal = Journal(folder, "process")
    rows = [journal.append("train", "step", b"%d" % k) for k in range(4)]
    journal.put_state("counts", b"old")
    journal.close()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for place, gone, state in ((folder, rows[:2], b"new"), (copy, rows[2:], b"neu")):
        journal = Journal(place, "process")
        journal.delete(gone)
        journal.put_state("counts", state)
        journal.close()
    newest_segment(folder).write_bytes(newest_segment(copy).read_bytes())
    with pytest.raises(JournalCorruptError, match="is not the one that was acknowledged"):
        open_and_read(folder)


# --- the machine was restarted ---


@pytest.fixture
def restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], None]:
    boot_id = tmp_path_factory.mktemp("machine") / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    return lambda: monkeypatch.setattr(clock, "BOOT_ID", boot_id)


def test_a_machine_that_restarted_may_cost_the_tail_that_was_never_promised(
    killed: dict[Durability, Path],
    tmp_path: Path,
    restarted: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = Path(shutil.copytree(killed["process"], tmp_path / "left"))
    log = newest_segment(left)
    os.truncate(log, log.stat().st_size // 2)
    restarted()
    found = open_and_read(left)
    assert 0 < len(found) < N
    assert found == list(range(len(found)))
    lost = f"transactions {len(found) + 1} to {N} are lost: rows {len(found)} to {N - 1}"
    assert lost in caplog.text
    journal = Journal(left, "process")
    assert journal.append("train", "step", b"next") == N  # an id is not given twice
    journal.close()


def test_with_power_a_restarted_machine_is_no_excuse(
    killed: dict[Durability, Path], tmp_path: Path, restarted: Callable[[], None]
) -> None:
    left = Path(shutil.copytree(killed["power"], tmp_path / "left"))
    os.truncate(newest_segment(left), newest_segment(left).stat().st_size // 2)
    restarted()
    with pytest.raises(JournalCorruptError, match="are lost"):
        open_and_read(left, "power")


def test_nor_is_it_for_a_journal_that_was_closed(
    tmp_path: Path, restarted: Callable[[], None]
) -> None:
    journal = Journal(tmp_path, "process")
    journal.append("train", "step", b"0")
    journal.close()
    newest_segment(tmp_path).unlink()
    restarted()
    with pytest.raises(JournalCorruptError, match="are lost"):
        open_and_read(tmp_path)


def test_nor_is_it_for_anything_but_the_end_of_the_log(
    segments: Path, restarted: Callable[[], None]
) -> None:
    journal = Journal(segments, "process")
    journal.append("train", "step", b"20")
    journal.flush()
    left = Path(shutil.copytree(segments, segments.with_name("left")))
    journal.close()
    restarted()
    os.truncate(segment_path(left, segments_in(left)[2]), 200)
    with pytest.raises(JournalCorruptError, match=r"000003\.log is damaged"):
        open_and_read(left)


# --- the record of what was acknowledged ---


def test_a_journal_without_its_record_is_refused(left: Path) -> None:
    (left / ACKED_NAME).unlink()
    with pytest.raises(JournalCorruptError, match=r"pool\.acked.* is missing"):
        open_and_read(left)


def test_a_damaged_record_is_refused(left: Path) -> None:
    record = left / ACKED_NAME
    sound = record.read_bytes()
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        record.write_bytes(damaged)
        with pytest.raises(JournalCorruptError, match=r"pool\.acked is damaged"):
            open_and_read(left)
    record.write_bytes(sound[:-1])
    with pytest.raises(JournalCorruptError, match=r"pool\.acked is damaged"):
        open_and_read(left)


def test_the_record_of_another_journal_is_refused(left: Path, tmp_path: Path) -> None:
    Journal(tmp_path / "other", "process").close()
    name = ACKED_NAME
    (left / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(JournalCorruptError, match="belongs to another journal"):
        open_and_read(left)


def test_a_creation_that_was_killed_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / f"{ACKED_NAME}.1.tmp").write_bytes(b"half of it")
    assert open_and_read(tmp_path) == []


def test_a_commit_that_could_not_be_recorded_is_an_error_until_one_can(
    tmp_path: Path,
    durability: Durability,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = Journal(tmp_path, durability)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    journal.append("train", "step", b"0")
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        with pytest.raises(JournalError, match="No space left"):
            journal.flush()
    assert journal.pending
    journal.append("train", "step", b"1")
    journal.flush()
    journal.close()
    assert open_and_read(tmp_path, durability) == [0, 1]


@pytest.mark.parametrize("version", [1, 3])
def test_a_journal_of_the_format_before_is_refused_and_left_as_it_is(
    tmp_path: Path, version: int
) -> None:
    header = bytearray(b"SQLite format 3\0" + bytes(84))
    header[60:64] = version.to_bytes(4, "big")
    (tmp_path / "pool.sqlite3").write_bytes(header)
    before = contents(tmp_path)
    with pytest.raises(JournalVersionError, match=f"schema version {version}, this release"):
        open_and_read(tmp_path)
    assert contents(tmp_path) == before


# --- who may open it ---


def test_no_file_that_somebody_removes_lets_a_second_writer_in(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    journal.append("train", "step", b"0")
    journal.flush()
    for path in sorted(tmp_path.iterdir()):
        path.unlink()
        with pytest.raises(JournalLockedError):
            Journal(tmp_path, "process", lock_timeout_s=0)
    journal.close()


def test_a_process_that_stands_still_in_a_transaction_is_taken_over_once_it_is_gone(
    tmp_path: Path, durability: Durability
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path), durability],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        with pytest.raises(JournalLockedError, match="in the middle of a write"):
            Journal(tmp_path, durability, lock_timeout_s=0.1, take_over=child.pid)
    finally:
        child.kill()
        child.communicate()
    journal = Journal(tmp_path, durability, take_over=child.pid)
    assert [row.head for row in journal.rows()] == [b"head"]
    journal.close()


STANDS_STILL = """
import os, signal, sys
from pathlib import Path
from stepwell.datapool.store.journal import Journal

journal = Journal(Path(sys.argv[1]), sys.argv[2])
journal.append("train", "step", b"head")
journal.flush()
write = os.pwrite

def stand_still(*args):
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return write(*args)

os.pwrite = stand_still
journal.append("train", "step", b"another")
journal.flush()
"""


def test_a_process_that_goes_on_after_it_was_taken_over_writes_nothing(
    tmp_path: Path, durability: Durability
) -> None:
    journal = Journal(tmp_path, durability)
    journal.append("train", "step", b"0")
    journal.flush()
    with pytest.raises(JournalLockedError, match="in use by process"):
        Journal(tmp_path, durability, lock_timeout_s=0, take_over=1)
    successor = Journal(tmp_path, durability, lock_timeout_s=0, take_over=os.getpid())
    before = contents(tmp_path)
    journal.append("train", "step", b"1")
    for _ in range(2):
        with pytest.raises(JournalFencedError, match="another process has taken this journal over"):
            journal.flush()
    with pytest.raises(JournalFencedError):
        journal.close()
    assert contents(tmp_path) == before
    successor.append("train", "step", b"2")
    successor.close()
    assert open_and_read(tmp_path) == [0, 2]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    journal = Journal(folder, "process")
    journal.append("train", "step", b"0")
    journal.flush()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())}
    assert modes.pop("pool") == 0o700
    assert newest_segment(folder).name in modes
    assert set(modes.values()) == {0o600}
    journal.close()
