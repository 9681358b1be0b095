"""The journal on real files: killed processes, full disks, damaged bytes, a dict as its model."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.datapool.errors import (
    DataPoolError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalVersionError,
)
from stepwell.datapool.store import cleaning, folder
from stepwell.datapool.store import index as index_module
from stepwell.datapool.store import journal as journal_module
from stepwell.datapool.store.folder import ACKED_NAME, SCHEMA_VERSION
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.segments import Row, segment_path, segments_in
from tests.builders import until
from tests.datapool.conftest import newest_segment

Durability = Literal["process", "power"]
Open = Callable[..., Journal]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=["process", "power"])
def durability(request: pytest.FixtureRequest) -> Durability:
    chosen: Durability = request.param
    return chosen


@pytest.fixture
def open_journal(tmp_path: Path, durability: Durability) -> Iterator[Open]:
    """`open_journal(folder=tmp_path)`: a journal that is closed after the test."""
    opened: list[Journal] = []

    def open_(folder: Path = tmp_path) -> Journal:
        opened.append(Journal(folder, durability, lock_timeout_s=0.1))
        return opened[-1]

    yield open_
    for journal in opened:
        with suppress(JournalError):
            journal.close()


@contextmanager
def full_disk(file_bytes: int = 0) -> Iterator[None]:
    """No file of this process can grow beyond `file_bytes`, or be written beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append(journal: Journal, n: int = 1, payload_bytes: int = 2000) -> list[int]:
    """`n` rows whose content follows from their ids."""
    rows = []
    for _ in range(n):
        row = journal.append("train", "step", b"head", os.urandom(payload_bytes))
        rows.append(row)
    return rows


def stored_ids(journal: Journal) -> list[int]:
    return [row.row for row in journal.rows()]


def killed_copy(journal: Journal, folder: Path) -> Path:
    """Copy of the journal as a kill would leave it now: its files as they are, nothing closed."""
    return Path(shutil.copytree(journal.folder, folder))


# --- rows and states ---


def test_rows_and_states_come_back_after_a_restart_as_they_were(open_journal: Open) -> None:
    journal = open_journal()
    first = journal.append("train", "step", b"\x00head", b"payload")
    second = journal.append("väl", "complete", b"")
    third = journal.append("train", "step", b"h", b"")
    journal.put_state("counters", b"old")
    journal.put_state("counters", b"new")
    journal.close()

    journal = open_journal()

    assert list(journal.rows()) == [
        Row(first, "train", "step", b"\x00head", b"payload"),
        Row(second, "väl", "complete", b"", b""),
        Row(third, "train", "step", b"h", b""),
    ]
    assert journal.states() == {"counters": b"new"}


def test_what_is_only_buffered_does_not_survive(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal()
    (kept,) = append(journal)
    journal.flush()
    append(journal)
    assert journal.pending
    assert stored_ids(open_journal(killed_copy(journal, tmp_path / "killed"))) == [kept]


def test_a_row_deleted_before_its_transaction_is_never_written(open_journal: Open) -> None:
    journal = open_journal()
    journal.delete(append(journal, 3))
    assert not journal.pending
    (kept,) = append(journal)
    journal.flush()
    assert journal.statistics()["rows_written"] == 1
    assert stored_ids(journal) == [kept]


def test_a_stored_row_is_gone_once_its_deletion_is_committed(open_journal: Open) -> None:
    journal = open_journal()
    rows = append(journal, 4)
    journal.flush()
    journal.delete([rows[1], rows[1], 12345])
    journal.flush()
    assert stored_ids(journal) == [rows[0], *rows[2:]]
    assert journal.statistics()["rows_deleted"] == 1
    assert journal.statistics()["rows_stored"] == 3


def test_an_id_is_never_given_again_even_when_its_row_is_gone(open_journal: Open) -> None:
    journal = open_journal()
    rows = append(journal, 3)
    journal.flush()
    journal.delete(rows)
    journal.close()
    assert append(open_journal())[0] > rows[-1]


def test_payloads_are_read_from_memory_and_from_disk_in_the_order_asked(
    open_journal: Open,
) -> None:
    journal = open_journal()
    stored = [journal.append("train", "step", b"", b"s%d" % i) for i in range(3)]
    without = journal.append("train", "complete", b"")
    journal.flush()
    buffered = journal.append("train", "step", b"", b"b")
    asked = [stored[2], buffered, stored[0], without, stored[2]]
    assert journal.read(asked) == [b"s2", b"b", b"s0", b"", b"s2"]


def test_a_payload_that_is_not_there_is_an_error_with_the_row_and_the_file(
    open_journal: Open,
) -> None:
    journal = open_journal()
    rows = append(journal)
    journal.flush()
    with pytest.raises(JournalCorruptError, match=rf"{journal.folder}: row 99 is not there"):
        journal.read([*rows, 99])
    assert len(journal.read(rows)) == 1


def test_a_closed_journal_says_so(open_journal: Open) -> None:
    journal = open_journal()
    journal.close()
    journal.close()
    append(journal)
    with pytest.raises(JournalError, match="was closed"):
        journal.flush()


def test_nothing_to_commit_is_no_transaction(open_journal: Open) -> None:
    journal = open_journal()
    journal.flush()
    assert journal.statistics()["commits"] == 0


# --- full disk ---


def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(open_journal: Open) -> None:
    journal = open_journal()
    before = append(journal, 4)
    journal.flush()
    kept = append(journal, 300)
    journal.delete(before[:1])
    journal.put_state("counters", b"7")
    with full_disk(200_000):
        with pytest.raises(JournalFullError, match=rf"free space under {journal.folder}. 300 rows"):
            journal.flush()
        with pytest.raises(JournalFullError):
            journal.flush()
        assert stored_ids(journal) == before
    assert journal.statistics()["failed_commits"] == 2
    assert "the disk takes no more" in journal.statistics()["last_error"]

    journal.flush()

    assert stored_ids(journal) == [*before[1:], *kept]
    assert journal.states() == {"counters": b"7"}
    assert not journal.pending


def test_rows_behind_a_failed_commit_go_with_the_next_one(open_journal: Open) -> None:
    journal = open_journal()
    first = append(journal, 3)
    with full_disk():
        with pytest.raises(JournalFullError, match="3 rows are kept"):
            journal.flush()
        journal.delete(first[:1])
        second = append(journal, 2)
        with pytest.raises(JournalFullError, match="4 rows are kept"):
            journal.flush()
    journal.flush()
    assert stored_ids(journal) == [*first[1:], *second]
    assert journal.statistics()["failed_commits"] == 2


def test_a_failed_transaction_does_not_come_back_after_a_crash(
    open_journal: Open, tmp_path: Path
) -> None:
    journal = open_journal()
    (kept,) = append(journal)
    journal.flush()
    rows = append(journal, 2)
    with full_disk(), pytest.raises(JournalFullError):
        journal.flush()
    journal.delete(rows)
    assert journal.pending
    journal.flush()
    assert stored_ids(open_journal(killed_copy(journal, tmp_path / "killed"))) == [kept]


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_transaction_interrupted_when_it_was_acknowledged_is_gone_whole(
    n_before: int, open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path / "one")
    before = append(journal, n_before)
    journal.flush()
    rows = append(journal)
    write, interrupts = os.pwrite, [KeyboardInterrupt]

    def interrupted(file: int, data: bytes, at: int) -> int:
        n = write(file, data, at)
        if file == journal._acked and interrupts:
            raise interrupts.pop()
        return n

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.flush()
    assert stored_ids(open_journal(killed_copy(journal, tmp_path / "two"))) == before
    journal.flush()
    assert stored_ids(open_journal(killed_copy(journal, tmp_path / "three"))) == before + rows


def test_closing_on_a_full_disk_says_so_and_lets_go_of_the_folder(open_journal: Open) -> None:
    journal = open_journal()
    append(journal)
    with full_disk(), pytest.raises(JournalFullError):
        journal.close()
    assert stored_ids(open_journal()) == []


def test_a_journal_that_cannot_be_created_for_lack_of_space_says_so(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(JournalFullError, match="free space under"):
        Journal(tmp_path, "process")
    Journal(tmp_path, "process").close()


# --- damage ---


def damaged(tmp_path: Path, change: Callable[[bytearray], None]) -> Path:
    """A closed journal of 40 rows and a state whose file is changed afterwards."""
    journal = Journal(tmp_path, "process")
    append(journal, 40, payload_bytes=300)
    journal.append("train", "step", b"", b"needle" * 50)
    journal.put_state("counters", b"value-of-a-state")
    journal.close()
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return tmp_path


def read_all(folder: Path) -> tuple[list[Row], dict[str, bytes]]:
    journal = Journal(folder, "process", lock_timeout_s=0.1)
    try:
        return list(journal.rows()), journal.states()
    finally:
        with suppress(JournalError):
            journal.close()


def test_a_flipped_byte_in_a_payload_is_found_when_the_journal_is_opened(tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        data[data.index(b"needle")] ^= 1

    with pytest.raises(JournalCorruptError, match=r"to 1 are lost: .*stepwell data salvage"):
        Journal(damaged(tmp_path, change), "process")


def test_a_byte_that_is_flipped_later_is_found_with_the_number_of_its_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    append(journal, 40)
    journal.append("train", "step", b"", b"needle" * 50)
    journal.flush()
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"needle")] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalCorruptError, match=r"payload of row 40 .*stepwell data salvage"):
        list(journal.rows())
    with pytest.raises(JournalCorruptError, match="payload of row 40"):
        journal.read([0, 40])
    assert len(journal.read([0])) == 1
    journal.close()


def test_a_page_of_rubbish_is_corruption(tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        at = data.index(b"needle") // 4096 * 4096
        data[at : at + 4096] = b"\xa5" * len(data[at : at + 4096])

    with pytest.raises(JournalCorruptError, match="are lost"):
        read_all(damaged(tmp_path, change))


def test_rows_that_were_cut_out_are_corruption(tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        del data[data.index(b"needle") - 400 : data.index(b"needle")]

    with pytest.raises(JournalCorruptError, match="0 rows were live before them, 41 after them"):
        read_all(damaged(tmp_path, change))


def test_a_damaged_state_is_corruption(tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        data[data.index(b"value-of-a-state")] ^= 1

    with pytest.raises(JournalCorruptError, match="are lost"):
        read_all(damaged(tmp_path, change))


def test_a_file_that_is_no_segment_is_corruption(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(b"something else" * 1000)
    with pytest.raises(JournalCorruptError, match="stepwell data salvage"):
        Journal(tmp_path, "process")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, object]:
    folder = damaged(tmp_path_factory.mktemp("sound"), lambda data: None)
    image, acked = newest_segment(folder).read_bytes(), (folder / ACKED_NAME).read_bytes()
    return image, acked, read_all(folder)


@given(data=st.data())
def test_no_damaged_byte_goes_unnoticed(
    sound: tuple[bytes, bytes, object], data: st.DataObject
) -> None:
    image, acked, content = sound
    changed = bytearray(image)
    # The headers are where a byte can do most.
    at = data.draw(st.one_of(st.integers(0, 160), st.integers(0, len(image) - 1)))
    changed[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        segment_path(Path(folder), 1).write_bytes(changed)
        (Path(folder) / ACKED_NAME).write_bytes(acked)
        try:
            found = read_all(Path(folder))
        except JournalError:
            return
    assert found == content


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1, 0])
def test_an_unknown_schema_version_is_refused_and_left_as_it_is(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(folder, "_MAGIC", b"swpool-%d" % version)
        Journal(tmp_path, "process").close()
    before = (tmp_path / ACKED_NAME).read_bytes()
    with pytest.raises(
        JournalVersionError, match=rf"schema version {version}, .* writes {SCHEMA_VERSION}; start"
    ):
        Journal(tmp_path, "process")
    assert (tmp_path / ACKED_NAME).read_bytes() == before


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JournalError, match=r"pool\.journal_dir"):
        Journal(tmp_path / "file" / "journal", "process")


@pytest.mark.parametrize(
    "error",
    [
        JournalError,
        JournalFullError,
        JournalCorruptError,
        JournalVersionError,
        JournalLockedError,
    ],
)
def test_errors_cross_a_process_boundary(error: type[JournalError]) -> None:
    copy = pickle.loads(pickle.dumps(error("free space under /x")))
    assert type(copy) is error
    assert str(copy) == "free space under /x"
    assert isinstance(copy, DataPoolError)
    assert isinstance(copy, OSError)


# --- other processes ---

CHILD = """
import sys
from pathlib import Path
from zlib import crc32
from stepwell.datapool.store.journal import Journal

folder, durability, do = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
journal = Journal(folder, durability)
print("open", flush=True)
if do == "hold":
    sys.stdin.read()
live = []
while True:  # each acknowledgement: the rows that exist by now
    for _ in range(5):
        row = journal.append("train", "step", b"h", b"")
        journal.delete([row])
        payload = b"%d," % (row + 1) * 300
        live.append(journal.append("train", "step", b"%d" % (row + 1), payload))
    journal.delete(live[:3])
    del live[:3]
    journal.put_state("live", b"%d %d" % (live[0], live[-1]))
    journal.flush()
    print(live[0], live[-1], flush=True)
"""


def start_child(folder: Path, durability: str, do: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), durability, do],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def test_a_killed_process_loses_nothing_it_acknowledged(
    tmp_path: Path, durability: Durability
) -> None:
    n_acknowledged = 0
    for n_lines in (1, 37, 150):
        child = start_child(tmp_path, durability, "write")
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(n_lines)]
        child.kill()  # somewhere in a later transaction
        lines += child.stdout.readlines()
        child.wait()
        child.stdout.close()
        complete = [line for line in lines if line.endswith("\n")]
        first, last = map(int, complete[-1].split())

        journal = Journal(tmp_path, durability)
        found = {row.row: row for row in journal.rows()}
        # One more transaction may have gone through without its acknowledgement.
        as_stored = tuple(map(int, journal.states()["live"].split()))
        assert as_stored[0] >= first
        assert as_stored[1] >= last
        own = [row for row in found if row >= as_stored[0]]
        assert (own[0], own[-1]) == as_stored
        n_acknowledged += len(complete)
        assert set(range(as_stored[0], as_stored[1] + 1, 2)) == set(own)
        for row, content in found.items():
            assert content.head == b"%d" % row
            assert content.payload == b"%d," % row * 300
        journal.delete(found)
        journal.close()
    assert n_acknowledged >= 188


def test_a_transaction_torn_by_the_kill_is_gone_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "live", "process")
    early = append(journal, 10)
    journal.flush()
    log = newest_segment(journal.folder)
    begin = log.stat().st_size
    acked = (journal.folder / ACKED_NAME).read_bytes()
    late = append(journal, 10)
    journal.flush()
    end = log.stat().st_size
    for cut in (begin, begin + 10, begin + 5000, end - 1, end):
        copied = killed_copy(journal, tmp_path / f"cut-{cut}")
        os.truncate(newest_segment(copied), cut)
        (copied / ACKED_NAME).write_bytes(acked)  # it is written after the transaction
        copy = Journal(copied, "process")
        assert stored_ids(copy) == (early + late if cut == end else early)
        assert append(copy)[0] > early[-1]
        copy.close()
    journal.close()


def test_a_segment_that_the_kill_left_without_a_transaction_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path / "live", "process")
    early = append(journal)
    journal.flush()
    acked = (journal.folder / ACKED_NAME).read_bytes()
    append(journal)
    journal.flush()
    whole = newest_segment(journal.folder).read_bytes()
    for cut in (0, 20, 500, len(whole) - 1):
        copied = killed_copy(journal, tmp_path / f"cut-{cut}")
        os.truncate(newest_segment(copied), cut)
        (copied / ACKED_NAME).write_bytes(acked)
        copy = Journal(copied, "process")
        assert stored_ids(copy) == early
        copy.close()
    journal.close()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    child = start_child(tmp_path, "process", "hold")
    with pytest.raises(JournalLockedError, match=rf"in use by process {child.pid} .*journal_dir"):
        Journal(tmp_path, "process", lock_timeout_s=0.05)
    child.kill()
    child.communicate()
    Journal(tmp_path, "process").close()


def test_a_successor_waits_for_a_dying_predecessor(tmp_path: Path) -> None:
    child = start_child(tmp_path, "process", "hold")
    killer = threading.Timer(0.1, child.kill)
    killer.start()
    Journal(tmp_path, "process", lock_timeout_s=60).close()
    killer.join()
    child.communicate()


def test_one_folder_is_opened_once_within_a_process_too(open_journal: Open) -> None:
    journal = open_journal()
    with pytest.raises(JournalLockedError, match=f"process {os.getpid()} "):
        open_journal()
    journal.close()
    open_journal()


# --- space ---


def written_bytes() -> int:
    """Bytes that this process has given to write()."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def test_acks_write_a_small_record_and_no_stored_step_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    groups = [append(journal, 24) for _ in range(500)]
    journal.flush()
    before = written_bytes()
    for group in groups:
        journal.delete(group)
        journal.append("train", "closed", b"c" * 600)
        journal.put_state("channel/train", b"s" * 800)
        journal.flush()
    assert (written_bytes() - before) / (500 * 24) < 500
    assert journal.statistics()["rows_stored"] == 500
    journal.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that cleans as early as one of a thousand times its size does."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 16_000)
    monkeypatch.setattr(index_module, "SLACK_BYTES", 64_000)
    monkeypatch.setattr(cleaning, "SLICE_BYTES", 2_000)


@pytest.mark.usefixtures("small")
def test_segments_of_groups_that_leave_go_and_nothing_is_moved(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    waiting: list[list[int]] = []
    sizes = []
    before = written_bytes()
    for _ in range(300):
        waiting.append(append(journal, 8))
        if len(waiting) > 10:
            journal.delete(waiting.pop(0))
        journal.flush()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    n_bytes = 300 * 8 * 2000
    assert written_bytes() - before < 1.1 * n_bytes
    assert max(sizes) < 300_000, "0.16 MB of it are live"
    journal.close()


@pytest.mark.usefixtures("small")
def test_rows_that_stay_among_those_that_leave_are_moved_and_the_disk_stays_bounded(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, "process")
    kept: dict[int, bytes] = {}
    for k in range(400):
        rows = append(journal, 8)
        row = journal.append("train", "closed", b"closed", b"%d" % k * 20)
        kept[row] = b"%d" % k * 20
        journal.flush()
        journal.delete(rows)
        journal.flush()
        assert journal.statistics()["file_bytes"] < 300_000, "7 MB were written, 0.05 MB are live"
    journal.put_state("last", b"1")
    journal.close()
    journal = Journal(tmp_path, "process")
    assert {row.row: row.payload for row in journal.rows()} == kept
    assert journal.read(list(kept)) == list(kept.values())
    assert journal.states() == {"last": b"1"}
    journal.close()


def has_copies(journal: Journal) -> bool:
    """True if a live row is in another segment, too."""
    index = journal.index
    dead = [row for s in index.segments.values() for rows in s.tombstones.values() for row in rows]
    return any(index.find(row) is not None for row in dead)


@pytest.mark.usefixtures("small")
def test_a_kill_in_the_middle_of_the_cleaning_loses_nothing_and_brings_nothing_back(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "live", "process")
    live: dict[int, bytes] = {}
    n_copies = 0
    for k in range(160):
        rows = append(journal, 4, payload_bytes=900)
        (row,) = append(journal, 1, payload_bytes=900)
        journal.flush()
        live[row] = journal.read([row])[0]
        journal.delete(rows)
        if k % 3 == 0:
            gone = next(iter(live))
            journal.delete([gone])
            del live[gone]
        journal.flush()
        if k > 60 and k % 4 == 0:  # the files at this moment, one opening after another
            copied = killed_copy(journal, tmp_path / f"killed-{k}")
            for _ in range(2):
                copy = Journal(copied, "process")
                n_copies += has_copies(copy)
                assert {r.row: r.payload for r in copy.rows()} == live
                copy.delete([next(iter(live))])
                copy.flush()
                assert {r.row for r in copy.rows()} == set(list(live)[1:])
                copy = Journal(killed_copy(copy, tmp_path / f"again-{k}"), "process")
                copy.erase()
                assert {r.row for r in copy.rows()} == set(list(live)[1:])
                copy.close()
                shutil.rmtree(tmp_path / f"again-{k}")
                shutil.rmtree(copied)
                copied = killed_copy(journal, copied)
            shutil.rmtree(copied)
    assert n_copies, "some were killed while rows were moved"
    journal.close()


@pytest.mark.usefixtures("small")
def test_what_was_moved_is_on_disk_before_the_segment_it_was_in_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    n_removed = 0
    sync, unlink = os.fsync, Path.unlink

    def noting_sync(file: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size
        sync(file)

    def noting_unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal n_removed
        n_removed += 1
        for number in journal.index.segments:
            later = segment_path(tmp_path, number)
            if later > path:
                assert synced.get(str(later)) == later.stat().st_size
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "unlink", noting_unlink)
    journal = Journal(tmp_path, "process")
    for _ in range(60):
        rows = append(journal, 8)
        append(journal)
        journal.flush()
        journal.delete(rows)
    journal.erase()
    assert n_removed > 10
    journal.close()


@pytest.mark.usefixtures("small")
def test_a_full_disk_does_not_fail_for_the_cleaning(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "process")
    kept = []
    for _ in range(30):
        rows = append(journal, 8)
        kept += append(journal)
        journal.flush()
        journal.delete(rows)
    with full_disk(newest_segment(tmp_path).stat().st_size), suppress(JournalFullError):
        journal.flush()
    journal.flush()
    assert stored_ids(journal) == kept
    journal.close()
    assert stored_ids(Journal(tmp_path, "process")) == kept


# --- erasing ---


def holds(folder: Path, text: bytes) -> bool:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # removed meanwhile
            if text in path.read_bytes():
                return True
    return False


async def until_erased(journal: Journal, text: bytes) -> None:
    await until(lambda: not holds(journal.folder, text))


async def test_what_was_deleted_leaves_the_files_soon_after_it_is_asked_for(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SCRUB_S", 0.02)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 10_000)
    journal = open_journal()
    secrets, others = [], []
    for k in range(30):
        secrets.append(journal.append("train", "step", b"", b"secret %d" % k * 40))
        others += append(journal)
        journal.flush()
    journal.delete(secrets[:15])
    journal.flush()
    journal.delete(secrets[15:])
    journal.scrub()
    journal.flush()
    await asyncio.wait_for(until_erased(journal, b"secret"), 30)
    assert stored_ids(journal) == others
    journal.flush()
    journal.close()
    assert stored_ids(open_journal()) == others


async def test_what_died_leaves_the_files_in_time_also_when_nothing_more_is_written(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "ERASE_S", 0.02)
    journal = open_journal()
    secret = journal.append("train", "step", b"", b"secret" * 40)
    others = append(journal)
    journal.flush()
    journal.delete([secret])
    journal.flush()
    await asyncio.wait_for(until_erased(journal, b"secret"), 30)
    assert stored_ids(journal) == others


async def test_what_was_dead_when_the_process_was_killed_is_erased_by_the_next_one(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SCRUB_S", 0.02)
    journal = Journal(tmp_path / "live", durability)
    secret = journal.append("train", "step", b"", b"secret" * 40)
    others = append(journal)
    journal.flush()
    journal.delete([secret])
    journal.scrub()
    journal.flush()
    copy = Journal(killed_copy(journal, tmp_path / "killed"), durability)
    assert holds(copy.folder, b"secret")
    others += append(copy)
    copy.flush()
    await asyncio.wait_for(until_erased(copy, b"secret"), 30)
    assert stored_ids(copy) == others
    copy.close()
    journal.close()


def test_what_was_to_be_erased_is_gone_when_the_journal_is_closed(open_journal: Open) -> None:
    journal = open_journal()
    secret = journal.append("train", "step", b"", b"secret" * 40)
    others = append(journal, 3)
    journal.flush()
    journal.delete([secret])
    journal.scrub()
    journal.close()
    assert not holds(journal.folder, b"secret")
    assert stored_ids(open_journal()) == others


def test_what_cannot_be_erased_for_damage_is_an_error(open_journal: Open) -> None:
    journal = open_journal()
    secret = journal.append("train", "step", b"", b"secret" * 40)
    journal.append("train", "step", b"a head that changes")
    journal.flush()
    path = newest_segment(journal.folder)
    data = bytearray(path.read_bytes())
    data[data.index(b"that changes")] ^= 1
    path.write_bytes(data)
    journal.delete([secret])
    journal.scrub()
    with pytest.raises(JournalCorruptError, match="what was deleted is still there"):
        journal.close()
    with pytest.raises(JournalCorruptError):
        open_journal()


async def test_erasing_that_a_full_disk_stops_goes_on_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SCRUB_S", 0.02)
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    journal = Journal(tmp_path, "process")
    secret = journal.append("train", "step", b"", b"secret" * 40)
    others = append(journal)
    journal.flush()
    journal.delete([secret])
    journal.scrub()
    journal.flush()
    with full_disk():
        await until(lambda: journal.statistics()["failed_commits"] >= 1)
    journal.flush()
    await asyncio.wait_for(until_erased(journal, b"secret"), 30)
    assert stored_ids(journal) == others
    journal.close()


def test_a_row_that_is_written_anew_is_not_overwritten_by_the_cleaning(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same transaction moves the live rows of its segment."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    journal = open_journal()
    changed, dead, kept = append(journal, 3)
    journal.flush()
    append(journal)
    journal.flush()
    journal.delete([dead])
    journal.flush()
    journal._begin_to_erase()
    assert journal.is_cleaning
    journal.put(changed, "train", "step", b"another head", b"other", b" content")
    journal.flush()
    assert journal.read([changed]) == [b"other content"]
    assert journal.heads([kept, changed]) == [("step", b"head"), ("step", b"another head")]
    journal.erase()
    journal.close()
    journal = open_journal()
    found = {row.row: row for row in journal.rows()}
    assert found[changed] == Row(changed, "train", "step", b"another head", b"other content")
    assert len(found[kept].payload) == 2000


# --- against a model ---


class JournalAgainstDict(RuleBasedStateMachine):
    """Two dicts, one of what is stored and one of what will be once it is flushed."""

    payloads = st.lists(st.one_of(st.binary(max_size=40), st.just(b"large" * 3000)), max_size=3)

    @initialize(small=st.booleans())
    def begin(self, small: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if small:  # so that segments come and go
            self.patch.setattr(journal_module, "SEGMENT_BYTES", 300)
            self.patch.setattr(index_module, "SLACK_BYTES", 1000)
            self.patch.setattr(cleaning, "SLICE_BYTES", 100)
        self.folder = Path(tempfile.mkdtemp())
        self.n_lives = 0
        self.journal = Journal(self.folder / "0", "process")
        self.rows: dict[int, tuple[str, str, bytes, bytes]] = {}
        self.states: dict[str, bytes] = {}
        self.stored_rows = dict(self.rows)
        self.stored_states = dict(self.states)
        self.last_id = -1
        self.stored_id = -1
        """The last id when something was written last."""

    @rule(
        channel=st.sampled_from(["train", "val"]),
        kind=st.sampled_from(["step", "group"]),
        head=st.binary(max_size=20),
        payload=payloads,
    )
    def append(self, channel: str, kind: str, head: bytes, payload: list[bytes]) -> None:
        row = self.journal.append(channel, kind, head, *payload)
        assert row > self.last_id
        self.last_id = row
        self.rows[row] = (channel, kind, head, b"".join(payload))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.rows:
            gone = data.draw(st.sets(st.sampled_from(sorted(self.rows))))
            self.journal.delete(gone)
            for row in gone:
                del self.rows[row]

    @rule(data=st.data(), head=st.binary(max_size=2000), payload=payloads)
    def put_again(self, data: st.DataObject, head: bytes, payload: list[bytes]) -> None:
        if self.rows:
            row = data.draw(st.sampled_from(sorted(self.rows)))
            channel, kind, _, _ = self.rows[row]
            self.journal.put(row, channel, kind, head, *payload)
            self.rows[row] = (channel, kind, head, b"".join(payload))

    @rule(key=st.text(st.characters(exclude_categories=["Cs"]), max_size=3), value=st.binary())
    def put_state(self, key: str, value: bytes) -> None:
        self.journal.put_state(key, value)
        self.states[key] = value

    def saving(self) -> None:
        if self.journal.pending:
            self.stored_id = self.last_id
        self.stored_rows = dict(self.rows)
        self.stored_states = dict(self.states)

    @rule()
    def flush(self) -> None:
        self.saving()
        self.journal.flush()

    @rule()
    def flush_in_vain(self) -> None:
        if self.journal.pending:
            with full_disk(), pytest.raises(JournalFullError):
                self.journal.flush()

    @rule()
    def erase(self) -> None:
        self.saving()
        self.journal.flush()
        self.journal.erase()
        assert not self.journal.has_dead

    @rule(scrub=st.booleans())
    def reopen(self, scrub: bool) -> None:
        self.saving()
        if scrub:
            self.journal.scrub()
        self.journal.close()
        self.journal = Journal(self.journal.folder, "process")
        # Ids of rows that were never stored may come again: nobody ever saw those rows.
        self.last_id = self.stored_id

    @rule(torn=st.binary(max_size=200))
    def kill(self, torn: bytes) -> None:
        self.n_lives += 1
        folder = killed_copy(self.journal, self.folder / str(self.n_lives))
        if segments_in(folder):
            with newest_segment(folder).open("ab") as file:
                file.write(torn)
        self.journal.close()
        self.journal = Journal(folder, "process")
        self.rows = dict(self.stored_rows)
        self.states = dict(self.stored_states)
        self.last_id = self.stored_id = max(self.rows, default=-1)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        expected = [(row, *content) for row, content in self.stored_rows.items()]
        assert [tuple(row) for row in self.journal.rows()] == expected
        assert self.journal.states() == self.stored_states
        backwards = sorted(self.rows, reverse=True)
        assert self.journal.read(backwards) == [self.rows[row][3] for row in backwards]
        assert self.journal.heads(backwards) == [self.rows[row][1:3] for row in backwards]
        assert self.journal.statistics()["rows_stored"] == self.journal.last.rows

    def teardown(self) -> None:
        self.patch.undo()
        self.journal.close()
        shutil.rmtree(self.folder)


TestJournalAgainstDict = JournalAgainstDict.TestCase
TestJournalAgainstDict.settings = settings(stateful_step_count=25)
