"""`python -m benchmarks`: names, options and exit codes."""

from __future__ import annotations

import json
import subprocess
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest

from benchmarks import command, pool, size
from benchmarks.__main__ import BENCHES
from benchmarks.checks import BenchResult, Check
from benchmarks.command import add_options, record, show
from tests.chaos.__main__ import FAULTS

ROOT = Path(__file__).parents[2]
NAMES = {"benchmarks": BENCHES, "tests.chaos": FAULTS}


def main(argv: Sequence[str], package: str = "benchmarks") -> int:
    return command.main(package, NAMES[package], "about", argv)


@pytest.mark.parametrize("package", NAMES)
def test_without_a_name_it_lists_every_module_with_one_line(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], package) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES[package])
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in NAMES.items() for name in names]
)
def test_every_module_says_what_it_does_and_what_it_takes(
    package: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"], package)
    text = capsys.readouterr().out
    assert f"`python -m {package} {name}" in text
    assert "--json" in text


def test_a_name_or_an_option_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pools"])
    assert "choose from 'gateway'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["overlap", "--quick"])
    assert "--quick" in capsys.readouterr().err


def test_a_value_that_a_bench_refuses_is_no_failed_bench(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["publication-kills", "--replicas", "1"], "tests.chaos") == 2
    assert "give at least 2" in capsys.readouterr().err


def test_options_are_the_arguments_of_run() -> None:
    async def run(
        *,
        kinds: Sequence[Literal["a", "b"]] = ("a",),
        n_kills: Annotated[int, "of processes"] = 3,
        lags: Sequence[float] = (),
        quick: bool = False,
        plot: Path | None = None,
    ) -> None: ...

    parser = ArgumentParser()
    add_options(parser, run)
    assert vars(parser.parse_args([])) == {
        "kinds": ("a",),
        "n_kills": 3,
        "lags": (),
        "quick": False,
        "plot": None,
    }
    given = ["--kinds", "b", "a", "--n-kills", "7", "--lags", "0.5", "8", "--quick"]
    assert vars(parser.parse_args([*given, "--plot", "a.png"])) == {
        "kinds": ["b", "a"],
        "n_kills": 7,
        "lags": [0.5, 8.0],
        "quick": True,
        "plot": Path("a.png"),
    }
    assert "of processes" in parser.format_help()


def test_a_bound_that_does_not_hold_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> BenchResult:
        return BenchResult({"ratio": Check(1.0, 2.0, upper=False)}, {"seconds": 3.5})

    monkeypatch.setattr(size, "run", run)
    assert main(["size", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "bench": "size",
        "checks": {"ratio": {"value": 1.0, "bound": 2.0, "holds": False}},
        "figures": {"seconds": 3.5},
    }


def test_size_counts_what_a_room_holds_and_the_wheel_is_their_sum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["size", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    *rooms, wheel = figures["the wheel"]
    assert [row["room"] for row in rooms] == list(size.ROOMS)
    assert all(
        wheel[column] == sum(row[column] for row in rooms) for column in wheel if column != "room"
    )
    (shell,) = [row for row in rooms if row["room"] == "stepwell"]
    assert shell["files"] == len(list((ROOT / "stepwell").rglob("*.py"))), "links are not followed"
    assert figures["configuration keys"] > 100


def test_a_bench_of_tables_alone_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show("lag", BenchResult({}, {"scores": [{"method": "none", "lag 0": 0.97}]}))
    assert "0.97" in capsys.readouterr().out


def test_a_recorded_run_has_its_figures_its_commit_and_its_day(tmp_path: Path) -> None:
    result = BenchResult(figures={"calls": 3})
    result.at_least("ratio", 2.5, 2.0)
    record("gateway", result, "c0ffee", tmp_path)
    run = json.loads((tmp_path / "gateway.json").read_bytes())
    assert run["checks"] == {"ratio": {"value": 2.5, "bound": 2.0, "holds": True}}
    assert (run["bench"], run["figures"]) == ("gateway", {"calls": 3})
    assert (run["commit"], bool(run["date"])) == ("c0ffee", True)


@pytest.mark.parametrize("part", [["--quick"], ["--only", "memory"]])
def test_a_part_of_a_bench_is_not_kept_as_the_run_that_claims_follow(
    part: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
        raise AssertionError("it was run")

    monkeypatch.setattr(pool, "run", run)
    with pytest.raises(SystemExit, match="2"):
        main(["pool", "--keep", *part])
    assert f"leave {part[0]} out" in capsys.readouterr().err


def test_a_bench_that_cannot_be_kept_says_so_before_it_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> BenchResult:
        raise AssertionError("it was run")

    monkeypatch.setattr(size, "run", run)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["size", "--keep"]) == 2
    assert "run the bench in a clone" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "holds"), [(0, True), (1, False), (-1, False)])
def test_what_must_be_zero_is_not_below_it_either(value: int, holds: bool) -> None:
    result = BenchResult()
    result.zero(groups_never_acked=value)
    assert result.checks["groups_never_acked"].holds is holds


def test_make_bench_goes_on_behind_a_bound_that_does_not_hold(tmp_path: Path) -> None:
    programs = {"pip": "exit 0", "python": 'echo "ran $3"; test "$3" != overlap'}
    (tmp_path / "bin").mkdir()
    for name, script in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "--silent", "bench", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    *ran, told = done.stdout.splitlines()
    assert ran == ["ran overlap", "ran pool", "ran gateway", "ran trainer"]
    assert told.endswith(": overlap")
