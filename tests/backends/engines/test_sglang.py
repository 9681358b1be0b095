"""The launch line of a real SGLang, and the import hook it runs with where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines import commands, sglang
from stepwell.backends.engines.commands import CommandLine, Launch, interpreter
from stepwell.backends.errors import EngineStartError

HOOK = Path(sglang.__file__).resolve().with_name("sglang_cpu")


def line(**fields: object) -> CommandLine:
    settings = {"kind": "sglang", "model_path": "/models/base", "python": "/opt/bin/python"}
    config = EngineConfig.model_validate({**settings, **fields})
    return sglang.command(config, Launch(31000, "/run/weights/v7", "7", ("--node-rank", "1")))


def flags(line: CommandLine) -> dict[str, str]:
    return {a: b for a, b in pairwise(line.argv) if a.startswith("--")}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "has_gpu", lambda: True)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "has_gpu", lambda: False)


@pytest.mark.usefixtures("gpus")
def test_it_is_launched_with_its_own_flags() -> None:
    made = line(context_length=4096, extra_args=("--tp", "2"), seed=5)
    assert made.argv[:3] == ["/opt/bin/python", "-m", "sglang.launch_server"]
    assert made.argv[-4:] == ["--node-rank", "1", "--tp", "2"]
    expected = {
        "--model-path": "/run/weights/v7",
        "--tokenizer-path": "/models/base",
        "--weight-version": "7",
        "--port": "31000",
        "--context-length": "4096",
        "--random-seed": "5",
        "--dtype": "auto",
    }
    assert expected.items() <= flags(made).items()
    assert not {"--tool-call-parser", "--reasoning-parser", "--threads", "--device"} & set(
        made.argv
    )
    assert not made.env


@pytest.mark.usefixtures("no_gpus")
def test_without_a_gpu_it_runs_on_the_cpu_and_finds_the_import_hook() -> None:
    made = line(extra_args=("--max-total-tokens", "99"))
    assert {"--device": "cpu", "--dtype": "float32"}.items() <= flags(made).items()
    assert flags(made)["--max-total-tokens"] == "99"  # what is given comes last
    assert made.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert made.env["PYTHONPATH"] == str(HOOK)
    assert flags(line(dtype="bfloat16"))["--dtype"] == "bfloat16"


def test_a_process_from_which_ray_hides_the_gpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    assert commands.has_gpu()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not commands.has_gpu()


def test_its_interpreter_is_the_given_one_else_this_one_else_the_environment_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EngineConfig(kind="sglang", model_path=Path("/m"))
    given = config.model_copy(update={"python": "/opt/bin/python"})
    assert interpreter(given, "sglang", "…") == Path("/opt/bin/python")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "_CHECKOUT", tmp_path / "checkout")
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineStartError, match="make install-sglang") as e:
        interpreter(config, "sglang", "…")
    assert "engine.python" in str(e.value)
    for folder in (tmp_path / "checkout" / ".venv-sglang", tmp_path / ".venv-sglang"):
        before = None if folder.parent.name == "checkout" else interpreter(config, "sglang", "…")
        python = folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        if before is None:  # an installation that was cut off
            with pytest.raises(EngineStartError, match="make install-sglang"):
                interpreter(config, "sglang", "…")
        else:
            assert interpreter(config, "sglang", "…") == before
        package = folder / "lib" / "python3.12" / "site-packages" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        assert interpreter(config, "sglang", "…") == python

    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda _: object())
    assert interpreter(config, "sglang", "…") == Path(sys.executable)


def run_with_hook(code: str, *paths: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HOOK, *paths)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ABSENT = """
import importlib
import torchaudio, sgl_kernel.ops as ops
from torchvision.transforms import functional, InterpolationMode
from torchvision.transforms.v2 import Compose
class Own(Compose):
    pass
@ops.register("name")
def add(a, b):
    return a + b
Own(1, two=2)
assert InterpolationMode.BICUBIC == "BICUBIC"
assert functional.resize(3) is not None
assert not hasattr(torchaudio, "__wrapped__")
try:
    importlib.import_module("no_such_package")
except ModuleNotFoundError:
    print(add(1, 2))
"""
PRESENT = """
import torchaudio
print(torchaudio.__version__, hasattr(torchaudio, "load"))
try:
    import torchaudio.absent
except ModuleNotFoundError:
    print("absent")
"""


def test_packages_that_are_not_installed_are_inert_modules() -> None:
    assert run_with_hook(ABSENT) == "3"


def test_an_installed_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("__version__ = '2.0'\n")
    assert run_with_hook(PRESENT, tmp_path).split() == ["2.0", "False", "absent"]


@pytest.mark.slow
def test_a_torchvision_of_other_builds_of_torch_can_be_imported(tmp_path: Path) -> None:
    """Its operators did not load, so that what gives them shapes finds none."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import extension, _meta_registrations")
    (package / "extension.py").write_text("def _has_ops(): return False")
    shapes = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*a): ..."
    (package / "_meta_registrations.py").write_text(shapes)
    code = "import torch, torchvision; print(torch.ops.torchvision.nms.default.name())"
    assert run_with_hook(code, tmp_path) == "torchvision::nms"
