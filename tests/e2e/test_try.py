"""`stepwell try`: one rollout of a harness at a gateway of its own, and its tree. At that of a live
run: `test_live.py`. The engine runs already; `test_command.py` has the command start its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepwell.cli.main import main
from tests.backends.engines.embedded_here import embedded_here
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.e2e

ASKS = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    body = {"model": "m", "messages": messages, "max_tokens": 8}
    request = urllib.request.Request(
        os.environ["BASE"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "And now?"}]
print("asked twice")
sys.exit(int(sys.argv[2]))
"""


def harness(folder: Path, status: int) -> str:
    (folder / "asks.py").write_text(ASKS)
    command = [sys.executable, str(folder / "asks.py"), "{task.prompt}", str(status)]
    env = {"BASE": "{base_url}/v1", "KEY": "{api_key}"}
    section = {"rollout": {"harness": {"command": command, "env": env}}}
    (folder / "mine.yaml").write_text(json.dumps(section))
    return str(folder / "mine.yaml")


def test_a_rollout_is_shown_as_its_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with embedded_here(ROOT / "examples" / "quickstart" / "model") as url:
        engine = ("engine.kind=attach", f"engine.urls=[{url}]")
        assert main(["try", harness(tmp_path, 0), "What is 12 + 30?", "--json", *engine]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ended"] == "complete"
    (branch,) = told["branches"]
    assert [step["step_index"] for step in branch["steps"]] == [0, 1]
    assert sum(branch["loss_mask"]) > 0
    assert "asked twice" in Path(told["log"]).read_text()


def test_a_task_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"question": "?", "answer": ""}\n')
    mine = harness(tmp_path, 0)
    for argv, why in (
        (["--task", "1", "data=tasks.jsonl"], "--task is 1; data.train has tasks 0 to 0"),
        (["--task", "0"], "data is missing"),
        ([], "there is nothing to try; give PROMPT, or --task N"),
        (["What?", "--task", "0"], "What?"),
    ):
        assert main(["try", mine, *argv]) == 2
        assert why in capsys.readouterr().err
