"""Configuration and the command lines made from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import Launch, embedded
from stepwell.backends.engines.embedded.__main__ import parse_args
from stepwell.backends.engines.kinds import command_line
from stepwell.backends.errors import BackendConfigError


def test_the_embedded_command_line_is_understood_by_the_embedded_engine(model_dirs: Any) -> None:
    config = EngineConfig(
        model_path=model_dirs.base, threads=2, context_length=256, max_running_requests=3, seed=5
    )
    argv = embedded(config, Launch(31000, str(model_dirs.base), "7")).argv
    assert argv[:3] == [sys.executable, "-m", "stepwell.backends.engines.embedded"]
    args = parse_args(argv[3:])
    assert (args.threads, args.context_length, args.max_running_requests) == (2, 256, 3)
    assert (args.weight_version, args.seed, args.port) == ("7", 5, 31000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "attach"}, "urls is empty"),
        ({"model_path": "/m", "urls": ["http://x"]}, "set kind to 'attach'"),
        ({"model_path": "/m", "port": 70000}, "65535"),
        ({"model_path": "/m", "thread": 1}, "Extra inputs"),
    ],
)
def test_a_wrong_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(fields)


def test_the_configuration_loads_no_torch() -> None:
    code = (
        "import sys, stepwell.backends.config, stepwell.backends.weights;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_engine_of_a_kind_that_nobody_registered_has_no_command_line() -> None:
    config = EngineConfig(kind="tgi", model_path=Path("/m"))
    with pytest.raises(
        BackendConfigError, match="'tgi'; choose embedded, sglang, vllm, dynamo, attach"
    ):
        command_line(config, Launch(port=1, model_path="/m"))
