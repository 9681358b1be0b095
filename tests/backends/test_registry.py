"""Training backends and engines by name: built in, of installed packages, by dotted path."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from stepwell.backends.base import (
    BACKENDS,
    TrainingBackend,
    build_backend,
    loop_backend,
)
from stepwell.backends.config import EngineConfig, TorchBackendConfig
from stepwell.backends.engines.commands import CommandLine, Launch
from stepwell.backends.engines.kinds import ENGINES, command_line
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import BackendConfigError, EngineStartError
from stepwell.backends.registry import BACKEND_NAMES
from stepwell.backends.torch.backend import TorchBackend
from stepwell.cluster.placement import wanted_gpus
from stepwell.config.load import load_config
from stepwell.show.plugins import show_plugins
from stepwell.trainer.errors import ConfigError

COUNTER = """
from stepwell.backends.base import TrainingBackend

class Counter(TrainingBackend):
    \"\"\"Counts steps.

    More about it.\"\"\"

    def convert(self, steps):
        return len(steps)

class NeedsForest(Counter):
    \"\"\"Grows trees.\"\"\"

    @classmethod
    def missing(cls):
        return "forest is not installed here; pip install 'counter[forest]'"
"""

OWN_OPTIONS = (
    COUNTER
    + """
from stepwell.datapool.config import Section

class CounterOptions(Section):
    start: int = 0

class FromStart(Counter):
    options = CounterOptions

    def __init__(self, config, model_path):
        self.start = self.own_options(config.options).start

    compute_log_probs = train_step = save_weights = state_dict = load_state_dict = print
"""
)

ECHO = """
from stepwell.backends.engines.commands import CommandLine

def echo(config, launch):
    \"\"\"Says its port.\"\"\"
    return CommandLine(["echo", str(launch.port)], {"SAID": config.kind})

def clumsy(config, launch):
    return {}["flags"]

def bare(config, launch):
    return ["echo"]
"""

KINDS = ("embedded", "sglang", "echo")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("name", "1.0", backends={…}, engines={…}, module="code")`: as pip leaves it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(
        name: str,
        version: str,
        *,
        module: str = "",
        backends: dict[str, str] | None = None,
        engines: dict[str, str] | None = None,
    ) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"stepwell.backends": backends or {}, "stepwell.engines": engines or {}}
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (tmp_path / f"{name}.py").write_text(module)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return put


def listed() -> str:
    out = io.StringIO()
    show_plugins(Console(file=out, width=100, highlight=False))
    return out.getvalue()


# --- what is built in


def test_the_torch_backend_is_found_by_name_and_by_dotted_path() -> None:
    assert BACKENDS.load("torch") is TorchBackend
    assert BACKENDS.load("stepwell.backends.torch.backend:TorchBackend") is TorchBackend
    assert BACKENDS.load("stepwell.backends.torch.backend.TorchBackend") is TorchBackend


def test_every_built_in_name_can_be_imported_and_has_a_line_about_it() -> None:
    for found in (*BACKENDS.survey(), *ENGINES.survey()):
        if found.source == "built in":
            assert found.state in ("ready", "missing"), found
            assert found.about


# --- a package adds its own


def test_a_package_adds_a_backend(install: Install) -> None:
    install("counter", "1.2", module=COUNTER, backends={"count": "counter:Counter"})
    assert build_backend("count").convert([]) == 0
    assert BACKEND_NAMES.entry("count").name == "count"
    (found,) = [f for f in BACKENDS.survey() if f.name == "count"]
    assert (found.source, found.state) == ("counter 1.2", "ready")
    assert found.about == "Counts steps. (convert only)"
    assert "counter 1.2" in listed()


def test_a_package_installed_or_uninstalled_while_we_run_is_noticed(
    install: Install, tmp_path: Path
) -> None:
    install("counter", "1", module=COUNTER, backends={"count": "counter:Counter"})
    assert BACKEND_NAMES.entry("count").name == "count"
    install("counted", "1", module=COUNTER, backends={"tally": "counted:Counter"})
    assert BACKEND_NAMES.entry("tally").name == "tally"
    shutil.rmtree(tmp_path / "counter-1.dist-info")
    with pytest.raises(BackendConfigError, match=r"backend is 'count'; .* tally"):
        BACKEND_NAMES.entry("count")


def test_a_package_adds_an_engine(install: Install) -> None:
    install("echoes", "0.1", module=ECHO, engines={"echo": "echoes:echo"})
    config = EngineConfig(kind="echo", model_path=Path("/m"))
    line = command_line(config, Launch(port=31000, model_path="/m"))
    assert line == CommandLine(["echo", "31000"], {"SAID": "echo"})
    (found,) = [f for f in ENGINES.survey() if f.name == "echo"]
    assert (found.source, found.state, found.about) == ("echoes 0.1", "ready", "Says its port.")


def test_an_engine_of_a_plug_in_is_given_gpus_as_sglang_is(install: Install) -> None:
    install("echoes", "0.1", module=ECHO, engines={"echo": "echoes:echo"})
    wanted = {k: wanted_gpus(load_config("quickstart", [f"engine.kind={k}"]))[1] for k in KINDS}
    assert wanted == {"embedded": 0, "sglang": 1, "echo": 1}


def test_a_configuration_names_a_plug_in_without_importing_it(install: Install) -> None:
    install("bomb", "1", module="1 / 0", backends={"b": "bomb:B"}, engines={"e": "bomb:e"})
    config = load_config("quickstart", ["trainer.backend=b", "engine.kind=e"])
    assert (config.trainer.backend, config.engine.kind) == ("b", "e")


def test_what_a_plug_in_lacks_is_told_with_its_remedy(install: Install) -> None:
    install("counter", "1", module=COUNTER, backends={"trees": "counter:NeedsForest"})
    (found,) = [f for f in BACKENDS.survey() if f.name == "trees"]
    assert (found.state, found.about) == ("missing", "Grows trees. (convert only)")
    assert "pip install 'counter[forest]'" in found.problem
    assert "pip install 'counter[forest]'" in listed()


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_a_backend_whose_trainer_runs_the_loop_is_no_choice_for_train(name: str) -> None:
    with pytest.raises(BackendConfigError, match=f"'{name}', which does not implement .*fed from"):
        loop_backend(name, {})


def test_a_backend_for_the_loop_is_refused_where_it_lacks_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchBackend, "missing", classmethod(lambda cls: "torch is not here"))
    with pytest.raises(BackendConfigError, match=r"trainer\.backend is 'torch': torch is not here"):
        loop_backend("torch", {})


def test_stepwells_loop_refuses_a_backend_that_only_converts(install: Install) -> None:
    install("counter", "1", module=COUNTER, backends={"count": "counter:Counter"})
    with pytest.raises(BackendConfigError, match=r"'count', which does not implement .*train_step"):
        loop_backend("count", {})
    assert loop_backend("torch", {}) is TorchBackend


def test_a_plug_in_has_options_of_its_own_checked_by_its_own_model(install: Install) -> None:
    install("counter", "1", module=OWN_OPTIONS, backends={"count": "counter:FromStart"})
    config = TorchBackendConfig.model_validate({"options": {"start": 3}})
    assert loop_backend("count", config.options).__name__ == "FromStart"
    assert vars(build_backend("count", config, "model"))["start"] == 3
    with pytest.raises(BackendConfigError, match=r"backend\.options\.start is 'x': .*integer"):
        loop_backend("count", {"start": "x"})
    with pytest.raises(BackendConfigError, match=r"backend\.options\.stop is 5: .* are start$"):
        loop_backend("count", {"stop": 5})
    with pytest.raises(BackendConfigError, match=r"options\.stop is 5: .* TorchBackend are none$"):
        loop_backend("torch", {"stop": 5})


def test_the_documented_backend_with_options_is_one(install: Install) -> None:
    page = (Path(__file__).parents[2] / "docs/design/backends.md").read_text()
    (code,) = re.findall(
        r"^```python\n(from stepwell.backends.base import TrainingBackend\n.*?)^```",
        page,
        re.M | re.S,
    )
    install("counter", "1", module=code, backends={"count": "counter:Counter"})
    config = TorchBackendConfig.model_validate({"options": {"start": 3}})
    backend = build_backend("count", config, "model", options=[{"num_gpus": 1}])
    assert backend.convert([]) == 3
    (found,) = [f for f in BACKENDS.survey() if f.name == "count"]
    assert (found.state, found.about) == ("ready", "Counts steps. (convert only)")
    with pytest.raises(BackendConfigError, match=r"backend\.options\.start is 'x': .*integer"):
        build_backend("count", TorchBackendConfig(options={"start": "x"}), "model")


# --- wrong names


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "torcch",
            r"backend is 'torcch'; did you mean torch\? choose torch, .* give a dotted path",
        ),
        ("no.such:Thing", "'no.such:Thing' cannot be imported: ModuleNotFoundError"),
        ("stepwell.backends.base:Nothing", "cannot be imported: AttributeError"),
        ("stepwell.backends.base:TokenBatch", "is no TrainingBackend"),
        ("stepwell.backends.base", "is no TrainingBackend|cannot be imported"),
    ],
)
def test_an_unknown_backend_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(BackendConfigError, match=reason) as e:
        BACKENDS.load(name)
    assert "\n" not in str(e.value)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_the_names_of_plug_ins_are_proposed_too(install: Install) -> None:
    install("counter", "1", module=COUNTER, backends={"counting": "counter:Counter"})
    with pytest.raises(BackendConfigError, match=r"did you mean counting\?.* `stepwell backends`"):
        BACKENDS.load("countin")


def test_an_unknown_name_in_a_configuration_costs_no_start() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.backend is 'torcch'; did you mean torch\?"):
        load_config("quickstart", ["trainer.backend=torcch"])
    with pytest.raises(ConfigError, match=r"^engine.kind is 'embeded'; did you mean embedded\?"):
        load_config("quickstart", ["engine.kind=embeded"])


def test_there_is_nothing_to_launch_for_running_servers(tmp_path: Path) -> None:
    config = EngineConfig(kind="attach", urls=("http://127.0.0.1:9",))
    with pytest.raises(ValueError, match="nothing to launch"):
        Supervisor(config, tmp_path)


# --- broken packages


@pytest.mark.parametrize(
    ("module", "exception"),
    [
        ("import no_such_forest", "ModuleNotFoundError: No module named 'no_such_forest'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("class PanicError(BaseException): ...\nraise PanicError('unwrap')", "PanicError: unwrap"),
        ("this is no python", "SyntaxError"),
    ],
)
def test_a_broken_package_is_named_and_the_others_are_listed(
    install: Install, module: str, exception: str
) -> None:
    install("wrecked", "0.3", module=module, backends={"wreck": "wrecked:Wreck"})
    install("counter", "1", module=COUNTER, backends={"count": "counter:Counter"})
    with pytest.raises(BackendConfigError) as e:
        BACKENDS.load("wreck")
    assert str(e.value).startswith(
        "trainer.backend 'wreck' (wrecked 0.3: wrecked:Wreck) cannot be imp"
    )
    assert exception in str(e.value)
    assert "uninstall the package wrecked" in str(e.value)
    assert "\n" not in str(e.value)
    states = {f.name: f.state for f in BACKENDS.survey()}
    assert (states["wreck"], states["count"], states["torch"]) == ("broken", "ready", "ready")
    assert exception in listed()


def test_what_is_no_backend_or_engine_is_refused(install: Install) -> None:
    install(
        "numbers9", "1", module="x = 3", backends={"x": "numbers9:x"}, engines={"x": "numbers9:x"}
    )
    with pytest.raises(BackendConfigError, match=r"\(numbers9 1: numbers9:x\) is no TrainingBack"):
        BACKENDS.load("x")
    with pytest.raises(BackendConfigError, match=r"is no function \(EngineConfig, Launch\)"):
        ENGINES.load("x")


def test_an_engine_that_makes_no_command_line_fails_with_its_reason(
    install: Install, tmp_path: Path
) -> None:
    install("echoes", "1", module=ECHO, engines={"clumsy": "echoes:clumsy", "bare": "echoes:bare"})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for kind, reason in (
        ("clumsy", "builder failed: KeyError: 'flags'"),
        ("bare", r"returned \['echo'\]; it should return a CommandLine"),
    ):
        supervisor = Supervisor(EngineConfig(kind=kind, model_path=model), tmp_path / kind)
        with pytest.raises(EngineStartError, match=reason):
            supervisor.start()
        assert supervisor.state == "failed"
        (found,) = [f for f in ENGINES.survey() if f.name == kind]
        assert found.state == "broken"


# --- one name, two packages


def test_a_name_claimed_twice_is_refused_until_one_is_gone(install: Install) -> None:
    install("counter", "1.2", module=COUNTER, backends={"count": "counter:Counter"})
    install("counted", "3.4", module=COUNTER, backends={"count": "counted:Counter"})
    reason = r"'count' is claimed by more than one: .*counte[rd] .*counte[rd] .*; uninstall all"
    for use in (BACKEND_NAMES.entry, BACKENDS.load):
        with pytest.raises(BackendConfigError, match=reason) as e:
            use("count")
        assert "counter 1.2 (counter:Counter)" in str(e.value)
        assert "counted 3.4 (counted:Counter)" in str(e.value)
    states = {f.name: f.state for f in BACKENDS.survey()}
    assert (states["count"], states["torch"]) == ("claimed twice", "ready")
    assert issubclass(BACKENDS.load("counter:Counter"), TrainingBackend)


def test_a_package_cannot_take_a_built_in_name_in_silence(install: Install) -> None:
    install(
        "usurper",
        "1",
        module=COUNTER,
        backends={"torch": "usurper:Counter"},
        engines={"attach": "usurper:Counter"},
    )
    with pytest.raises(BackendConfigError, match="'torch' is claimed by more than one: built in"):
        BACKENDS.load("torch")
    attached = ["engine.kind=attach", "engine.urls=[http://x]"]
    with pytest.raises(ConfigError, match="'attach' is claimed by more than one: built in"):
        load_config("quickstart", ["trainer.backend=usurper:Counter", *attached])
    assert listed().count("claimed twice") == 2
