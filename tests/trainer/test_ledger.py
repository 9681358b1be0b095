"""The ledger: what was lost to a kill does not count, and what is wrong is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.errors import DamagedFileError
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.ledger import NOT_TRAINED, Ledger, audit, read_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "ledger.jsonl"


def test_every_prompt_is_trained_dropped_or_in_flight(path: Path) -> None:
    ledger = Ledger(path)
    for i in range(5):
        ledger.issued(f"p{i}-x", f"p{i}")
    ledger.trained(1, ["p0-x", "p1-x"])
    ledger.dropped("p2-x", "deadline")
    ledger.dropped("p3-x", "evicted", returned=True)

    found = audit(path, order=["p0", "p1", "p2", "p3", "p4", "p5"])

    assert found.draws == ("p0", "p1", "p2", "p3", "p4")
    assert (found.trained, found.updates) == (2, {1: 2})
    assert found.dropped == {"deadline": 1, "evicted": 1}
    assert found.in_flight == ("p4-x",)
    assert found.waiting == ("p3",)
    assert found.doubled == found.skipped == ()


def test_a_returned_prompt_that_is_trained_later_counts_once(path: Path) -> None:
    ledger = Ledger(path)
    ledger.issued("p0-a", "p0")
    ledger.dropped("p0-a", "evicted", returned=True)
    ledger.issued("p1-a", "p1")
    ledger.issued("p0-b", "p0")
    ledger.trained(1, ["p0-b", "p1-a"])
    found = audit(path, order=["p0", "p1", "p2"])
    assert (found.draws, found.trained, found.returned) == (("p0", "p1"), 2, 1)
    assert found.doubled == found.skipped == found.in_flight == found.waiting == ()


def test_what_came_after_the_checkpoint_did_not_happen(path: Path) -> None:
    first = Ledger(path)
    first.issued("p0-a", "p0")
    first.issued("p1-a", "p1")
    first.trained(1, ["p0-a"])
    offset = first.offset
    first.issued("p2-a", "p2")
    first.trained(2, ["p1-a", "p2-a"])

    second = Ledger(path)
    second.resume(1, offset)
    assert set(second.open) == {"p1-a"}
    second.dropped("p1-a", "restarted", returned=True)
    second.issued("p1-b", "p1")
    second.issued("p2-b", "p2")
    second.trained(2, ["p1-b", "p2-b"])

    found = audit(path, order=["p0", "p1", "p2"])
    assert found.trained == 3
    assert found.updates == {1: 1, 2: 2}
    assert found.doubled == found.skipped == found.in_flight == ()


def test_going_back_behind_an_earlier_resume_leaves_that_out_too(path: Path) -> None:
    ledger = Ledger(path)
    ledger.issued("p0-a", "p0")
    early = ledger.offset
    ledger.trained(1, ["p0-a"])
    late = ledger.offset
    ledger.resume(1, late)
    ledger.issued("p1-a", "p1")
    ledger.resume(0, early)
    assert [e["event"] for e in read_ledger(path)] == ["issued", "resumed"]
    assert set(ledger.open) == {"p0-a"}


@pytest.mark.parametrize(
    ("entries", "doubled"),
    [
        ([("issued", "a"), ("trained", "a"), ("trained", "a")], ("a", "A")),
        ([("issued", "a"), ("dropped", "a"), ("trained", "a")], ("a",)),
        ([("trained", "a")], ("a",)),
        ([("issued", "a"), ("trained", "a"), ("returned", "a")], ("a",)),
    ],
)
def test_a_group_that_is_trained_again_is_found(
    path: Path, entries: list[tuple[str, str]], doubled: tuple[str, ...]
) -> None:
    ledger = Ledger(path)
    for number, (event, uid) in enumerate(entries):
        if event == "issued":
            ledger.issued(uid, uid.upper())
        elif event == "trained":
            ledger.trained(number, [uid])
        else:
            ledger.dropped(uid, "evicted", returned=event == "returned")
    assert audit(path).doubled == doubled


def test_a_prompt_that_was_left_out_is_found_by_the_order_of_the_source(path: Path) -> None:
    ledger = Ledger(path)
    for instance in ("p0", "p2", "p3", "p3"):
        ledger.issued(f"{instance}-{ledger.offset}", instance)
    found = audit(path, order=["p0", "p1", "p2", "p3"])
    assert found.skipped == ("p1",)
    assert found.doubled == ("p3",)


def test_groups_of_a_lease_that_no_update_used_are_dropped(path: Path) -> None:
    ledger = Ledger(path)
    for uid in ("a", "b"):
        ledger.issued(uid, uid)
    ledger.trained(1, ["a"])
    ledger.leased(["a", "b"])
    assert audit(path).dropped == {NOT_TRAINED: 1}


def test_a_line_that_was_cut_off_costs_nothing_that_counts(path: Path) -> None:
    first = Ledger(path)
    first.issued("p0-a", "p0")
    offset = first.offset
    first.close()
    with path.open("ab") as file:
        file.write(b'{"event":"trai')
    second = Ledger(path)
    second.resume(0, offset)
    second.trained(1, ["p0-a"])
    assert audit(path).trained == 1


def test_a_damaged_line_that_counts_is_an_error(path: Path) -> None:
    Ledger(path).issued("p0-a", "p0")
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(DamagedFileError, match=r"ledger\.jsonl is damaged \(the line at byte 104"):
        audit(path)


def test_a_ledger_that_lost_its_end_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 0 bytes.*it had 100"):
        Ledger(path).resume(3, 100)


KILLED = st.lists(
    st.sampled_from(["issue", "train", "drop", "return", "save", "kill"]), max_size=80
)


@given(KILLED)
def test_whenever_it_is_killed_nothing_is_skipped_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    """A trainer in small: a source, a checkpoint of it with the ledger's offset, and kills."""
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    ledger, position, buffer, flight, update = Ledger(path), 0, list[str](), dict[str, str](), 0
    saved = (0, 0, list[str](), dict[str, str](), 0)
    number = 0
    for event in events:
        match event:
            case "issue":
                if buffer:
                    instance = buffer.pop(0)
                else:
                    instance, position = f"p{position}", position + 1
                number += 1
                flight[f"u{number}"] = instance
                ledger.issued(f"u{number}", instance)
            case "train" | "drop" | "return" if flight:
                uid = next(iter(flight))
                instance = flight.pop(uid)
                if event == "train":
                    update += 1
                    ledger.trained(update, [uid])
                else:
                    ledger.dropped(uid, "evicted", returned=event == "return")
                    buffer += [instance] * (event == "return")
            case "save":
                saved = (ledger.offset, position, list(buffer), dict(flight), update)
            case "kill":
                ledger.close()
                ledger = Ledger(path)
                offset, position, buffer, flight, update = saved
                buffer, flight = list(buffer), dict(flight)
                ledger.resume(update, offset)
                assert set(ledger.open) == set(flight)
                for uid, instance in flight.items():
                    ledger.dropped(uid, "restarted", returned=True)
                    buffer.append(instance)
                flight = {}
    found = audit(path, order=[f"p{i}" for i in range(position)])
    assert found.doubled == found.skipped == ()
    assert len(found.draws) == position
    assert found.trained == sum(found.updates.values()) == update
    assert set(found.in_flight) == set(flight)
    assert Counter(found.waiting) == Counter(buffer)


def test_a_run_without_a_folder_has_no_ledger_and_knows_what_is_open(tmp_path: Path) -> None:
    ledger = Ledger(None)
    ledger.issued("p0-a", "p0")
    ledger.issued("p1-a", "p1")
    ledger.trained(1, ["p0-a"])
    assert ledger.adopt(tmp_path, 7) == 7
    ledger.resume(1, 0)
    ledger.sync()
    ledger.close()
    assert (set(ledger.open), ledger.ended(), ledger.offset) == ({"p1-a"}, set(), 0)


def test_a_group_that_is_dropped_after_it_was_trained_is_found(path: Path) -> None:
    ledger = Ledger(path)
    ledger.issued("p0-a", "p0")
    ledger.trained(1, ["p0-a"])
    ledger.dropped("p0-a", "evicted", returned=True)
    assert audit(path).doubled == ("p0-a",)


def test_what_was_dropped_has_ended(path: Path) -> None:
    ledger = Ledger(path)
    for i in range(3):
        ledger.issued(f"p{i}-a", f"p{i}")
    ledger.dropped("p0-a", "deadline")
    ledger.trained(1, ["p1-a"])
    assert ledger.ended() == {"p0-a", "p1-a"}


@pytest.mark.parametrize("has_ledger", [True, False])
def test_a_run_that_goes_on_from_anothers_checkpoint_has_its_history_whatever_it_began_before(
    path: Path, tmp_path: Path, has_ledger: bool
) -> None:
    """Twice: it is killed before it has a checkpoint of its own."""
    other = Ledger(tmp_path / "other" / "ledger.jsonl")
    other.issued("p0-a", "p0")
    other.trained(1, ["p0-a"])
    offset = other.offset
    other.issued("p1-a", "p1")
    if not has_ledger:
        (tmp_path / "other" / "ledger.jsonl").unlink()
    before = Ledger(path)
    for i in range(9):  # longer than the other's
        before.issued(f"p{i}-x", f"p{i}")
    for life in "bc":
        ledger = Ledger(path)
        ledger.resume(1, ledger.adopt(tmp_path / "other", offset))
        ledger.issued(f"p1-{life}", "p1")
        ledger.close()
    found = audit(path)
    trained = 1 if has_ledger else 0
    assert (found.trained, found.in_flight, found.doubled) == (trained, ("p1-c",), ())


def test_an_evaluation_of_a_later_checkpoint_follows_one_of_an_earlier(
    path: Path, tmp_path: Path
) -> None:
    """`stepwell eval RUN` has one folder for all of them."""
    run = Ledger(tmp_path / "other" / "ledger.jsonl")
    for step in (1, 2, 3):
        for i in range(9):
            run.issued(f"p{i}-{step}", f"p{i}")
        run.trained(step, [f"p{i}-{step}" for i in range(9)])
        evaluation = Ledger(path)
        evaluation.resume(step, evaluation.adopt(tmp_path / "other", run.offset))
        evaluation.close()
        assert audit(path).trained == 9 * step
