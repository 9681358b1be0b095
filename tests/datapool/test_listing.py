"""Pages of a channel: what a row says, what a filter lets through, and that paging sees everything
that stays exactly once, at a bounded cost per page."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool import ChannelConfig, DataPool, DataPoolError, PoolConfig
from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.inspect import listing as listing_module
from stepwell.datapool.inspect.listing import MAX_LIMIT, MIN_LOOKS, PAGE_BYTES
from stepwell.datapool.ops import NATURAL
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from tests.builders import step_of
from tests.datapool.conftest import SyncPool

NOW = 1000.0
LISTINGS = ("list_groups", "list_trajectories")


def build_pool(**limits: Any) -> SyncPool:
    return SyncPool(PoolConfig(default=ChannelConfig(**limits)))


def finish(pool: DataPool, prompt_uid: str, *uids: str, reward: float | None = None) -> None:
    for uid in uids:
        pool.submit_step(step_of(uid, prompt_uid), now=NOW)
        pool.complete_trajectory(uid, reward, now=NOW)


def listed(pool: DataPool, listing: str, cursor: str | None = None, **arguments: Any) -> list[Any]:
    """All items from the cursor on, page by page."""
    items: list[Any] = []
    while True:
        page = getattr(pool, listing)(cursor=cursor, now=NOW, **arguments)
        items += page.items
        cursor = page.cursor
        if cursor is None:
            return items


def uids(rows: list[Any]) -> list[str]:
    """Uid of each row's trajectory, or of its group."""
    return [
        row.trajectory_uid if hasattr(row, "trajectory_uid") else row.prompt_uid for row in rows
    ]


@pytest.fixture
def varied() -> SyncPool:
    """One group of each state, in this order: leased, ready, held, open, and one undeclared."""
    pool = build_pool(n_rollouts=8)
    pool.open_group("leased", 1, now=900)
    finish(pool, "leased", "l0", reward=1.0)
    assert pool.lease_batch(now=NOW) is not None
    pool.open_group("ready", 2, metadata={"task": 3}, now=NOW)
    finish(pool, "ready", "r0", reward=0.25)
    finish(pool, "ready", "r1", reward=0.75)
    pool.open_group("held", 1, now=NOW)
    finish(pool, "held", "h0", reward=-1.0)
    pool.mark("held", trainable=False, tags=["odd"], now=NOW)
    pool.open_group("open", 4, deadline_s=60, now=NOW)
    pool.open_trajectory("o0", "open", attempt=2, metadata={"m": 1}, now=NOW)
    pool.submit_step(step_of("o0", "open", 2, policy_version=7), now=NOW)
    pool.submit_step(step_of("o0", "open", 0, policy_version=3, reward=0.5), now=NOW)
    pool.submit_step(step_of("o1", "open"), now=NOW)
    pool.abort_trajectory("o1", "crash", now=NOW)
    pool.mark(trajectory_uid="o0", tags=["odd", "long"], quality=0.5, now=NOW)
    pool.submit_step(step_of("u0", "undeclared"), now=NOW)
    return pool


# -- rows --------------------------------------------------------------------------------------


def test_a_group_row_says_where_the_group_stands_and_why(varied):
    rows = listed(varied, "list_groups")
    assert [(r.prompt_uid, r.state, r.reason) for r in rows] == [
        ("leased", "leased", None),
        ("ready", "ready", None),
        ("held", "held", "not_trainable"),
        ("open", "open", "0 of 4 complete; 1 still open"),
        ("undeclared", "open", "0 of 8 complete; 1 still open"),
    ]
    ready, opened = rows[1], rows[3]
    assert (ready.n_rollouts, ready.n_complete, ready.metadata) == (2, 2, {"task": 3})
    assert (ready.reward_mean, ready.reward_std) == (0.5, 0.25)
    assert (opened.n_running, opened.n_aborted, opened.n_steps, opened.n_tokens) == (1, 1, 2, 10)
    assert (opened.opened_at, opened.deadline, opened.reward_mean) == (NOW, NOW + 60, None)
    assert (rows[4].n_rollouts, rows[2].marks.tags) == (None, {"odd"})


def test_a_trajectory_row_has_its_state_its_groups_and_what_is_missing(varied):
    rows = {r.trajectory_uid: r for r in listed(varied, "list_trajectories")}
    assert list(rows) == ["l0", "r0", "r1", "h0", "o0", "o1", "u0"]
    row = rows["o0"]
    assert (row.state, row.group_state, row.attempt, row.metadata) == ("open", "open", 2, {"m": 1})
    assert (row.n_steps, row.n_missing, row.n_tokens, row.reward) == (2, 1, 10, 0.5)
    assert (row.oldest_version, row.newest_version, row.marks.quality) == (3, 7, 0.5)
    aborted = rows["o1"]
    assert (aborted.state, aborted.reason, aborted.n_steps) == ("aborted", "crash", 0)
    assert (aborted.reward, aborted.oldest_version) == (None, None)
    assert (rows["l0"].state, rows["l0"].group_state, rows["l0"].reward) == (
        "complete",
        "leased",
        1.0,
    )


def test_rows_and_pages_survive_pickling(varied):
    for listing in LISTINGS:
        page = getattr(varied, listing)(limit=2, now=NOW)
        assert pickle.loads(pickle.dumps(page)) == page


# -- filters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listing", "filters", "expected"),
    [
        ("list_groups", {"state": "held"}, ["held"]),
        ("list_groups", {"state": ["ready", "leased"]}, ["leased", "ready"]),
        ("list_groups", {"prompt_uid": "open"}, ["open"]),
        ("list_groups", {"prompt_uid": "unknown"}, []),
        ("list_groups", {"tag": "odd"}, ["held"]),
        ("list_groups", {"min_reward": 0.5}, ["leased", "ready"]),
        ("list_groups", {"max_reward": 0.5}, ["ready", "held"]),
        ("list_groups", {"min_age_s": 50}, ["leased"]),
        ("list_groups", {"max_version": 0}, ["leased", "ready", "held"]),
        ("list_trajectories", {"state": "open"}, ["o0", "u0"]),
        ("list_trajectories", {"prompt_uid": "ready", "min_reward": 0.5}, ["r1"]),
        ("list_trajectories", {"trajectory_uid": "r1"}, ["r1"]),
        ("list_trajectories", {"trajectory_uid": "r1", "prompt_uid": "open"}, []),
        ("list_trajectories", {"trajectory_uid": "unknown"}, []),
        ("list_trajectories", {"reason": "crash"}, ["o1"]),
        ("list_trajectories", {"tag": "odd"}, ["h0", "o0"]),
        ("list_trajectories", {"tag": "long"}, ["o0"]),
        ("list_trajectories", {"max_reward": 0.5}, ["r0", "h0", "o0"]),
        ("list_trajectories", {"prompt_uid": "ready", "state": None}, ["r0", "r1"]),
        ("list_trajectories", {"min_version": 1}, ["o0"]),
        ("list_trajectories", {"min_version": 4}, []),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_filter_lists_what_it_says(varied, listing, filters, expected, limit):
    assert uids(listed(varied, listing, limit=limit, **filters)) == expected


@pytest.mark.parametrize(
    ("listing", "arguments", "named"),
    [
        ("list_groups", {"rewrd": 1}, "no filter 'rewrd' (did you mean 'min_reward'?)"),
        ("list_groups", {"trajectory_uid": "t"}, "no filter 'trajectory_uid'"),
        ("list_groups", {"reason": "x"}, "there are state, min_age_s, prompt_uid, tag"),
        (
            "list_groups",
            {"state": "closed"},
            "filter state is 'closed'; pass one or several of open, ready, held, leased",
        ),
        ("list_trajectories", {"state": 3}, "filter state is 3"),
        ("list_trajectories", {"min_version": 1.5}, "min_version is 1.5; pass an integer >= 0"),
        ("list_trajectories", {"min_reward": float("nan")}, "min_reward is nan; pass a number"),
        ("list_trajectories", {"prompt_uid": ""}, "prompt_uid is ''; pass a non-empty string"),
        ("list_trajectories", {"limit": 0}, f"limit is 0; pass 1 to {MAX_LIMIT}"),
        ("list_trajectories", {"limit": MAX_LIMIT + 1}, f"limit is {MAX_LIMIT + 1}"),
        (
            "list_trajectories",
            {"cursor": "next"},
            "cursor is 'next'; pass one that the page before",
        ),
        ("list_trajectories", {"cursor": 7}, "cursor is 7"),
        ("list_trajectories", {"cursor": "trajectories:gone:1:0"}, "is of another pool"),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error_that_names_it(listing, arguments, named):
    for channel in ("train", "never seen"):
        with pytest.raises(InvalidRequestError) as caught:
            getattr(build_pool(), listing)(channel, now=NOW, **arguments)
        assert named in str(caught.value)


def test_a_cursor_of_another_listing_is_refused(varied):
    cursor = varied.list_groups(limit=1, now=NOW).cursor
    with pytest.raises(InvalidRequestError, match="is of another listing"):
        varied.list_trajectories(cursor=cursor, now=NOW)


def test_asking_about_a_channel_does_not_make_one():
    pool = build_pool()
    for listing in LISTINGS:
        page = getattr(pool, listing)("elsewhere", now=NOW)
        assert (page.items, page.cursor) == ((), None)
    assert list(pool.read_trajectories("elsewhere", now=NOW).unpack()) == []
    assert "elsewhere" not in pool.channels


# -- paging ------------------------------------------------------------------------------------


@st.composite
def histories(draw: Any) -> list[tuple[str, int, int]]:
    kinds = (*["step"] * 6, "complete", "abort", "open", "drop", "lease", "ack", *["page"] * 4)
    return draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.integers(0, 2), st.integers(0, 2)), max_size=40
        )
    )


class Paging:
    """A reader in the middle of a listing, and everything it must see."""

    def __init__(self, listing: str, limit: int, newest_first: bool) -> None:
        self.listing = listing
        self.how = {"limit": limit, "newest_first": newest_first}
        self.cursor: str | None = None
        self.done = False
        self.seen: list[str] = []
        self.expected: set[str] | None = None

    def present(self, pool: DataPool) -> set[str]:
        return set(uids(listed(pool, self.listing, limit=MAX_LIMIT)))

    def watch(self, pool: DataPool) -> None:
        """Keep in `expected` only the uids that were present since the first page."""
        present = self.present(pool)
        self.expected = present if self.expected is None else self.expected & present

    def turn(self, pool: DataPool) -> None:
        if not self.done:
            page = getattr(pool, self.listing)(cursor=self.cursor, now=NOW, **self.how)
            self.seen += uids(list(page.items))
            self.cursor = page.cursor
            self.done = self.cursor is None


def act(pool: DataPool, kind: str, group: int, trajectory: int, leases: list[str]) -> None:
    prompt, uid = f"p{group}", f"p{group}t{trajectory}."
    try:
        if kind == "step":
            records = pool.channel("train").records.trajectories
            known = records[uid].steps if uid in records else {}
            # Gaps are left and filled, so that steps come in before others that were listed.
            index = next(i for i in (2, 0, 1, *range(3, 99)) if i not in known)
            pool.submit_step(step_of(uid, prompt, index), now=NOW)
        elif kind == "complete":
            pool.complete_trajectory(uid, now=NOW)
        elif kind == "abort":
            pool.abort_trajectory(uid, "test", now=NOW)
        elif kind == "open":
            pool.open_group(prompt, trajectory + 1, now=NOW)
        elif kind == "drop":
            pool.drop_group(prompt, "test", now=NOW)
        elif kind == "lease" and (lease := pool.lease_batch(now=NOW)) is not None:
            leases.append(lease.lease_id)
        elif kind == "ack" and leases:
            pool.ack(leases.pop(), now=NOW)
    except DataPoolError:
        pass  # it does not fit in this history


@pytest.mark.parametrize("listing", LISTINGS)
@given(before=histories(), after=histories(), limit=st.integers(1, 4), newest=st.booleans())
def test_what_stays_is_seen_exactly_once_whatever_happens_between_the_pages(
    listing, before, after, limit, newest
):
    pool = build_pool(n_rollouts=2)
    leases: list[str] = []
    for kind, group, trajectory in before:
        act(pool, kind, group, trajectory, leases)
    paging = Paging(listing, limit, newest)
    paging.watch(pool)
    paging.turn(pool)
    for kind, group, trajectory in after:
        act(pool, kind, group, trajectory, leases)
        paging.watch(pool)
        if kind == "page":
            paging.turn(pool)
    while not paging.done:
        paging.turn(pool)
    assert paging.expected is not None
    assert paging.expected <= set(paging.seen)
    assert len(paging.seen) == len(set(paging.seen))


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_page_looks_at_a_bounded_number_of_things_and_goes_on_from_there(listing):
    pool = build_pool()
    for i in range(3 * MIN_LOOKS):
        pool.submit_step(step_of(f"t{i}", f"p{i}"), now=NOW)
    cursor, groups = None, [0]
    while True:
        page = getattr(pool, listing)(cursor=cursor, limit=1, now=NOW, max_reward=1.0)
        assert page.items == ()
        if (cursor := page.cursor) is None:
            break
        groups.append(int(cursor.split(":")[-2]))
    advances = np.diff(groups)
    assert len(groups) >= 3
    assert advances.min() > 0
    assert advances.max() <= MIN_LOOKS


@pytest.mark.parametrize("listing", LISTINGS)
def test_the_newest_come_first_if_they_are_asked_for(listing):
    pool = build_pool()
    for i in range(5):
        pool.submit_step(step_of(f"t{i}", f"p{i}"), now=NOW + i)
    oldest = [row.prompt_uid for row in listed(pool, listing, limit=2)]
    newest = [row.prompt_uid for row in listed(pool, listing, limit=2, newest_first=True)]
    assert newest == oldest[::-1] == ["p4", "p3", "p2", "p1", "p0"]
    page = getattr(pool, listing)(limit=1, now=NOW, newest_first=True)
    with pytest.raises(InvalidRequestError, match="another listing"):
        getattr(pool, listing)(cursor=page.cursor, now=NOW)
    one = getattr(pool, listing)(limit=1, now=NOW, newest_first=True, prompt_uid="p0")
    assert [row.prompt_uid for row in one.items] == ["p0"]


def test_the_ends_of_trajectories_are_read_by_their_uids_or_their_groups():
    pool = build_pool()
    texts = [{"messages": [text]} for text in ("first", "middle", "last")]
    for i, metadata in enumerate(texts):
        pool.submit_step(step_of("t", "p", i, metadata=metadata), now=NOW)
    pool.submit_step(step_of("u", "p"), now=NOW)
    ends = pool.read_ends(("t", "u", "p", "nobody"), now=NOW)
    told = {uid: [step.extra[0].get("messages") for step in steps] for uid, steps in ends.items()}
    assert told == {"t": [["first"], ["last"]], "u": [None], "p": [["first"], ["last"]]}
    assert all(step.prompt is None for steps in ends.values() for step in steps)


def test_uids_are_found_by_their_beginning():
    pool = build_pool()
    for uid, prompt_uid in (("tea", "p1"), ("tree", "p1"), ("oak", "t-group")):
        pool.submit_step(step_of(uid, prompt_uid), now=NOW)
    found = pool.find_uids("t", now=NOW)
    assert found == [("train", "t-group", None), ("train", "p1", "tea"), ("train", "p1", "tree")]
    assert pool.find_uids("tr", now=NOW) == [("train", "p1", "tree")]
    assert pool.find_uids("t", 1, now=NOW) == found[:1]
    assert pool.find_uids("nobody", now=NOW) == []


def test_tokens_that_calls_have_in_common_are_counted_once():
    pool = build_pool()
    pool.submit_step(step_of("t", "p", 0, prompt_ids=[1, 2], response_ids=[3]), now=NOW)
    reply = step_of("t", "p", 1, prompt_ids=[1, 2, 3, 4], response_ids=[5], parent_index=0)
    pool.submit_step(reply, now=NOW)
    (row,) = pool.list_trajectories(now=NOW).items
    assert (row.n_tokens, row.n_unique_tokens) == (8, 5)


@pytest.mark.slow
def test_groups_with_many_steps_make_a_page_look_at_fewer_of_them():
    pool = build_pool()
    for i in range(200):
        pool.submit_steps([step_of(f"t{i}", f"p{i}", k) for k in range(160)], now=NOW)
    page = pool.list_groups(limit=100, now=NOW)
    assert 50 < len(page.items) < 100
    assert len(listed(pool, "list_groups")) == 200


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_uid_is_found_on_the_first_page_wherever_it_is(listing):
    pool = build_pool()
    for i in range(2 * MIN_LOOKS):
        pool.submit_step(step_of(f"t{i}", f"p{i}"), now=NOW)
    last = 2 * MIN_LOOKS - 1
    page = getattr(pool, listing)(limit=1, now=NOW, prompt_uid=f"p{last}")
    assert (page.items[0].prompt_uid, page.cursor) == (f"p{last}", None)
    if listing != "list_groups":
        page = getattr(pool, listing)(limit=1, now=NOW, trajectory_uid=f"t{last}")
        assert (page.items[0].trajectory_uid, page.cursor) == (f"t{last}", None)


def recovered(folder: Path, **limits: Any) -> tuple[SyncPool, Journal]:
    journal = Journal(folder, "process")
    pool = SyncPool(PoolConfig(default=ChannelConfig(**limits)), epoch="0")
    restore(pool, journal)
    return pool, journal


def close(pool: DataPool, journal: Journal) -> None:
    pool.write_counts()
    journal.close()


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_goes_on_across_a_restart(tmp_path, listing):
    pool, journal = recovered(tmp_path)
    for i in range(12):
        finish(pool, f"p{i}", f"a{i}")
        pool.open_trajectory(f"b{i}", f"p{i}", now=NOW)
        pool.submit_steps([step_of(f"b{i}", f"p{i}", k) for k in (0, 1)], now=NOW)
    everything = uids(listed(pool, listing))
    first = getattr(pool, listing)(limit=len(everything) // 2, now=NOW)
    # Groups before and behind the cursor go, and the one that it stands in.
    gone = {f"p{i}" for i in (0, 1, 5, 6, 9)}
    for uid in gone:
        pool.drop_group(uid, "test", now=NOW)
    close(pool, journal)
    pool, journal = recovered(tmp_path)
    finish(pool, "new", "n")
    assert first.cursor is not None
    seen = uids(list(first.items)) + uids(listed(pool, listing, first.cursor, limit=3))
    assert len(seen) == len(set(seen))
    assert set(uids(listed(pool, listing))) - {"new", "n", "n0"} <= set(seen)
    close(pool, journal)


def test_steps_on_disk_are_read_with_their_tokens_and_stay_there(tmp_path):
    pool, journal = recovered(tmp_path, max_bytes=100, overflow="spill")
    steps = [
        step_of("t", index=0, finish_reason="stop"),
        step_of(
            "t", index=1, prompt_ids=[1, 2, 3, 4, 5, 6], finish_reason="length", parent_index=0
        ),
    ]
    pool.submit_steps(steps, now=NOW)
    pool.write_counts()
    journal.flush()
    pool.spill()
    in_memory = pool.get_statistics("train", now=NOW)["memory_bytes"]
    assert in_memory <= 100
    (exported,) = pool.read_trajectories(now=NOW).unpack()
    assert list(exported.trajectory.steps) == steps
    assert pool.get_statistics("train", now=NOW)["memory_bytes"] == in_memory
    close(pool, journal)


@pytest.mark.parametrize(
    ("listing", "table", "field"),
    [
        ("list_groups", "_OF_GROUPS", "n_complete"),
        ("list_trajectories", "_OF_TRAJECTORIES", "attempt"),
    ],
)
def test_a_filter_that_is_added_to_a_listing_is_obeyed(listing, table, field, varied, monkeypatch):
    monkeypatch.setitem(getattr(listing_module, table), f"min_{field}", NATURAL)
    everything = getattr(varied, listing)(now=NOW).items
    wanted = tuple(row for row in everything if getattr(row, field) >= 2)
    assert 0 < len(wanted) < len(everything)
    assert getattr(varied, listing)(now=NOW, **{f"min_{field}": 2}).items == wanted


def test_a_filter_of_which_an_item_has_no_value_is_no_silent_one(varied, monkeypatch):
    monkeypatch.setitem(listing_module._OF_GROUPS, "min_beauty", NATURAL)
    with pytest.raises(AttributeError, match="beauty"):
        varied.list_groups(now=NOW, min_beauty=1)


# -- whole trajectories ------------------------------------------------------------------------


def test_a_complete_trajectory_is_read_as_it_would_be_served(varied):
    pages = list(varied.read_trajectories(now=NOW, state="complete").unpack())
    assert [(e.trajectory.trajectory_uid, e.state, e.group_state) for e in pages] == [
        ("l0", "complete", "leased"),
        ("r0", "complete", "ready"),
        ("r1", "complete", "ready"),
        ("h0", "complete", "held"),
    ]
    ready, held = pages[1:3], pages[3]
    assert [(e.n_rollouts, e.group_metadata) for e in ready] == [(2, {"task": 3})] * 2
    said = {"trainable": False, "quality": None, "tags": ["odd"], "note": "", "corrections": {}}
    assert held.group_marks == said
    assert (held.marks, ready[0].group_marks) == (None, None)
    lease = varied.lease_batch(now=NOW)
    assert [e.trajectory for e in ready] == list(lease.groups[0].trajectories)


def test_of_an_open_trajectory_the_steps_so_far_are_read_and_its_outcome_apart():
    pool = build_pool()
    steps = [step_of("t", index=i, reward=0.5) for i in range(2)]
    pool.open_trajectory("t", "p", 3, {"m": 1}, now=NOW)
    pool.submit_steps(steps, now=NOW)
    pool.set_reward("t", 2.0, now=NOW)
    pool.set_reward("t", -1.0, 1, now=NOW)
    (exported,) = pool.read_trajectories(now=NOW).unpack()
    assert (exported.state, exported.outcome, exported.n_rollouts) == ("open", 2.0, None)
    assert (exported.trajectory.attempt, exported.trajectory.metadata) == (3, {"m": 1})
    assert [(s.reward, s.is_last) for s in exported.trajectory.steps] == [
        (0.5, False),
        (-1.0, False),
    ]


def test_an_aborted_trajectory_and_one_without_steps_are_read_without_steps(varied):
    varied.open_trajectory("empty", "open", now=NOW)
    found = {
        e.trajectory.trajectory_uid: e
        for e in varied.read_trajectories(now=NOW, prompt_uid="open").unpack()
    }
    assert (found["o1"].state, found["o1"].reason) == ("aborted", "crash")
    assert (found["o1"].trajectory.steps, found["empty"].trajectory.steps) == ((), ())
    assert (found["empty"].state, found["o0"].marks["tags"]) == ("open", ["long", "odd"])


def test_a_page_to_export_ends_after_so_many_bytes():
    pool = build_pool()
    tokens = list(range(PAGE_BYTES // 4 // 3 + 1))
    for i in range(5):
        pool.submit_step(step_of(f"t{i}", f"p{i}", prompt_ids=tokens), now=NOW)
    sizes, cursor = [], None
    while True:
        page = pool.read_trajectories(cursor=cursor, now=NOW)
        sizes.append(len(page.items))
        if (cursor := page.cursor) is None:
            break
    assert sizes == [3, 2]
