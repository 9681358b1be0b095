"""Logs of a run's parts, and output of agents, are in the run's folder."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.datapool import log_files
from stepwell.datapool.log_files import logging_to

ROOT = Path(__file__).parents[2]
ACTOR = """
import logging, sys
from pathlib import Path
from stepwell.datapool.log_files import log_to_file
log_to_file(Path(sys.argv[1]))
print("an agent prints", 1)
print("to stderr", file=sys.stderr)
logging.getLogger("stepwell.gateway.call").info("detail")
logging.getLogger("stepwell.gateway.call").warning("a stream broke off")
logging.getLogger("httpx").info("noise")
logging.getLogger("agent").warning("the user's own")
"""


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_an_actors_log_has_what_it_logs_and_prints_and_so_has_rays(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "gateway.log"
    done = subprocess.run(
        [sys.executable, "-c", ACTOR, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.rpartition(": ")[2] for line in lines(path)] == [
        "an agent prints 1",
        "to stderr",
        "detail",
        "a stream broke off",
        "the user's own",
    ]
    assert " WARNING " in lines(path)[3]
    assert "stepwell.gateway.call" in lines(path)[3]
    assert done.stdout == "an agent prints 1\n"
    assert done.stderr.splitlines() == ["to stderr", "a stream broke off", "the user's own"]


def test_a_folder_that_cannot_be_written_does_not_end_a_part(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    done = subprocess.run(
        [sys.executable, "-c", ACTOR, str(tmp_path / "logs" / "gateway.log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gateway.log cannot be written" in done.stderr
    assert "an agent prints 1" in done.stdout


def test_a_disk_that_is_full_ends_no_part(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    done = subprocess.run(
        [sys.executable, "-c", full + ACTOR, str(tmp_path / "gateway.log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == "an agent prints 1\n"
    assert done.stderr.splitlines() == ["to stderr", "a stream broke off", "the user's own"]


def test_an_agent_finds_all_of_its_standard_output(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from stepwell.datapool.log_files import log_to_file\n"
        "log_to_file(Path(sys.argv[1]))\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "sys.stdout.buffer.write(b'bytes\\n')\n"
        "for percent in range(0, 101, 10):\n"
        "    print(f'\\r{percent} %', end='')\n"
        "print()\n"
    )
    path = tmp_path / "rollout.log"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"bytes\n")
    assert [line.rpartition(": ")[2] for line in lines(path)] == ["100 %"]


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 10_000)
    with logging_to(tmp_path / "trainer.log"):
        for i in range(1000):
            logging.getLogger("stepwell.x").info("line %d", i)
    assert {p.name for p in tmp_path.iterdir()} == {"trainer.log", "trainer.log.1"}
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 20_000
    assert lines(tmp_path / "trainer.log")[-1].endswith("line 999")


def test_the_console_is_as_it_was_and_the_file_has_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import logging, sys; from pathlib import Path\n"
        "from stepwell.datapool.log_files import logging_to\n"
        "def say():\n"
        "    log = logging.getLogger('stepwell.x'); log.info('detail'); log.warning('careful')\n"
        "with logging_to(Path(sys.argv[1])):\n"
        "    say()\n"
        "say()\n"
    )
    path = tmp_path / "trainer.log"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=True)
    assert capfd.readouterr().err == "careful\ncareful\n"
    assert [line.rpartition(" ")[2] for line in lines(path)] == ["detail", "careful"]


def test_a_log_on_a_full_disk_does_not_hide_what_ended_the_run() -> None:
    def run() -> None:
        with logging_to(Path("/dev/full")):
            logging.getLogger("stepwell").warning("does not fit")
            raise ValueError("what ended it")

    with pytest.raises(ValueError, match="what ended it"):
        run()
