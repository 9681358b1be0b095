"""`python -m benchmarks path`, and the types that `docs/design/one-step.md` lists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks import path

PAGE = Path(__file__).parents[2] / "docs/design/one-step.md"


def list_on_page(heading: str) -> str:
    """The code block below a heading of the page."""
    found = re.search(rf"^## {heading}\n.*?^```\n(.*?)\n```$", PAGE.read_text(), re.M | re.S)
    assert found, heading
    return found[1]


def check_list(heading: str, types: Collection[str]) -> None:
    wanted = path.listed(types)
    assert list_on_page(heading) == wanted, f"write this below {heading!r} in {PAGE}:\n{wanted}"


def test_a_turn_is_walked_from_the_socket_to_the_journal_and_the_page_lists_its_types(
    tmp_path: Path,
) -> None:
    walks = asyncio.run(path.walk_all(tmp_path, ["turn"]))
    turn = walks["turn"]
    assert {"gateway/http_protocol.py", "datapool/store/journal.py"} <= {*turn.files()}
    assert "datapool/types.py:Step" in turn.types
    assert not any("<" in name for name in turn.functions), "nested ones do not count"
    check_list("Types of one turn", turn.types)


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
    check_list("Shapes of two optimizer steps", train.shapes())


def test_what_only_some_walks_saw_is_left_out() -> None:
    both = path.Walk({"gateway/a.py:f", "gateway/b.py:g"}, {"gateway/a.py:A"}) & path.Walk(
        {"gateway/a.py:f", "datapool/c.py:tick"}, set()
    )
    assert both == path.Walk({"gateway/a.py:f"}, set())
