"""Selection of the groups that are served, their order, and reasons why others are not."""

from __future__ import annotations

import json
import math
import pickle
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import InvalidRequestError, SelectionError
from stepwell.datapool.selection import (
    UNMARKED,
    Decision,
    Drop,
    GroupInfo,
    Hold,
    Marks,
    Selection,
    TrajectoryInfo,
    dry_run,
)
from tests.helpers import PanicError

UNTRAINABLE = Marks(trainable=False)


def trajectory(uid="t", reward=None, version=0, **fields):
    fields = {"n_steps": 2, "n_tokens": 10, "newest_version": version, **fields}
    return TrajectoryInfo(uid, reward, oldest_version=version, **fields)


def group_info(uid, rewards=(), sequence=0, versions=None, marks=UNMARKED, trajectories=None):
    """A group with one trajectory for each reward."""
    versions = versions or [0] * len(rewards)
    if trajectories is None:
        trajectories = tuple(
            trajectory(f"{uid}{i}", r, v)
            for i, (r, v) in enumerate(zip(rewards, versions, strict=True))
        )
    return GroupInfo(uid, "train", len(trajectories), trajectories, sequence, 0.0, marks=marks)


def select(**config):
    return Selection(SelectionConfig(**config))


def here(function):
    """The dotted path of a function of this module."""
    return f"{__name__}:{function.__name__}"


# -- marks -------------------------------------------------------------------------------------

MARKS = st.builds(
    Marks,
    trainable=st.sampled_from([None, True, False]),
    quality=st.none() | st.floats(-1, 1),
    tags=st.frozensets(st.sampled_from(["good", "bad", "math"])),
    note=st.text(max_size=5),
)


def test_a_partial_update_of_marks_leaves_the_other_fields_and_none_clears_one():
    marks = Marks(trainable=True, quality=0.5, tags=frozenset({"math"}), note="look")
    assert marks.merged({"quality": 1, "tags": ["hard", "hard"]}) == Marks(
        trainable=True, quality=1.0, tags=frozenset({"hard"}), note="look"
    )
    assert marks.merged({"add_tags": ["hard"]}).tags == {"math", "hard"}
    said = marks.merged({"corrections": {"0": "two"}}).merged({"corrections": {"last": "three"}})
    assert said.corrections == {"0": "two", "last": "three"}
    assert said.merged({"corrections": {"0": None}}).corrections == {"last": "three"}
    assert said.merged({"corrections": None}) == marks
    assert marks.merged({"trainable": None, "tags": None, "note": None}) == Marks(quality=0.5)
    assert marks.merged({}) == marks


@given(MARKS)
def test_marks_survive_json(marks):
    assert UNMARKED.merged(json.loads(json.dumps(marks.as_dict()))) == marks


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"trainable": "no"}, "trainable is 'no'; pass True, False, or None"),
        ({"trainable": 1}, "trainable is 1"),
        ({"quality": math.nan}, "quality is nan; pass a finite number"),
        ({"quality": "high"}, "quality is 'high'"),
        ({"quality": 10**400}, "quality is 1000.*; pass a finite number"),
        ({"quality": True}, "quality is True"),
        ({"tags": "math"}, "tags is 'math'; pass a list of strings"),
        ({"tags": 3}, "tags is 3"),
        ({"tags": ["a", ""]}, "tags holds ''"),
        ({"tags": [1]}, "tags holds 1"),
        ({"note": 3}, "note is 3"),
        ({"qualty": 1}, "no field 'qualty' .did you mean 'quality'.*trainable, quality, tags, no"),
    ],
)
def test_a_malformed_mark_names_field_value_and_remedy(update, message):
    with pytest.raises(InvalidRequestError, match=message):
        UNMARKED.merged(update)


# -- what a group says of itself ---------------------------------------------------------------


def test_a_group_sums_up_its_trajectories():
    info = group_info("p", [1.0, None, 0.0, 0.5], versions=[4, 2, 3, 9])
    assert info.rewards == (1.0, 0.0, 0.5)
    assert info.reward_mean == 0.5
    assert info.reward_std == pytest.approx(math.sqrt(1 / 6))
    assert (info.oldest_version, info.newest_version) == (2, 9)
    assert (info.n_steps, info.n_tokens) == (8, 40)
    assert not info.is_scored


def test_what_is_not_known_is_none_and_never_zero():
    empty, unscored, one = (
        group_info("p"),
        group_info("p", [None, None]),
        group_info("p", [0.5, None]),
    )
    assert empty.oldest_version is empty.newest_version is empty.reward_mean is None
    assert unscored.reward_mean is unscored.reward_std is None
    assert one.reward_mean == 0.5
    assert one.reward_std is None
    assert not empty.is_scored


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_the_reward_std_is_the_population_standard_deviation(rewards):
    info = group_info("p", rewards)
    assert info.reward_std == pytest.approx(statistics.pstdev(rewards), rel=1e-6, abs=1e-9)
    assert info.reward_mean == pytest.approx(statistics.fmean(rewards), rel=1e-6, abs=1e-9)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 16))
def test_equal_rewards_have_a_std_of_exactly_zero(reward, n):
    assert group_info("p", [reward] * n).reward_std == 0.0


# -- gates -------------------------------------------------------------------------------------


def test_an_unmarked_group_passes_the_default_gates_as_it_is():
    info = group_info("p", [1.0, 0.0])
    gated, verdict = select().gate(info)
    assert gated is info
    assert verdict is None


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        (Marks(trainable=False), "not_trainable"),
        (Marks(trainable=True), None),
        (Marks(quality=-9, tags=frozenset({"bad"})), None),
        (UNMARKED, None),
    ],
)
def test_a_mark_on_a_group_or_on_all_its_trajectories_holds_it(marks, reason):
    expected = None if reason is None else Hold(reason)
    assert select().gate(group_info("p", [1.0, 0.0], marks=marks))[1] == expected
    each = tuple(trajectory(uid, 1.0, marks=marks) for uid in "ab")
    assert select().gate(group_info("p", trajectories=each))[1] == expected


def test_only_the_trajectories_that_pass_are_served_and_judged():
    info = group_info(
        "p",
        trajectories=(trajectory("a", 1.0), trajectory("b", 0.0, marks=UNTRAINABLE, version=-3)),
    )
    rules = select(filters=["all_correct"], order="freshest")
    gated, verdict = rules.gate(info)
    assert verdict is None
    assert [t.trajectory_uid for t in gated.trajectories] == ["a"]
    assert gated.n_rollouts == 2
    assert rules.judge(info) == Drop("all_correct")
    assert rules.key(info) == 0.0


def test_a_group_with_nothing_left_is_held():
    assert select().gate(group_info("p"))[1] == Hold("no_trajectories")
    untrainable = tuple(trajectory(uid, marks=UNTRAINABLE) for uid in "ab")
    gated, verdict = select().gate(group_info("p", trajectories=untrainable))
    assert verdict == Hold("not_trainable")
    assert gated.trajectories == ()


@given(MARKS, st.lists(MARKS, max_size=4))
def test_gating_twice_is_gating_once(marks, each):
    rules = select()
    info = group_info(
        "p",
        marks=marks,
        trajectories=tuple(trajectory(str(i), marks=m) for i, m in enumerate(each)),
    )
    once, verdict = rules.gate(info)
    twice, again = rules.gate(once)
    assert twice == once
    assert (again is None) == (verdict is None)
    if verdict is None:
        assert once.trajectories
        assert not any(t.marks.trainable is False for t in once.trajectories)


# -- filters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.0, 0.0, 0.0], Drop("zero_variance")),
        ([1.0, 1.0], Drop("zero_variance")),
        ([0.1 + 0.2, 0.3], Drop("zero_variance")),
        ([1.0, 0.0, 0.0], None),
        ([0.0, 1e-5], None),
        ([1.0], None),
        ([None, None], None),
        ([1.0, 1.0, None], None),
    ],
)
def test_zero_variance_drops_groups_whose_rewards_are_all_known_and_equal(rewards, verdict):
    assert select(filters=["zero_variance"]).judge(group_info("p", rewards)) == verdict


@pytest.mark.parametrize(
    ("name", "rewards", "verdict"),
    [
        ("all_correct", [1.0, 1.0], Drop("all_correct")),
        ("all_correct", [1.0, 0.9], None),
        ("all_correct(0.9)", [1.0, 0.9], Drop("all_correct")),
        ("all_correct", [1.0, None], None),
        ("all_wrong", [0.0, 0.0], Drop("all_wrong")),
        ("all_wrong", [0.0, -1.0], Drop("all_wrong")),
        ("all_wrong", [0.0, 0.1], None),
        ("all_wrong(-1)", [0.0, 0.0], None),
        ("all_wrong", [None], None),
        ("scored", [0.0, None], Hold("unscored")),
        ("scored", [0.0, 0.0], None),
    ],
)
def test_the_other_built_in_filters(name, rewards, verdict):
    assert select(filters=[name]).judge(group_info("p", rewards)) == verdict


def test_the_first_objection_decides():
    equal = group_info("p", [1.0, 1.0])
    assert select(filters=["all_correct", "zero_variance"]).judge(equal) == Drop("all_correct")
    assert select(filters=["zero_variance", "all_correct"]).judge(equal) == Drop("zero_variance")
    marked = group_info("p", [1.0, 1.0], marks=Marks(trainable=False))
    assert select(filters=["zero_variance"]).judge(marked) == Hold("not_trainable")


def holds_short(info):
    return Hold("too_short") if info.n_tokens < 100 else None


def returns_true(info):
    return True


def returns_nameless(info):
    return Drop("")


def divides(info):
    return 1 / (info.reward_mean or 0)


def returns_nan(info):
    return math.nan


def returns_text(info):
    return "1"


def returns_too_large(info):
    return 10**400


def exits(info):
    raise SystemExit("no table")


def panics(info):
    raise PanicError("no table")


def by_tokens(info):
    return info.n_tokens


def test_a_dotted_path_is_a_filter_or_an_order():
    rules = select(filters=[here(holds_short)], order=here(by_tokens).replace(":", "."))
    assert rules.judge(group_info("p", [1.0])) == Hold("too_short")
    assert rules.key(group_info("p", [1.0, 2.0])) == 20.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns_true, "returned True for group 'p7'; return None to serve it, or Drop"),
        (returns_nameless, "returned Drop.*for group 'p7'"),
        (divides, "failed on group 'p7': ZeroDivisionError: "),
        (exits, "failed on group 'p7': SystemExit: no table"),
        (panics, "failed on group 'p7': PanicError: no table"),
    ],
)
def test_a_bad_filter_is_named_with_the_group(function, message):
    rules = select(filters=["zero_variance", here(function)])
    with pytest.raises(SelectionError, match=rf"selection.filters\[1\].*{message}"):
        rules.judge(group_info("p7", [0.0, None]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns_nan, "returned nan for group 'p7'; return a number"),
        (returns_text, "returned '1' for group 'p7'"),
        (returns_too_large, "returned 1000.* for group 'p7'"),
        (divides, "failed on group 'p7': ZeroDivisionError: "),
        (exits, "failed on group 'p7': SystemExit: no table"),
        (panics, "failed on group 'p7': PanicError: no table"),
    ],
)
def test_a_bad_order_is_named_with_the_group(function, message):
    with pytest.raises(SelectionError, match=f"selection.order.*{function.__name__}.*{message}"):
        select(order=here(function)).key(group_info("p7", [0.0]))


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"order": "fresh"}, "selection.order is 'fresh'.*did you mean 'freshest'.*use fifo, fr"),
        ({"order": "fifo(3)"}, "selection.order is 'fifo.3.': it takes no argument"),
        ({"filters": ["scored", "x"]}, r"selection.filters\[1\] is 'x', which is not built in; us"),
        ({"filters": ["all_wrong(a)"]}, "could not convert string to float"),
        ({"filters": ["all_wrong(nan)"]}, "nan is out of range"),
        ({"filters": ["slime_filter(a.b)"]}, "refused: it asks for whole samples, .* in sampling"),
        ({"filters": ["math:pi"]}, "math:pi is 3.14.*, not a function"),
        ({"filters": ["json:nothing"]}, "ImportError: module 'json' has no attribute 'nothing'"),
    ],
)
def test_a_bad_name_is_refused_with_its_field_its_value_and_a_remedy(config, message):
    with pytest.raises(SelectionError, match=message):
        select(**config)


def test_a_module_that_fails_at_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_filters.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SelectionError, match=r"'broken_filters:f': ZeroDivisionError"):
        select(filters=["broken_filters:f"])


def test_only_a_selection_with_nothing_to_decide_is_trivial():
    assert select().is_trivial
    for config in (
        {"order": "freshest"},
        {"filters": ["scored"]},
    ):
        assert not select(**config).is_trivial


def test_a_selection_error_survives_pickling():
    error = pickle.loads(pickle.dumps(SelectionError("selection.order is 'x'; use fifo")))
    assert isinstance(error, ValueError)
    assert str(error) == "selection.order is 'x'; use fifo"


# -- orders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fifo", "cdab"),  # c and d were handed back
        ("freshest", "bcad"),  # oldest versions 4, 1, 1, -5; c before a
    ],
)
def test_the_built_in_orders(order, expected):
    infos = [
        group_info("a", [0.0, 1.0], 1, versions=[1, 9]),
        group_info("b", [1.0, 1.0], 2, versions=[4, 4]),
        group_info("c", [0.4, 0.6], -2, versions=[1, 1]),
        group_info("d", [1.0, None], -1, versions=[-5, 0]),
    ]
    rules = select(order=order)
    ordered = sorted(infos, key=lambda i: (rules.key(i), i.sequence))
    assert "".join(i.prompt_uid for i in ordered) == expected


INFOS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), max_size=4),
        st.integers(0, 3),
        st.sampled_from([UNMARKED, UNMARKED, Marks(trainable=False), Marks(quality=0.2)]),
        st.sampled_from([UNMARKED, UNMARKED, UNMARKED, Marks(trainable=False)]),
    ),
    max_size=12,
).map(
    lambda rows: [
        group_info(
            f"p{i}",
            sequence=i - 3,
            marks=group_marks,
            trajectories=tuple(
                trajectory(f"p{i}t{j}", r, version + j, marks=marks if j == 0 else UNMARKED)
                for j, r in enumerate(rewards)
            ),
        )
        for i, (rewards, version, marks, group_marks) in enumerate(rows)
    ]
)
CONFIGS = st.builds(
    SelectionConfig,
    order=st.sampled_from(["fifo", "freshest"]),
    filters=st.lists(
        st.sampled_from(["zero_variance", "scored", "all_correct", "all_wrong"]), max_size=2
    ),
)


@given(INFOS, CONFIGS)
def test_the_order_is_total_and_the_same_whatever_order_groups_come_in(infos, config):
    rules = Selection(config)

    def ordered(groups):
        return [i.prompt_uid for i in sorted(groups, key=lambda i: (rules.key(i), i.sequence))]

    assert ordered(infos) == ordered(infos[::-1])
    assert len({(rules.key(i), i.sequence) for i in infos}) == len(infos)


# -- dry run -----------------------------------------------------------------------------------


def dry(rules, infos, batch_size):
    return dry_run(rules, infos, batch_size, lambda i: (rules.judge(i), rules.key(i)))


@given(INFOS, CONFIGS, st.integers(1, 4))
def test_a_dry_run_agrees_with_the_rules_applied_one_after_the_other(infos, config, n):
    rules = Selection(config)
    run = dry(rules, infos[::-1], n)
    by_uid = {d.prompt_uid: d for d in run.decisions}
    assert len(by_uid) == len(run.decisions) == len(infos)

    verdicts = {i.prompt_uid: rules.judge(i) for i in infos}
    for uid, verdict in verdicts.items():
        if verdict is not None:
            decision = "drop" if isinstance(verdict, Drop) else "hold"
            assert (by_uid[uid].decision, by_uid[uid].reason) == (decision, verdict.reason)
            assert by_uid[uid].rank is None
    servable = sorted(
        (i for i in infos if verdicts[i.prompt_uid] is None),
        # What was handed back comes before everything else.
        key=lambda i: (-math.inf if i.sequence < 0 else rules.key(i), i.sequence),
    )
    assert [by_uid[i.prompt_uid].rank for i in servable] == list(range(1, len(servable) + 1))
    served = [i.prompt_uid for i in servable[:n]] if len(servable) >= n else []
    assert [d.prompt_uid for d in run.decisions if d.decision == "serve"] == served
    for info in infos:
        decision, gated = by_uid[info.prompt_uid], rules.gate(info)[0]
        assert decision.reward_std == gated.reward_std
        assert decision.n_trajectories + decision.n_withheld == len(info.trajectories)


def test_a_dry_run_says_in_order_what_is_served_waits_is_held_and_is_dropped():
    infos = [
        group_info("a", [1.0, 1.0], 1),
        group_info("b", [0.0, 1.0], 2, versions=[3, 4]),
        group_info("c", [0.0, 0.2], 3),
        group_info("d", [0.0, 1.0], 4, marks=Marks(trainable=False)),
        group_info("e", [0.0, 0.5], 5, versions=[1, 1]),
    ]
    config = SelectionConfig(order="freshest", filters=["zero_variance"])
    run = dry(Selection(config), infos, 2)
    assert [(d.prompt_uid, d.decision, d.reason, d.rank) for d in run.decisions] == [
        ("b", "serve", "in_order", 1),
        ("e", "serve", "in_order", 2),
        ("c", "wait", "later_batch", 3),
        ("d", "hold", "not_trainable", None),
        ("a", "drop", "zero_variance", None),
    ]
    assert run.decisions[0] == Decision(
        prompt_uid="b",
        decision="serve",
        reason="in_order",
        rank=1,
        reward_mean=0.5,
        reward_std=0.5,
        oldest_version=3,
        newest_version=4,
        n_trajectories=2,
        n_withheld=0,
    )
    assert run.counts == {
        "serve": {"in_order": 2},
        "wait": {"later_batch": 1},
        "hold": {"not_trainable": 1},
        "drop": {"zero_variance": 1},
    }


def test_a_group_that_waits_for_others_says_so():
    infos = [group_info(uid, [0.0, 1.0], i) for i, uid in enumerate("abc")]
    assert [d.reason for d in dry(select(), infos, 4).decisions] == ["not_enough_groups"] * 3
