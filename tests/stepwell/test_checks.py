"""A mistake is told in one line with its key and the remedy, before Ray starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from stepwell.backends.torch.memory import ModelShape
from stepwell.cli.main import main
from stepwell.cluster.placement import Node
from stepwell.config.load import load_config
from stepwell.gateway.errors import PortInUseError
from stepwell.run import checks
from stepwell.run.checks import gateway_port
from stepwell.run.folder import GatewayPart, begin, only_run_in
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.rollout.agents import load_agent
from tests.e2e.conftest import ROOT
from tests.trainer.small_run import small_config
from tests.vision_model import make_vision_model

MODEL = ROOT / "examples" / "quickstart" / "model"
CODE = """
import functools
async def good(task, base_url, api_key): return 1.0
async def no_key(task, base_url): return 1.0
async def more(task, base_url, api_key, model): return 1.0
def sync(task, base_url, api_key): return 1.0
def score(data_source, solution_str, ground_truth, extra_info): return 1.0
def three(solution, answer, extra): return 1.0
partial = functools.partial(more, model="m")
@functools.wraps(good)
async def wrapped(*args, **kwargs): return await good(*args, **kwargs)
class Agent:
    async def __call__(self, task, base_url, api_key): return 1.0
instance = Agent()
"""

BACKEND = """
from stepwell.backends.base import TrainingBackend
class Plain(TrainingBackend):
    convert = compute_log_probs = train_step = save_weights = state_dict = load_state_dict = print
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with everything that the mistakes below name."""
    root = tmp_path_factory.mktemp("project")
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(6)]
    for name, part in (("train", rows[:4]), ("val", rows[4:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (root / "empty.jsonl").touch()
    (root / "broken.jsonl").write_text(json.dumps(rows[0]) + '\n{"question": \n')
    (root / "other_keys.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    (root / "no_label.jsonl").write_text('{"question": "1 + 1?", "gold": "2"}\n')
    (root / "checks_code.py").write_text(CODE)
    (root / "checks_backend.py").write_text(BACKEND)
    (root / "checks_raises.py").write_text("import os\nos.environ['CHECKS_NO_SUCH_KEY']\n")
    (root / "checks_syntax.py").write_text("async def agent(task, base_url, api_key) return 1\n")
    (root / "checks_exits.py").write_text("raise SystemExit('give --port')\n")
    panic = "class PanicError(BaseException): ...\n\nraise PanicError('unwrap')\n"
    (root / "checks_panics.py").write_text(panic)  # as a package that is written in Rust
    (root / "checks_lacks.py").write_text("import checks_not_installed\n")
    (root / "file").touch()
    for name in ("no_tokenizer", "no_template", "no_weights", "cut_off", "pointer", "huge", "new"):
        shutil.copytree(MODEL, root / name)
    (root / "no_tokenizer" / "tokenizer.json").unlink()
    (root / "no_tokenizer" / "tokenizer_config.json").unlink()
    (root / "no_template" / "chat_template.jinja").unlink(missing_ok=True)
    (root / "no_weights" / "model.safetensors").unlink()
    with (root / "cut_off" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    (root / "pointer" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1"
    )
    (root / "new" / "config.json").write_text('{"model_type": "nonesuch"}')
    shape = [1_000_000, 1_000_000]
    size = 4 * shape[0] * shape[1]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"weight": tensor}).encode()
    with (root / "huge" / "model.safetensors").open("wb") as file:  # sparse
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return root


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def train(folder: Path, *mistake: str) -> list[str]:
    run = folder / "run"
    return [
        "train",
        "--config",
        "quickstart",
        f"run.dir={run}",
        "logging.wandb=disabled",
        "data.train.kind=jsonl",
        f"data.train.path={folder / 'train.jsonl'}",
        "data.val.kind=jsonl",
        f"data.val.path={folder / 'val.jsonl'}",
        "rollout.agent=checks_code:good",
        *mistake,
    ]


MISTAKES = {
    # the agent
    "rollout.agent=checks_nowhere:agent": "there is no module 'checks_nowhere' in {folder}",
    "rollout.agent=checks_code:god": "checks_code has no 'god'; did you mean 'good'?",
    "rollout.agent=checks_code": "name an async function as package.module:function",
    "rollout.agent=checks_code.py": "a file; name the async function in it: checks_code.py:FUNC",
    "rollout.agent=checks_code.py:god": "checks_code.py has no 'god'; did you mean 'good'?",
    "rollout.agent=no/agent.py:good": "but there is no file {folder}/no/agent.py; name an existing",
    "rollout.agent=no/agent:good": "package.module:function or path/to/file.py:function",
    "rollout.agent=checks_raises.py:agent": "checks_raises.py, line 2): KeyError: 'CHECKS",
    "rollout.agent=checks_code:sync": "is no coroutine function; write it as async def agent(",
    "rollout.agent=checks_code:Agent": "is no coroutine function; write it as async def agent(",
    "rollout.agent=checks_code:no_key": "as no_key(task, base_url, api_key): too many positional",
    "rollout.agent=checks_code:more": "missing a required argument: 'model'; write it as async def",
    "rollout.agent=checks_raises:agent": "checks_raises.py, line 2): KeyError: 'CHECKS",
    "rollout.agent=checks_syntax:agent": "checks_syntax.py, line 1): SyntaxError: expected ':'",
    "rollout.agent=checks_exits:agent": "checks_exits.py, line 1): SystemExit: give --port",
    "rollout.agent=checks_panics:agent": "checks_panics.py, line 3): PanicError: unwrap",
    "rollout.agent=checks_lacks:agent": "checks_lacks.py, line 1): ModuleNotFoundError: No module",
    # the reward
    "rollout.reward=checks_code:three": "cannot be called as three(data_source, solution_str,",
    "rollout.reward=checks_code:scor": "checks_code has no function 'scor'",
    "rollout.reward=checks_exits:score": "SystemExit: give --port",
    "rollout.reward=checks_panics.py:score": "PanicError: unwrap",
    "rollout.reward=mahts": "rollout.reward: reward is 'mahts'; name a built-in (code, dapo, ",
    # the data
    "data.train.path={folder}/nowhere.jsonl": "data.train: path is '{folder}/nowhere.jsonl', which",
    "data.train.path={folder}/empty.jsonl": "empty.jsonl has no tasks; write one JSON object per",
    "data.train.path={folder}/broken.jsonl": "broken.jsonl:2 is no JSON (line 2, column 14: ",
    "data.train.path={folder}/other_keys.jsonl": "has no 'question'; set prompt_key to the",
    "data.train.path={folder}/no_label.jsonl": "no_label.jsonl:1 has no answer; name the answer's",
    "data.val.path={folder}/broken.jsonl": "data.val: {folder}/broken.jsonl:2 is no JSON",
    "data.train.path={folder}/val.jsonl": "are also in data.val",
    # the model
    "model.path={folder}/no_tokenizer": "which has no tokenizer; add the model's tokenizer.json",
    "model.path={folder}/no_template": "whose tokenizer has no chat template",
    "model.path={folder}/no_weights": "which has no weights (*.safetensors); download",
    "model.path={folder}/cut_off": "model.safetensors is cut off or damaged (",
    "model.path={folder}/pointer": "whose model.safetensors is a Git LFS pointer, not the weights",
    "model.path={folder}/new": "of the architecture 'nonesuch', which transformers",
    "model.path={folder}/huge": "1 × embedded engine takes 20000 GB, this machine has",
    # the machine
    "gateway.port={taken}": "gateway.port is {taken}, which another process uses on 127.0.0.1;",
    "engine.port={taken}": "engine.port is {taken} on 127.0.0.1, which cannot be had (Address alre",
    "engine.host=192.0.2.1": "engine.host is '192.0.2.1' and engine.port is 0: Cannot assign requ",
    "gateway={{host: 192.0.2.1, admin_keys: aaaaaaaaaaaaaaaa, port: 0}}": "gateway.host is '192.0.",
    "run.dir={folder}/file/run": "run.dir is '{folder}/file/run', which cannot be written (Not a d",
    "pool.journal_dir={folder}/file/j": "pool.journal_dir is '{folder}/file/j', which cannot be wr",
    "trainer.save_debug_rollout_data={folder}/file/b": "trainer.save_debug_rollout_data is",
    "engine.python={folder}/no/python": "engine.python is '{folder}/no/python', which is no p",
    "gateway.loss_mask_type=custom_task": "gateway.loss_mask_type: is 'custom_task'; choose one",
    "gateway.loss_mask_type=checks_code:maks": "gateway.loss_mask_type: 'checks_code:maks' cannot",
    # plug-ins and logs
    "trainer.backend=checks_nowhere:Backend": "trainer.backend 'checks_nowhere:Backend' cannot be",
    "trainer.backend=verl": "trainer.backend is 'verl', which does not implement compute_log_",
    "pool.default.selection.order=nowhere:order": "pool.default.selection.order is 'nowhere:",
    "pool.default.selection.filters=[slime_filter(checks_code:two)]": "name it in sampling.filters",
    "sampling.filters=[slime_filter(checks_code:three)]": "cannot be called as slime's filters are",
    "trainer.load_debug_rollout_data={folder}/no": "where no batch is recorded; name what",
    # where it goes on
    "run.resume=7": "run.resume is 7, but {folder}/run/checkpoints has no step_7; it has none",
    "run.resume={folder}/file": "run.resume is '{folder}/file', which has no state.pt; give auto,",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_ray_starts(
    mistake: str,
    folder: Path,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    named = {"folder": str(folder), "taken": str(taken)}
    assert main(train(folder, mistake.format(**named))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[mistake].format(**named) in line
    assert mistake.partition("=")[0].rpartition(".")[0] in line or "data" in line
    assert not ray.is_initialized()
    assert not (folder / "run").exists()


def test_a_port_of_a_run_that_was_killed_just_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as left:
        left.bind(("127.0.0.1", 0))
        left.listen()
        url = f"http://127.0.0.1:{left.getsockname()[1]}"
        config = load_config(
            "quickstart", [f"run.dir={tmp_path}", f"gateway.port={left.getsockname()[1]}"]
        )
        with pytest.raises(PortInUseError):  # somebody else's
            gateway_port(config)
        begin(config).model_copy(update={"gateway": GatewayPart(urls=(url,))}).write(tmp_path)
        monkeypatch.setattr("time.sleep", lambda seconds: left.close())
        gateway_port(config)


@pytest.mark.parametrize(
    ("needs", "key", "method"),
    [
        (["publish.guard.n=64"], "publish.guard", "load_weights"),
        (["algorithm.kl.place=loss"], "algorithm.kl.place", "compute_ref_log_probs"),
        (
            ["engine.weight_transport=lora", "backend.lora.rank=4"],
            "engine.weight_",
            "save_adapters",
        ),
    ],
)
def test_a_setting_that_a_backend_has_no_method_for_is_told_before_the_start(
    needs: list[str],
    key: str,
    method: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(train(folder, "trainer.backend=checks_backend:Plain", *needs)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"trainer.backend is 'checks_backend:Plain', which does not implement {method}" in line
    assert key in line
    assert not ray.is_initialized()


@pytest.mark.parametrize("ray", [[], ["cluster.address=127.0.0.1:9"]], ids=["here", "there"])
def test_ranks_that_cannot_share_rows_with_pictures_are_refused_before_the_start(
    ray: list[str], tmp_path: Path
) -> None:
    model = f"model.path={make_vision_model(tmp_path / 'vision')}"
    sharing = ("backend.ranks=2", "backend.context_parallel=2")
    config = small_config(tmp_path, model, *sharing, *ray)
    with pytest.raises(ConfigError, match=r"is 2, but the model reads pictures.*set it to 1"):
        checks.check_attached(config)
    checks.check_attached(small_config(tmp_path, model))


@pytest.mark.parametrize("name", ["good", "partial", "wrapped", "instance"])
async def test_whatever_is_awaited_with_a_task_is_an_agent(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    assert await load_agent(f"checks_code:{name}")({}, "", "") == 1.0
    assert await load_agent(f"{folder}/checks_code.py:{name}")({}, "", "") == 1.0


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="it has a GPU")
def test_a_gpu_that_is_not_there_is_told_with_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(folder, "backend.device=cuda")) == 2
    assert "backend.device is 'cuda', but this machine shows no GPU" in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_told_where_no_engine_loads_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    elsewhere = ("engine.kind=attach", "engine.urls=[http://127.0.0.1:9]")
    assert main(train(folder, f"model.path={folder}/pointer", *elsewhere)) == 2
    assert "is a Git LFS pointer" in capsys.readouterr().err


def test_wandb_without_a_key_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(train(folder, "logging.wandb=online")) == 2
    assert "logging.wandb is 'online', but there is no key; set WANDB" in capsys.readouterr().err


def test_mistakes_of_one_kind_are_told_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(train(folder, "rollout.agent=checks_code:sync", "rollout.reward=mahts")) == 2
    agent, reward = capsys.readouterr().err.splitlines()
    assert "rollout.agent" in agent
    assert "rollout.reward" in reward


def test_a_mistake_in_the_tasks_costs_no_import_of_the_agent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    tasks = f"data.train.path={folder}/broken.jsonl"
    assert main(train(folder, "rollout.agent=checks_raises:agent", tasks)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "broken.jsonl:2" in line


def test_a_live_run_is_named_before_the_port_that_it_holds(
    folder: Path, taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_run_in(tmp_path):
        assert main(train(folder, f"run.dir={tmp_path}", f"gateway.port={taken}")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"another run is alive in {tmp_path} (process {os.getpid()}); stop it first" in line


def test_no_torch_ray_or_aiohttp_is_imported_to_find_a_mistake(folder: Path, taken: int) -> None:
    mistakes = ("rollout.agent=checks_code:sync", f"gateway.port={taken}", "data.val.path=no.jsonl")
    script = (
        "import sys; from stepwell.cli.main import main; "
        f"codes = [main(argv) for argv in {[train(folder, each) for each in mistakes]!r}]; "
        "print(*codes, *sorted({'torch', 'ray', 'aiohttp'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2 2 2\n", done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_what_is_served_is_checked_too(
    folder: Path, taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "--config", "quickstart", f"run.dir={tmp_path}", f"gateway.port={taken}"]
    assert main([*argv, f"model.path={folder / 'no_template'}"]) == 2
    port, model = capsys.readouterr().err.splitlines()
    assert f"gateway.port is {taken}" in port
    assert "chat template" in model


@pytest.mark.parametrize("resume", ["12", "runs/other/checkpoints/step_4"])
def test_a_checkpoint_is_for_a_trainer_and_no_server_ignores_it(
    resume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "--config", "quickstart", f"run.dir={tmp_path}", f"run.resume={resume}"]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run.resume is {resume}" in line
    assert f"stepwell train --attach {tmp_path}" in line


def test_several_engines_share_no_port(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train(folder, "engine.port=31999", "cluster.engines=2")) == 2
    said = capsys.readouterr().err
    assert "engine.port is 31999, but cluster.engines is 2: they cannot share it" in said


def test_a_run_of_conversations_alone_serves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "--config", "sft", "rollout.agent=null", f"run.dir={tmp_path}"]
    assert main([*argv, "data.sft=conversations.jsonl", "data.val=null"]) == 2
    assert "nothing is served; use `stepwell train`" in capsys.readouterr().err


def on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch, has: float, *more: str) -> None:
    monkeypatch.setattr(checks, "_machine_bytes", lambda: int(has))
    checks.memory(small_config(folder, "backend.device=cpu", *more))


def test_on_the_cpu_only_what_is_certain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A micro-batch may be far from full: a run that fits is warned and begins."""
    large = ("backend.micro_batch_tokens=1000000",)
    on_the_cpu(tmp_path, monkeypatch, 1e12, *large)
    assert not caplog.records
    on_the_cpu(tmp_path, monkeypatch, 2e9, *large)
    assert "a smaller backend.micro_batch_tokens" in caplog.text
    with pytest.raises(ConfigError, match="this machine has 0 GB"):
        on_the_cpu(tmp_path, monkeypatch, 1e6)


@pytest.mark.parametrize("placement", ["auto", "colocated"])
def test_an_engine_on_the_ranks_gpu_counts_whether_it_was_asked_for_or_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    one_gpu = [Node("127.0.0.1", "this machine", 1, is_driver=True)]
    monkeypatch.setattr(checks, "machine", lambda: one_gpu)
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    given = ("backend.device=auto", f"cluster.placement={placement}")
    of_its_own = small_config(tmp_path, *given)  # the embedded engine is on the CPU
    beside = small_config(tmp_path, *given, "engine.kind=sglang")
    shape = ModelShape.read(of_its_own.model.path)
    monkeypatch.setattr(checks, "gpu_bytes", lambda: needed + 1)
    needed = checks.rank_memory(of_its_own, shape, 1e12).total
    checks.memory(of_its_own)
    with pytest.raises(ConfigError, match=r", engine \d.* a GPU here has"):
        checks.memory(beside)


def test_an_engine_that_lends_its_memory_leaves_what_the_rank_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu = [Node("127.0.0.1", "this machine", 1, is_driver=True)]
    monkeypatch.setattr(checks, "machine", lambda: one_gpu)
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    monkeypatch.setattr(checks, "gpu_bytes", lambda: int(8e9))
    lends = ("engine.release_memory=true", "async_training.partial_rollout=true")
    by_turns = ("backend.device=auto", "cluster.placement=colocated", "engine.kind=sglang", *lends)
    checks.memory(small_config(tmp_path, *by_turns))
    most = 'engine.extra_args=[--mem-fraction-static,"0.95"]'
    with pytest.raises(ConfigError, match=r"a rank keeps 1\.\d GB while the engine has 7\.6 GB"):
        checks.memory(small_config(tmp_path, *by_turns, most))


def test_a_model_that_a_service_trains_takes_no_memory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "backend.options={base_model: Qwen/Qwen3-8B}"
    on_the_cpu(tmp_path, monkeypatch, 1e6, "trainer.backend=tinker", options)
