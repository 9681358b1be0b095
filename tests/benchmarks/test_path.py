"""`python -m benchmarks path`, and the types that `docs/design/one-step.md` lists."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks import path


def check_list(name: str, types: Collection[str]) -> None:
    written = path.list_on_page(path.HEADINGS[name])[1]
    remedy = f"python -m benchmarks path --only {name} --write"
    assert written == path.listed(types), f"{path.PAGE} differs; {remedy}"


def test_a_turn_is_walked_from_the_socket_to_the_journal_and_the_page_lists_its_types(
    tmp_path: Path,
) -> None:
    walks = asyncio.run(path.walk_all(tmp_path, ["turn"]))
    turn = walks["turn"]
    assert {"gateway/http_protocol.py", "datapool/store/journal.py"} <= {*turn.files()}
    assert "datapool/types.py:Step" in turn.types
    assert not any("<" in name for name in turn.functions), "nested ones do not count"
    check_list("turn", turn.types)


def test_lease_and_settle_are_the_pools_alone(tmp_path: Path) -> None:
    walks = asyncio.run(path.walk_all(tmp_path, ["lease", "settle"]))
    assert [*walks] == ["lease", "settle"]
    for walk in walks.values():
        assert walk.files() == walk.files(["datapool"])
    assert "datapool/types.py:Group" in walks["lease"].types - walks["settle"].types


@pytest.mark.long
def test_two_optimizer_steps_publish_and_the_page_lists_their_shapes(tmp_path: Path) -> None:
    train = asyncio.run(path.walk_all(tmp_path, ["train"]))["train"]
    assert {"trainer/loop.py", "backends/weights/transaction.py"} <= {*train.files()}
    check_list("train", train.shapes())


def test_what_only_some_walks_saw_is_left_out() -> None:
    both = path.Walk({"gateway/a.py:f", "gateway/b.py:g"}, {"gateway/a.py:A"}) & path.Walk(
        {"gateway/a.py:f", "datapool/c.py:tick"}, set()
    )
    assert both == path.Walk({"gateway/a.py:f"}, set())
