"""Findings of `stepwell doctor` and their remedies; of a live run: `test_connect.py`."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from stepwell import load_config
from stepwell.backends.weights import WeightStore
from stepwell.cli.main import main
from stepwell.run.folder import begin, only_run_in, read_run
from stepwell.show import doctor
from stepwell.show.doctor import Finding, finding_line, verdict
from stepwell.show.run import limits_of
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.metrics import MetricsWriter

MODEL = load_config("quickstart").model.path


class Usage(NamedTuple):
    """Result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's, to be broken."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_sound_model_is_ok() -> None:
    assert [f.state for f in doctor.tokenizer(str(MODEL), MODEL)] == ["ok"]
    assert [f.state for f in doctor.chat_template(str(MODEL))] == ["ok"]


def test_a_tokenizer_of_a_larger_model_is_a_problem(model: Path) -> None:
    change(model / "config.json", vocab_size=100)
    (found,) = doctor.tokenizer(str(MODEL), model)
    assert (found.state, "the model 100 rows" in found.text) == ("problem", True)
    assert "gateway.tokenizer_path" in found.remedy


def test_a_model_that_does_not_stop_at_the_end_of_a_turn_is_told(model: Path) -> None:
    change(model / "config.json", eos_token_id=7)
    (model / "generation_config.json").write_text('{"eos_token_id": [8]}')
    (found,) = doctor.tokenizer(str(model), model)
    assert found.state == "warning"
    assert "the model stops at [7, 8]" in found.text
    assert "generation_config.json" in found.remedy


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "becomes a branch"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% if not loop.last %}<|im_end|>{% endif %}\n{% endfor %}",
            "branch",
        ),
        (
            "{% for m in messages %}{% if loop.last or m.role != 'user' %}<|im_start|>"
            "{{ m.role }}\n"
            "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "is not what the template writes of the whole",
        ),
    ],
)
def test_a_template_whose_turns_do_not_extend_each_other_is_told(
    model: Path, template: str, words: str
) -> None:
    change(model / "tokenizer_config.json", chat_template=None)
    (model / "chat_template.jinja").write_text(template)
    (found,) = doctor.chat_template(str(model))
    assert found.state == "warning"
    assert words in found.text


def test_calls_of_tools_that_the_gateway_does_not_read_are_told(model: Path) -> None:
    config = load_config("quickstart").gateway
    (found,) = doctor.tool_calls(str(MODEL), config)
    assert (found.state, found.text) == ("ok", "calls of tools are read as hermes")
    (found,) = doctor.tool_calls(str(MODEL), config.model_copy(update={"tool_parser": "none"}))
    assert (found.state, "gateway.tool_parser" in found.text) == ("ok", True)
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("<tool_call>", "[CALL]"))
    (found,) = doctor.tool_calls(str(model), config)
    assert (found.state, "agents get them as text" in found.text) == ("warning", True)
    template.write_text(text.replace("f.name", "''"))
    (found,) = doctor.tool_calls(str(model), config)
    assert (found.state, found.text) == ("warning", "the template leaves tools out")


def test_a_tokenizer_without_a_configuration_beside_it_is_taken_as_it_is(model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (model / name).unlink()
    (found,) = doctor.tokenizer(str(MODEL), model)
    assert (found.state, "ids up to" in found.text) == ("ok", True)


def test_what_is_not_installed_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", requires)
    (found,) = doctor.packages()
    assert (found.state, found.remedy) == ("warning", "pip install -e .")


def test_packages_that_lack_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["rich>=999", "no-such-package>=1", "numpy>=1", "verl>=9; extra == 'verl'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked)
    found = list(doctor.packages())
    assert [(f.state, f.remedy) for f in found] == [
        ("problem", "pip install 'rich>=999'"),
        ("problem", "pip install 'no-such-package>=1'"),
    ]


@pytest.mark.parametrize(("factor", "states"), [(3.0, ["ok", "warning"]), (0.5, ["ok"])])
def test_a_cpu_that_does_not_compute_in_bfloat16_is_told(
    monkeypatch: pytest.MonkeyPatch, factor: float, states: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("stepwell.backends.engines.commands.has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "bfloat16_by_float32", lambda: factor)
    config = load_config("quickstart", ["engine.dtype=bfloat16"])
    found = list(doctor.torch_device(config))
    assert [f.state for f in found] == states
    if factor > 1:
        assert "engine.dtype = bfloat16 takes 3.0 × float32's time" in found[1].text
        assert found[1].remedy == "engine.dtype=float32"


def test_a_torch_that_sees_no_gpu_where_there_is_one_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("stepwell.backends.engines.commands.has_gpu", lambda: True)
    (found,) = doctor.torch_device(None)
    assert found.state == "problem"
    assert "sees no GPU, but this machine has one" in found.text
    assert "nvidia-smi" in found.remedy


def test_the_time_of_bfloat16_is_measured() -> None:
    assert doctor.bfloat16_by_float32() > 0


def test_a_disk_that_is_nearly_full_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = doctor.disk(tmp_path / "not" / "yet", None)
    assert found.text.startswith(f"{tmp_path}: ")
    monkeypatch.setattr(doctor, "FEW_BYTES", 1e18)
    (found,) = doctor.disk(tmp_path, None)
    assert (found.state, found.remedy.startswith("free space")) == ("warning", True)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "FEW_BYTES", 0)
    monkeypatch.setattr(doctor, "SLOW_DISK", 1e18)
    (found,) = doctor.disk(tmp_path, None)
    assert (found.state, found.remedy) == (
        "warning",
        "set run.dir to a local disk: weights go through it",
    )


@pytest.mark.parametrize(("durability", "state"), [("power", "warning"), ("process", "ok")])
def test_a_disk_that_syncs_slowly_is_told_to_a_journal_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "FEW_BYTES", 0)
    monkeypatch.setattr(doctor, "SLOW_DISK", 0)
    monkeypatch.setattr(doctor, "_sync_s", lambda file: 1.0)
    config = load_config("quickstart", [f"pool.durability={durability}"])
    (found,) = doctor.disk(tmp_path, config)
    assert (found.state, "1000.0 ms per sync" in found.text) == (state, True)
    assert ("pool.journal_dir" in found.remedy) == (state == "warning")


def test_shared_memory_that_is_too_small_for_rays_store_is_told_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str | None, int]] = []

    @contextmanager
    def connected(address: str | None, namespace: str, size: int) -> Iterator[None]:
        asked.append((address, size))
        yield

    monkeypatch.setattr(doctor, "connected", connected)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10 << 20, 0, 10 << 20))
    config = load_config("quickstart", ["cluster.object_store_mb=300"])
    small, started = doctor.ray_starts(config)
    assert (small.state, "has 10 MB free, Ray's store takes 300 MB" in small.text) == (
        "warning",
        doctor.SHM.is_dir(),
    )
    assert (started.state, started.text.startswith("starts in")) == ("ok", True)
    (found,) = doctor.ray_starts(load_config("quickstart", ["cluster.address=10.0.0.2:6379"]))
    assert found.text.startswith("at 10.0.0.2:6379 answers in")
    assert asked == [(None, 300), ("10.0.0.2:6379", 256)]


def test_every_finding_comes_also_after_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ray_starts", lambda config: [Finding("ray", "ok", "starts")])
    argv = ["doctor", f"run.dir={tmp_path / 'run'}", "model.path=" + str(MODEL)]
    argv += ["engine.kind=attach", "engine.urls=[http://127.0.0.1:9]", "rollout.agent=nowhere:run"]
    argv += [f"data={tmp_path / 'tasks.jsonl'}"]
    lines = [json.dumps({"question": f"{i} + 1?", "answer": f"{i + 1}"}) for i in range(64)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    assert main([*argv, "--json"]) == 1
    found = {(f["name"], f["state"]): f for f in json.loads(capsys.readouterr().out)}
    assert "rollout.agent is 'nowhere:run'" in found["configuration", "problem"]["text"]
    assert "http://127.0.0.1:9 does not answer" in found["engine", "problem"]["text"]
    assert ("template", "ok") in found


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_file_of_a_model_is_a_problem_and_the_rest_is_looked_at(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    (model / name).write_text("{")
    monkeypatch.setattr(doctor, "ray_starts", lambda config: [Finding("ray", "ok", "starts")])
    argv = ["doctor", "--config", "quickstart", f"model.path={model}", f"run.dir={tmp_path / 'r'}"]
    assert main([*argv, f"gateway.tokenizer_path={MODEL}", "--json"]) == 1
    found = {(f["name"], f["state"]): f for f in json.loads(capsys.readouterr().out)}
    why = f"the model in {model}, whose {name} cannot be read"
    assert why in found["tokenizer", "problem"]["text"]
    assert ("template", "ok") in found


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = doctor.torch_device(load_config("quickstart"))
    assert (found.name, found.state) == ("torch", "problem")
    assert "install" in found.remedy


def test_a_finding_is_told_without_colours_too() -> None:
    console = Console(width=60, no_color=True, record=True, file=io.StringIO())
    found = [Finding("disk", "warning", "3 GB free", "free space"), Finding("ray", "problem", "x")]
    for each in found:
        console.print(finding_line(each))
    console.print(verdict(found))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "! disk          3 GB free",
        "                → free space",
        "✗ ray           x",
        "",
        "1 problem, 1 warning",
    ]


def a_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def ended_run(folder: Path) -> Path:
    """The folder of a run that has ended, with a version, a ledger and a score that collapsed."""
    with only_run_in(folder):
        begin(load_config("quickstart", [f"run.dir={folder}"]))
        store = WeightStore(folder / "weights")
        store.commit(3, store.write(3, a_model))
    ledger = Ledger(folder / "checkpoints" / "ledger.jsonl")
    ledger.issued("p", "i")
    ledger.close()
    with MetricsWriter(folder, []) as metrics:
        for step, score in enumerate((0.35, 0.0)):
            metrics.write({"step": step, "val/score": score, "lr": 0.01})
    return folder


def told(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Finding]:
    """By name, of Ray, the files and the score."""
    main(["doctor", str(folder), "--json"])
    found = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)]
    return {f.name: f for f in found if f.name in ("ray", "files", "learning", "gateway")}


def test_a_run_that_has_ended_is_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, ended_run(tmp_path))
    assert found.keys() == {"ray", "files", "learning"}
    assert found["ray"].state == "ok"  # one was started
    assert found["files"].text == "the run has ended; version 3, 1 entries in its ledger"
    assert found["learning"].state == "warning"
    assert "fell from 0.35 to 0.00" in found["learning"].text


def test_a_live_run_whose_gateway_has_keys_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with its own limits: `run.json` hides the keys, which are no part of them."""
    keys = ["gateway.host=0.0.0.0", f"gateway.admin_keys=[{'k' * 32}]"]
    limit = "rollout.max_outstanding_groups=70"
    begin(load_config("quickstart", [f"run.dir={tmp_path}", *keys, limit]))
    with only_run_in(tmp_path):
        assert main(["doctor", str(tmp_path)]) == 0, capsys.readouterr()
    assert limits_of(read_run(tmp_path)).channel("train").max_outstanding_groups == 70


def test_a_live_runs_model_is_found_from_another_folder_than_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    Path("runs/mine").mkdir(parents=True)
    begin(load_config("quickstart", ["model.path=model", "run.dir=runs/mine"]))
    monkeypatch.chdir("/")
    with only_run_in(tmp_path / "runs/mine"):
        assert main(["doctor", str(tmp_path / "runs/mine")]) == 0, capsys.readouterr()


LACKING = """
import importlib.metadata as metadata, sys
LEFT_OUT, found = {"xxhash", "fastokens"}, metadata.version

def version(name):
    if name in LEFT_OUT:
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.version = version
sys.modules |= dict.fromkeys(LEFT_OUT)
from stepwell.cli.main import main
sys.exit(main(["doctor"]))
"""


def test_an_environment_without_what_the_doctor_needs_is_told_all_that_it_lacks() -> None:
    """Installed with --no-deps, beside another package's pins, as docs/install.md has it."""
    done = subprocess.run(
        [sys.executable, "-c", LACKING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    told, remedy = line.removeprefix("stepwell: not installed here: ").split("; pip install ")
    assert {each.partition(">=")[0] for each in told.split(", ")} == {"xxhash", "fastokens"}
    assert remedy == " ".join(f"'{each}'" for each in told.split(", "))


@pytest.mark.parametrize("name", ["run.json", "weights/current.json", "checkpoints/ledger.jsonl"])
def test_a_damaged_file_of_a_run_is_a_problem(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr(doctor, "ray_starts", lambda config: [Finding("ray", "ok", "starts")])
    file = ended_run(tmp_path) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = told(capsys, tmp_path)["files"]
    assert (found.state, str(file) in found.text) == ("problem", True)
    assert found.remedy


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["runs/x", "--config", "quickstart"], "give one RUN, or --config"),
        (["--config", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert len(err.splitlines()) == 1
