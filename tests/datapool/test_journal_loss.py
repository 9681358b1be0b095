"""Acknowledged transactions that are gone from disk are missed when the journal is opened."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from stepwell.datapool import process
from stepwell.datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalLockedError,
    JournalVersionError,
)
from stepwell.datapool.store import journal as journal_module
from stepwell.datapool.store.journal import FILE_NAME, Journal

Durability = Literal["process", "power"]
REPOSITORY = Path(__file__).parents[2]
LOG_NAME = f"{FILE_NAME}-wal"
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
    """What a killed process leaves that wrote N rows, each in a transaction of its own."""
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
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("-shm")}


def test_a_killed_process_is_no_damage(left: Path, durability: Durability) -> None:
    assert open_and_read(left, durability) == list(range(N))


def test_a_flipped_bit_anywhere_in_the_log_loses_nothing_in_silence(
    left: Path, durability: Durability, tmp_path: Path
) -> None:
    size = (left / LOG_NAME).stat().st_size
    n_raised = 0
    for k in range(40):
        folder = Path(shutil.copytree(left, tmp_path / f"copy-{k}"))
        data = bytearray((folder / LOG_NAME).read_bytes())
        data[size * k // 40] ^= 1 << k % 8
        (folder / LOG_NAME).write_bytes(data)
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
    size = (left / LOG_NAME).stat().st_size
    for cut in (size - 1, size // 2, 10, 0):
        os.truncate(left / LOG_NAME, cut)
        with pytest.raises(JournalCorruptError, match=rf"to {N} are lost: .* data salvage"):
            open_and_read(left, durability)
    (left / LOG_NAME).unlink()
    with pytest.raises(JournalCorruptError, match=rf"to {N} are lost: .* data salvage"):
        open_and_read(left, durability)


@pytest.mark.parametrize("with_log", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_main_file_that_is_gone_is_missed(left: Path, with_log: bool, emptied: bool) -> None:
    (left / FILE_NAME).unlink()
    if emptied:
        (left / FILE_NAME).touch()
    if not with_log:
        (left / LOG_NAME).unlink()
    with pytest.raises(JournalCorruptError, match=f"transactions 1 to {N} are lost"):
        open_and_read(left)


def test_a_file_of_an_earlier_time_is_missed(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder, "process")
    journal.append("train", "step", b"0")
    journal.close()
    earlier = (folder / FILE_NAME).read_bytes()
    journal = Journal(folder, "process")
    journal.append("train", "step", b"1")
    journal.close()
    (folder / FILE_NAME).write_bytes(earlier)
    with pytest.raises(JournalCorruptError, match="transactions 2 to 2 are lost: rows 1 to 1"):
        open_and_read(folder)


def test_rows_that_came_back_in_place_of_others_are_missed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    rows = [journal.append("train", "step", b"%d" % k) for k in range(4)]
    journal.delete(rows[:2])
    journal.flush()
    journal.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("DELETE FROM rows WHERE row = 3")
        names = "channel, kind, head_crc, payload_crc, head, payload"
        db.execute(f"INSERT INTO rows SELECT 0, {names} FROM rows WHERE row = 2")
    journal = Journal(tmp_path, "process")
    with pytest.raises(JournalCorruptError):
        list(journal.rows())
    journal.close()


def test_a_state_of_an_earlier_transaction_is_missed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    journal.put_state("counts", b"old")
    journal.flush()
    with closing(sqlite3.connect(journal.path)) as db:
        old = db.execute("SELECT crc, value FROM states WHERE key = 'counts'").fetchone()
    journal.put_state("counts", b"new")
    journal.close()
    with closing(sqlite3.connect(journal.path)) as db, db:
        db.execute("UPDATE states SET crc = ?, value = ? WHERE key = 'counts'", old)
    journal = Journal(tmp_path, "process")
    with pytest.raises(JournalCorruptError, match="earlier transaction"):
        journal.states()
    journal.close()


# --- the machine was restarted ---


@pytest.fixture
def restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], None]:
    boot_id = tmp_path_factory.mktemp("machine") / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    return lambda: monkeypatch.setattr(process, "BOOT_ID", boot_id)


def test_a_machine_that_restarted_may_cost_the_tail_that_was_never_promised(
    killed: dict[Durability, Path],
    tmp_path: Path,
    restarted: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = Path(shutil.copytree(killed["process"], tmp_path / "left"))
    log = left / LOG_NAME
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
    os.truncate(left / LOG_NAME, (left / LOG_NAME).stat().st_size // 2)
    restarted()
    with pytest.raises(JournalCorruptError, match="are lost"):
        open_and_read(left, "power")


def test_nor_is_it_for_a_journal_that_was_closed(
    tmp_path: Path, restarted: Callable[[], None]
) -> None:
    journal = Journal(tmp_path, "process")
    empty = journal.path.read_bytes()
    journal.append("train", "step", b"0")
    journal.close()
    journal.path.write_bytes(empty)
    restarted()
    with pytest.raises(JournalCorruptError, match="are lost"):
        open_and_read(tmp_path)


# --- the record of what was acknowledged ---


def test_a_journal_without_its_record_is_refused(left: Path) -> None:
    (left / journal_module.ACKED_NAME).unlink()
    with pytest.raises(JournalCorruptError, match=r"pool\.acked.* is missing"):
        open_and_read(left)


def test_a_damaged_record_is_refused(left: Path) -> None:
    record = left / journal_module.ACKED_NAME
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
    name = journal_module.ACKED_NAME
    (left / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(JournalCorruptError, match="belongs to another journal"):
        open_and_read(left)


@pytest.mark.parametrize("what", ["record", "file"])
def test_a_creation_that_was_killed_is_begun_again(tmp_path: Path, what: str) -> None:
    Journal(tmp_path, "process").close()
    (tmp_path / FILE_NAME).unlink()
    if what == "record":
        (tmp_path / journal_module.ACKED_NAME).unlink()
    (tmp_path / f"{FILE_NAME}.new").write_bytes(b"half of it")
    assert open_and_read(tmp_path) == []


def test_a_commit_that_could_not_be_recorded_is_an_error_until_one_can(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, durability)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def produce() -> None:
        journal.append("train", "step", b"0")
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", full)
            with pytest.raises(JournalError, match="No space left"):
                await journal.committed()
        assert journal.pending
        journal.append("train", "step", b"1")
        await journal.committed()

    asyncio.run(produce())
    journal.close()
    assert open_and_read(tmp_path, durability) == [0, 1]


def test_a_journal_of_the_first_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE rows (row INTEGER PRIMARY KEY)")
        db.execute("PRAGMA user_version=1")
    before = contents(tmp_path)
    with pytest.raises(JournalVersionError, match="schema version 1, this release"):
        open_and_read(tmp_path)
    assert contents(tmp_path)[FILE_NAME] == before[FILE_NAME]


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
import os, signal, sqlite3, sys
from pathlib import Path
from stepwell.datapool.store.journal import Journal

journal = Journal(Path(sys.argv[1]), sys.argv[2])
journal.append("train", "step", b"head")
journal.flush()
sqlite3.connect(journal.path, isolation_level=None).execute("BEGIN IMMEDIATE")
print("writing", flush=True)
signal.pause()
"""


def test_a_reader_in_another_process_gets_in_and_leaves_the_log_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    journal.append("train", "step", b"0")
    journal.flush()
    with pytest.raises(JournalLockedError):  # and closes what it opened of the folder
        Journal(tmp_path, "process", lock_timeout_s=0)
    read = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]))"
    command = [sys.executable, "-c", read, str(journal.path), "SELECT head FROM rows"]
    assert subprocess.check_output(command, text=True) == "(b'0',)\n"
    assert (tmp_path / LOG_NAME).stat().st_size > 0
    journal.append("train", "step", b"1")
    journal.close()
    assert open_and_read(tmp_path) == [0, 1]


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
    assert LOG_NAME in modes
    assert set(modes.values()) == {0o600}
    journal.close()


# --- the log stays short ---


def test_the_log_is_emptied_when_nothing_more_is_written(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_S", 0.01)

    async def produce(journal: Journal) -> None:
        for k in range(3):
            journal.append("train", "step", b"%d" % k)
            await journal.committed()
            while (tmp_path / LOG_NAME).stat().st_size:  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.01)

    journal = Journal(tmp_path, durability)
    asyncio.run(asyncio.wait_for(produce(journal), 30))
    (tmp_path / LOG_NAME).unlink()  # which is harmless, now
    assert [int(row.head) for row in Journal(copied(tmp_path), durability).rows()] == [0, 1, 2]
    journal.close()


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-copy")))
