"""Data that is too old, or that somebody wants gone, leaves memory, journal and exported files."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from stepwell.datapool import ChannelConfig, Step
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import (
    InvalidRequestError,
    JournalCorruptError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
from stepwell.datapool.ops import Deleted
from tests.datapool.conftest import DAY, JournaledPool


@pytest.fixture
def pool(tmp_path):
    pool = JournaledPool(tmp_path / "pool")
    yield pool
    pool.journal.close()


# -- what has left is erased -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["acked", "dropped", "deleted"])
def test_the_text_of_a_group_that_left_is_in_no_file_of_the_journal(pool, how):
    for i in range(40):  # so that the secret is not alone on its page
        pool.say(f"t{i}", f"p{i}", f"common text {i}")
    pool.say("secret", "ps", "a secret of somebody")
    pool("complete_trajectory", "secret", 1.0)
    assert pool.holds("a secret of somebody")
    if how == "acked":
        pool("ack", pool("lease_batch").lease_id)
    elif how == "dropped":
        pool("drop_group", "ps", "test")
    else:
        assert pool("delete", "secret").trajectories == ("secret",)
    if how == "deleted":
        pool.later(0)
    else:
        pool.erase()
    assert not pool.holds("a secret of somebody")
    assert pool.holds("common text 17")


def test_a_deletion_erases_what_was_acked_before_too(pool):
    pool.say("t", "p", "an acked one")
    pool("complete_trajectory", "t")
    pool("ack", pool("lease_batch").lease_id)
    pool.say("u", "q", "another one")
    assert pool("delete", "t").trajectories == ()
    pool.later(0)
    assert not pool.holds("an acked one")
    assert pool.holds("another one")


def test_a_file_that_shrinks_keeps_nothing_of_what_left(pool):
    for i in range(200):
        pool.say(f"t{i}", f"p{i}", f"secret {i} " * 2000)
    for i in range(200):
        pool("delete", f"t{i}")
    pool.later(0)
    assert not any(pool.holds(f"secret {i} ") for i in range(0, 200, 20))


# -- retention -------------------------------------------------------------------------------------


def test_groups_are_dropped_for_their_age_whatever_became_of_them(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7)
    pool.say("running", "open", "an open one")
    pool("open_group", "declared", 2)
    pool.say("done", "ready", "a ready one")
    pool("complete_trajectory", "done")
    pool.later(6)
    pool.say("young", "young", "a young one")
    assert pool.groups()["dropped"] == 0
    pool.later(1)
    assert pool.groups()["drop_reasons"] == {"retention": 3}
    assert pool.groups()["open"] == 1
    assert not pool.holds("an open one")
    assert not pool.holds("a ready one")
    assert pool.holds("a young one")
    assert pool.say("running", "open", "more", 1) == "late"


def test_a_leased_group_goes_for_its_age_when_it_is_handed_back(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7, default=ChannelConfig(lease_s=30 * DAY))
    pool.say("t", "p", "a leased one")
    pool("complete_trajectory", "t")
    lease = pool("lease_batch")
    pool.later(7)
    assert pool.groups()["leased"] == 1
    assert pool.holds("a leased one")
    pool("nack", lease.lease_id)
    pool.later(0)
    assert pool.groups()["drop_reasons"] == {"retention": 1}
    assert not pool.holds("a leased one")


def test_the_age_counts_on_through_a_restart(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7)
    pool.say("t", "p", "an old one")
    pool.later(5)
    pool = pool.restart(retention_days=7)
    pool.later(2)
    assert pool.groups()["drop_reasons"] == {"retention": 1}
    assert not pool.holds("an old one")


def test_groups_of_one_age_go_a_few_at_a_time(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=1)
    for i in range(400):
        pool.say(f"t{i}", f"p{i}", f"text {i}")
    pool.now += DAY
    pool("tick")
    assert 0 < pool.groups()["dropped"] < 200, "others are served between"
    assert pool.pool.next_deadline() <= pool.now, "and the rest is due at once"
    pool.later(0)
    assert pool.groups()["dropped"] == 400


# -- deletion --------------------------------------------------------------------------------------


def test_a_trajectory_is_deleted_with_its_group_and_cannot_come_back(pool):
    pool("open_group", "p", 2)
    pool.say("a", "p", "of a")
    pool.say("b", "p", "of b")
    deleted = pool("delete", "a")
    assert (deleted.trajectories, deleted.leased) == (("a", "b"), ())
    assert pool.groups()["drop_reasons"] == {"deleted": 1}
    assert pool.say("a", "p", "of a", 1) == "late"
    assert pool("complete_trajectory", "a", 1.0) == "late"
    assert pool("delete", "a").trajectories == (), "twice is no error"
    assert pool("delete", "never seen").trajectories == ()


@pytest.mark.parametrize("end", ["ack", "nack", "expiry"])
def test_a_leased_group_is_never_served_again_and_goes_with_its_lease(pool, end):
    pool.say("t", "p", "a leased one")
    pool("complete_trajectory", "t")
    lease = pool("lease_batch", lease_s=60)
    deleted = pool("delete", "t")
    assert (deleted.trajectories, deleted.leased) == ((), ("t",))
    pool = pool.restart()
    assert pool.groups()["leased"] == 1, "its consumer may still ack it"
    if end == "expiry":
        pool.later(1)
    else:
        pool(end, lease.lease_id)
    assert pool("lease_batch") is None
    assert pool.groups()["acked" if end == "ack" else "dropped"] == 1
    pool.later(0)
    assert not pool.holds("a leased one")


def test_all_that_has_a_tag_goes_in_every_channel(pool):
    for channel in ("train", "val"):
        for uid in ("mine", "group", "other"):
            step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid=f"p-{uid}")
            pool("submit_step", step, channel)
        pool("mark", trajectory_uid="mine", channel=channel, tags=["ann"])
        pool("mark", prompt_uid="p-group", channel=channel, tags=["ann", "x"])
        pool("mark", trajectory_uid="other", channel=channel, tags=["ann"])
        pool("mark", trajectory_uid="other", channel=channel, tags=["bob"])
    pool = pool.restart()
    deleted = pool("delete", tag="ann")
    assert sorted(deleted.trajectories) == ["group", "group", "mine", "mine"]
    assert pool("delete", tag="ann").trajectories == ()
    assert pool.groups()["open"] == pool.groups("val")["open"] == 1


def test_a_group_that_was_only_declared_goes_with_its_user(pool):
    for uid, user in (("p", "eve"), ("q", "bob")):
        task = {"user": user, "question": f"a question of {user}"}
        pool("open_group", uid, 2, metadata=task)
    assert pool("delete", user="eve") == Deleted()
    assert pool.groups()["drop_reasons"] == {"deleted": 1}
    assert pool("open_trajectory", "t", "p") == "late"
    pool.later(0)
    assert not pool.holds("a question of eve")
    assert pool.holds("a question of bob")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_is_of_the_users_that_its_metadata_names_by_now(pool, restarts):
    pool("open_trajectory", "t1", "said at the end", 0, {"owner": "key"})
    pool.say("t1", "said at the end", "text")
    pool("complete_trajectory", "t1", 1.0, {"user": "end"})
    pool("open_group", "changed", 2)
    pool("open_trajectory", "t2", "changed", 0, {"user": "before"})
    pool("open_trajectory", "t2", "changed", 1, {"user": "after"})
    pool.say("t3", "declared late", "text")
    pool("open_group", "declared late", 2, metadata={"user": "late"})
    pool("open_group", "both", 2, metadata={"user": "both"})
    pool("open_trajectory", "t4", "both", 0, {"user": "other"})
    pool("open_group", "one", 3)
    pool("open_trajectory", "t6", "one", 0, {"user": "one"})
    pool("open_trajectory", "t7", "one", 0, {"user": "mate"})
    pool("delete_trajectory", "t6")
    pool = pool.restart() if restarts else pool
    for user in ("key", "before", "both", "one"):
        assert pool("delete", user=user) == Deleted(), user
    pool("open_trajectory", "t5", "both")
    for user, uids in (
        ("end", ("t1",)),
        ("after", ("t2",)),
        ("late", ("t3",)),
        ("both", ("t4", "t5")),
        ("mate", ("t6", "t7")),
        ("other", ()),
    ):
        assert pool("delete", user=user).trajectories == uids, user


def test_a_deletion_by_user_looks_at_no_group_of_others(pool):
    def n_calls() -> int:
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            pool.pool.delete(user="nobody", now=pool.now)
        finally:
            sys.setprofile(None)
        return len(calls)

    before = n_calls()
    for i in range(50):
        pool("open_group", f"p{i}", 1, metadata={"user": f"u{i}"})
    assert n_calls() < before + 50


def test_many_with_a_tag_go_a_few_at_a_time(pool):
    for i in range(400):
        pool.say(f"t{i}", f"p{i}", "text")
        pool("mark", trajectory_uid=f"t{i}", tags=["ann"])
    first = pool("delete", tag="ann")
    assert first.more
    assert 0 < len(first.trajectories) < 200
    while first.more:
        first += pool("delete", tag="ann")
    assert len(first.trajectories) == 400


@pytest.mark.parametrize("asked", [{}, {"trajectory_uid": "t", "tag": "x"}, {"tag": ""}], ids=str)
def test_a_deletion_names_one_trajectory_or_one_tag(pool, asked):
    with pytest.raises(InvalidRequestError, match="pass"):
        pool("delete", **asked)


# -- one trajectory of several ---------------------------------------------------------------------


def said(uid: str, index: int, prompt: str, text: str, **fields: Any) -> Step:
    """A turn in which `text` stands as ids and as metadata; turns extend each other."""
    before = prompt.encode() + b"".join(f"{text} {i}!".encode() for i in range(index))
    return Step(
        prompt_ids=list(before),
        response_ids=list(f"{text} {index}!".encode()),
        trajectory_uid=uid,
        prompt_uid="p",
        step_index=index,
        policy_version=index,
        parent_index=index - 1 if index else None,
        metadata={"said": f"{text} {index}"},
        **fields,
    )


def content_of(uid: str) -> list[str]:
    return [f"{kind} of {uid}" for kind in ("turn", "metadata", "result", "note", "tag")]


def live(pool: JournaledPool, uid: str, end: str = "complete") -> None:
    """All that is ever written of a trajectory, each with words of its own."""
    pool("open_trajectory", uid, "p", 0, {"who": f"metadata of {uid}"})
    if uid != "a":  # its steps came in one call with those of a sibling
        pool("submit_steps", [said(uid, 1, "the prompt", f"turn of {uid}")])
    pool("mark", trajectory_uid=uid, note=f"note of {uid}", tags=[f"tag of {uid}"])
    pool("set_reward", uid, 0.25, 0)
    if end == "complete":
        pool("complete_trajectory", uid, 1.0, {"result": f"result of {uid}"})
    elif end == "abort":
        pool("abort_trajectory", uid, "crash")


@pytest.fixture
def siblings(pool):
    """A declared group of three, of which `a` and `b` share a prompt and a row of the journal."""
    pool("open_group", "p", 3)
    turns = [said("a", 0, "the prompt", "turn of a"), said("b", 0, "the prompt", "turn of b")]
    pool("submit_steps", [*turns, said("a", 1, "the prompt", "turn of a")])
    pool("submit_steps", [said("c", 0, "a prompt of c", "turn of c")])
    return pool


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("end", ["open", "complete", "abort"])
def test_one_trajectory_is_erased_and_its_siblings_stay_exact(siblings, end, memory):
    pool = siblings
    live(pool, "a", end)
    live(pool, "b")
    if memory is not None:
        pool = pool.restart(memory_limit_bytes=memory)
    assert pool.holds("turn of a 0")
    assert pool("delete_trajectory", "a") == Deleted(("a",))
    pool.later(0)
    assert [text for text in content_of("a") if pool.holds(text)] == []
    assert [text for text in content_of("b") if not pool.holds(text)] == []
    live(pool, "c", "abort")
    for again in range(2):
        lease = pool("lease_batch")
        (group,) = lease.groups
        (served,) = group.trajectories
        assert (group.prompt_uid, served.trajectory_uid) == ("p", "b")
        assert served.metadata == {"who": "metadata of b", "result": "result of b"}
        first, last = (
            said("b", 0, "the prompt", "turn of b"),
            said("b", 1, "the prompt", "turn of b"),
        )
        assert served.steps == (
            replace(first, reward=0.25),
            replace(last, reward=1.0, is_last=True),
        )
        pool("nack", lease.lease_id)
        if not again:
            pool = pool.restart(memory_limit_bytes=memory)
    assert [text for text in content_of("a") if pool.holds(text)] == []


def test_a_prompt_stays_until_the_last_sibling_that_begins_with_it_goes(siblings):
    pool = siblings
    pool("delete_trajectory", "a")
    pool.later(0)
    assert pool.holds("the prompt")
    pool = pool.restart()
    pool("delete_trajectory", "b")
    pool.later(0)
    assert not pool.holds("the prompt")
    assert pool.holds("a prompt of c")
    assert pool.restart()("get_statistics", "train")["trajectories"]["open"] == 1


@pytest.mark.parametrize("end", ["ack", "nack", "expiry"])
def test_of_a_leased_group_one_trajectory_goes_with_the_lease(siblings, end):
    pool = siblings
    for uid in ("a", "b", "c"):
        live(pool, uid)
    lease = pool("lease_batch", lease_s=60, request_id="r")
    assert pool("delete_trajectory", "a") == Deleted((), ("a",))
    assert pool("delete_trajectory", "a") == Deleted((), ("a",))
    pool = pool.restart()
    again = pool("lease_batch", lease_s=60, request_id="r")
    assert again == lease, "whoever has it goes on with all of it"
    if end == "expiry":
        pool.later(1)
    else:
        pool(end, lease.lease_id)
    pool.later(0)
    assert [text for text in content_of("a") if pool.holds(text)] == []
    for _ in range(2):
        pool = pool.restart()
        groups = pool.groups()
        assert (groups["acked"], groups["ready"]) == ((1, 0) if end == "ack" else (0, 1))
    if end != "ack":
        (group,) = pool("lease_batch").groups
        assert [t.trajectory_uid for t in group.trajectories] == ["b", "c"]
        assert group.delivery == 2
        whole = {t.trajectory_uid: t for t in lease.groups[0].trajectories}
        assert [t.steps for t in group.trajectories] == [whole["b"].steps, whole["c"].steps]


def test_what_was_acked_with_its_group_is_erased_too(siblings):
    pool = siblings
    for uid in ("a", "b", "c"):
        live(pool, uid)
    pool("ack", pool("lease_batch").lease_id)
    assert pool("delete_trajectory", "a") == Deleted()
    pool.later(0)
    assert not pool.holds("turn of a 0")


def test_a_deleted_trajectory_does_not_come_back(siblings):
    pool = siblings
    live(pool, "a")
    pool("delete_trajectory", "a")
    for _ in range(2):
        counts = pool("get_statistics", "train")["trajectories"]
        assert (counts["submitted"], counts["open"], counts["aborted"]) == (3, 2, 1)
        assert counts["abort_reasons"] == {"deleted": 1}
        assert pool("submit_step", said("a", 2, "the prompt", "turn of a")) == "late"
        assert pool("open_trajectory", "a", "p", 1, {"who": "metadata of a"}) == "late"
        assert pool("resume_trajectory", "a", "p").outcome == "late"
        assert pool("complete_trajectory", "a", 1.0) == "late"
        assert pool("abort_trajectory", "a", "again") == "late"
        assert pool("set_reward", "a", 1.0) == "late"
        with pytest.raises(TrajectoryClosedError, match="deleted"):
            pool("mark", trajectory_uid="a", note="note of a")
        with pytest.raises(TrajectoryConflictError):
            pool("open_trajectory", "a", "another prompt")
        assert pool("delete_trajectory", "a") == Deleted(), "twice is no error"
        (row,) = pool("list_trajectories", trajectory_uid="a").items
        assert (row.state, row.reason, row.n_steps, row.metadata) == ("aborted", "deleted", 0, {})
        assert pool("delete", tag="tag of a") == Deleted()
        pool = pool.restart()
    assert pool("delete_trajectory", "never seen") == Deleted()


@pytest.mark.parametrize(
    ("n", "least", "ends", "gone", "state"),
    [
        (2, 1, "complete open", 1, "ready"),  # nothing is waited for any more
        (2, 2, "complete open", 1, "too_few_rollouts"),
        (3, 1, "complete open", 1, "open"),  # a third one is to come
        (2, 1, "complete complete", 0, "ready"),
        (2, 2, "complete complete", 0, "too_few_rollouts"),
        (2, 2, "complete complete open", 0, "open"),  # as its third one runs
        (None, 1, "complete complete", 0, "open"),
        (None, 1, "complete complete complete", 1, "ready"),
        (None, 1, "complete complete open", 2, "ready"),
        (2, 1, "complete abort", 0, "deleted"),  # nothing of it is left or to come
        (2, 1, "open", 0, "open"),
        (1, 1, "open", 0, "deleted"),
        (None, 1, "complete", 0, "deleted"),
    ],
)
def test_a_group_goes_on_as_if_the_trajectory_had_been_aborted(
    tmp_path, n, least, ends, gone, state
):
    pool = JournaledPool(tmp_path, default=ChannelConfig(n_rollouts=2))
    if n is not None:
        pool("open_group", "p", n, None, least)
    for k, end in enumerate(ends.split()):
        pool.say(f"t{k}", "p", f"text {k}")
        if end == "complete":
            pool("complete_trajectory", f"t{k}", 1.0)
        elif end == "abort":
            pool("abort_trajectory", f"t{k}", "crash")
    assert pool("delete_trajectory", f"t{gone}").trajectories == (f"t{gone}",)
    for _ in range(2):
        groups = pool.groups()
        if state in ("open", "ready"):
            assert {s: groups[s] for s in ("open", "ready", "dropped")} == {
                "open": int(state == "open"),
                "ready": int(state == "ready"),
                "dropped": 0,
            }
        else:
            assert groups["drop_reasons"] == {state: 1}
        pool = pool.restart(default=ChannelConfig(n_rollouts=2))
    pool.later(0)
    assert not pool.holds(f"text {gone}")


@pytest.mark.parametrize("restarts", [False, True])
def test_the_retry_of_a_deleted_trajectory_can_be_given_up(tmp_path, restarts):
    """Its rollout is to come until then, and nobody else tells the pool that it will not."""
    pool = JournaledPool(tmp_path)
    pool("open_group", "p", 2)
    pool.say("a", "p", "text of a")
    pool("complete_trajectory", "a", 1.0)
    pool.say("b", "p", "text of b")
    pool("abort_trajectory", "b", "crash", True)
    assert pool("delete_trajectory", "b").trajectories == ("b",)
    pool = pool.restart() if restarts else pool
    assert pool("abort_trajectory", "b", "still retried", True) == "late"
    assert pool.groups()["open"] == 1
    assert pool("abort_trajectory", "b", "given up") == "aborted"
    for _ in range(2):
        assert pool.groups()["ready"] == 1
        assert pool("abort_trajectory", "b", "given up") == "late"
        (row,) = pool("list_trajectories", trajectory_uid="b").items
        assert (row.state, row.reason) == ("aborted", "deleted")
        pool = pool.restart()


def test_a_group_that_waited_for_the_deleted_ones_reward_is_served(tmp_path):
    scored = ChannelConfig(selection=SelectionConfig(filters=("scored",)))
    pool = JournaledPool(tmp_path, default=scored)
    pool("open_group", "p", 2)
    for uid, reward in (("a", None), ("b", 1.0)):
        pool.say(uid, "p", f"text of {uid}")
        pool("complete_trajectory", uid, reward)
    assert pool.groups()["held"] == 1
    pool("delete_trajectory", "a")
    assert pool.groups()["held"] == 0
    assert [t.trajectory_uid for t in pool("lease_batch").groups[0].trajectories] == ["b"]


def test_what_cannot_be_read_is_not_taken_out_of_its_group(siblings, monkeypatch):
    pool = siblings

    def broken(rows):
        raise JournalCorruptError("a payload is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(pool.journal, "read", broken)
        with pytest.raises(JournalCorruptError):
            pool("delete_trajectory", "a")
    assert pool("get_statistics", "train")["trajectories"]["open"] == 3
    for uid in ("a", "b", "c"):
        live(pool, uid)
    lease = pool("lease_batch")
    pool("delete_trajectory", "a")
    with monkeypatch.context() as patched:
        patched.setattr(pool.journal, "read", broken)
        pool("nack", lease.lease_id)
    assert pool.groups()["dropped"] == 1, "so nothing of it stays"
    pool.later(0)
    assert not pool.holds("turn of a 0")


def test_what_the_deleted_one_did_for_its_group_outlives_a_restart(tmp_path):
    """The times at which the group got ready and was last active stay."""
    limits = ChannelConfig(group_idle_s=1000)
    pool = JournaledPool(tmp_path, default=limits)
    for uid, prompt_uid in (("a", "first"), ("b", "second"), ("c", "first"), ("d", "running")):
        pool.say(uid, prompt_uid, f"text of {uid}")
        if prompt_uid != "running":
            pool("complete_trajectory", uid, 1.0)
    pool.say("e", "running", "text of e")
    pool.now += 400
    pool("open_trajectory", "e", "running", 0, {"more": "metadata of e"})
    assert pool("delete_trajectory", "a") == Deleted(("a",))
    assert pool("delete_trajectory", "e") == Deleted(("e",))
    for _ in range(2):
        pool = pool.restart(default=limits)
        lease = pool("lease_batch", batch_size=2)
        assert [group.prompt_uid for group in lease.groups] == ["first", "second"]
        pool("nack", lease.lease_id)
    pool.later(900 / DAY)
    assert pool.groups()["open"] == 1, "it was not idle when it heard more"
    pool.later(101 / DAY)
    assert pool.groups()["drop_reasons"] == {"idle": 1}


def test_of_a_group_that_was_handed_back_the_age_is_that_of_what_is_left(tmp_path):
    pool = JournaledPool(tmp_path)
    pool("open_group", "p", 2)
    for uid, version in (("old", 1), ("new", 5)):
        step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid="p")
        pool("submit_step", replace(step, policy_version=version))
        pool("complete_trajectory", uid, 1.0)
    pool("nack", pool("lease_batch").lease_id)
    assert pool("get_statistics", "train")["oldest_policy_version_ready"] == 1
    pool("delete_trajectory", "old")
    for _ in range(2):
        assert pool("get_statistics", "train")["oldest_policy_version_ready"] == 5
        pool = pool.restart()
    pool("delete_trajectory", "new")
    assert pool.groups()["drop_reasons"] == {"deleted": 1}
