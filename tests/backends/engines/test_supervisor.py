"""An engine process lives exactly as long as its supervisor, at the current weights."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines import commands
from stepwell.backends.engines import supervisor as supervising
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineStartError
from stepwell.backends.weights import WeightStore
from tests.builders import until

Launch = Callable[..., Supervisor]


@pytest.fixture
def launch(
    engine_kind: str,
    model_dirs: Any,
    make_engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> Iterator[Launch]:
    started: list[Supervisor] = []

    def make(weights_dir: Path | None = None, **fields: Any) -> Supervisor:
        config = make_engine_config(engine_kind, model_dirs.base, **fields)
        started.append(Supervisor(config, tmp_path / "logs", weights_dir))
        return started[-1]

    yield make
    for supervisor in started:
        supervisor.stop()


def gone(pid: int, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.long
async def test_a_crashed_engine_comes_back_at_its_address_with_the_committed_weights(
    launch: Launch, model_dirs: Any, tmp_path: Path
) -> None:
    """Run for any kind of engine; in `test_transports.py` the embedded one comes back, into a new
    group."""
    store = WeightStore(tmp_path / "weights")
    supervisor = launch(store.folder)
    url = supervisor.start()
    async with EngineClient(url) as client:
        assert await client.weight_version() == 0
        store.commit(5, model_dirs.new)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)

        async def back() -> bool:
            return supervisor.restarts == 1 and supervisor.state == "up"

        await until(back, 240.0)
        info = await client.model_info()
    assert (info["weight_version"], info["model_path"]) == ("5", str(model_dirs.new))
    assert supervisor.url == url
    pid = supervisor.pid
    supervisor.stop()
    assert pid is not None
    assert gone(pid)
    assert supervisor.status()["state"] == "stopped"


def test_an_engine_serves_no_weights_of_which_a_byte_changed(
    launch: Launch, model_dirs: Any, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    path = store.write(5, lambda folder: shutil.copytree(model_dirs.new, folder))
    store.commit(5)
    weights = next(path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    with pytest.raises(EngineStartError, match=rf"{weights.name} is damaged"):
        launch(store.folder).start()


STUB = """\
import http.server, os, pathlib, sys, time
launches = pathlib.Path(__file__).with_suffix(".launches")
first = not launches.exists()
launches.touch()
if not first and os.environ["STUB"] == "crashes at its start":
    time.sleep(0.3)
    sys.exit(1)
model = pathlib.Path(sys.argv[sys.argv.index("--model-path") + 1])
version = sys.argv[sys.argv.index("--weight-version") + 1]
if version == "1":
    pathlib.Path(__file__).with_suffix(".loading").touch()
    while model.is_dir():
        time.sleep(0.01)
    sys.exit(2)

ANSWER = b'{"model_path": "m", "weight_version": "0", "success": true, "message": ""}'

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health_generate" and os.environ["STUB"] == "is slow to generate":
            pathlib.Path(__file__).with_suffix(".asked").touch()
            time.sleep(1.0)
        stuck_at = {
            "does not continue": "/continue_generation",
            "does not tell its version": "/model_info",
            "generates nothing": "/health_generate",
        }.get(os.environ["STUB"])
        self.send_response(500 if first and self.path == stuck_at else 200)
        self.end_headers()
        self.wfile.write(ANSWER)

    do_POST = do_GET

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stub_config(folder: Path, behaviour: str, **fields: Any) -> EngineConfig:
    """Configuration of a process that answers as an engine does."""
    python = folder / "python"
    (folder / "stub.py").write_text(STUB)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {folder / "stub.py"} "$@"\n')
    python.chmod(0o755)
    (folder / "config.json").touch()
    return EngineConfig(
        kind="sglang",
        model_path=folder,
        python=str(python),
        env={"STUB": behaviour, "CUDA_VISIBLE_DEVICES": ""},
        **{"max_restarts": 2, **fields},
    )


def stub(
    folder: Path, behaviour: str, weights_dir: Path | None = None, **fields: Any
) -> Supervisor:
    return Supervisor(stub_config(folder, behaviour, **fields), folder / "logs", weights_dir)


def test_an_engine_that_keeps_crashing_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    supervisor = stub(tmp_path, "lives", max_restarts=0)
    try:
        supervisor.start()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while supervisor.state != "failed":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "crashed 1 times in a row (engine.max_restarts=0)" in supervisor.status()["error"]
    finally:
        supervisor.stop()


def test_an_engine_that_is_long_in_starting_is_given_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the time that an engine was up counts as healthy, not the time that it took to start."""
    monkeypatch.setattr("stepwell.backends.engines.supervisor.HEALTHY_FOR_S", 0.2)
    supervisor = stub(tmp_path, "crashes at its start")
    try:
        supervisor.start()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while supervisor.state != "failed":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert supervisor.restarts == 2
    finally:
        supervisor.stop()


class Broken(EngineClient):
    """An engine of somebody's package, whose code fails."""

    @classmethod
    def command_line(cls, config: EngineConfig, launch: commands.Launch) -> commands.CommandLine:
        return commands.CommandLine([sys.executable, "-c", "import time; time.sleep(100)"])

    async def check(self) -> None:
        raise KeyError("health")


def test_an_engine_whose_code_fails_is_not_taken_for_healthy(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = EngineConfig(kind=f"{__name__}:Broken", model_path=tmp_path)
    supervisor = Supervisor(config, tmp_path / "logs")
    try:
        with pytest.raises(EngineStartError, match=r"the engine cannot run: KeyError: 'health'"):
            supervisor.start()
        assert supervisor.state == "failed"
    finally:
        supervisor.stop()


@pytest.mark.parametrize("behaviour", ["does not continue", "does not tell its version"])
def test_an_engine_that_cannot_be_continued_is_restarted(tmp_path: Path, behaviour: str) -> None:
    """It would be up and serve nothing."""
    supervisor = stub(tmp_path, behaviour, tmp_path / "weights")
    try:
        supervisor.start()
        assert (supervisor.state, supervisor.restarts) == ("up", 1)
    finally:
        supervisor.stop()


def a_version(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").touch()


def test_a_version_that_is_pruned_while_an_engine_loads_it_is_no_crash(tmp_path: Path) -> None:
    """Publications go on while an engine starts, for `max_restarts` of its starts and more."""
    store = WeightStore(tmp_path / "weights", keep=1)
    store.write(1, a_version)
    store.commit(1)
    supervisor = stub(tmp_path, "loads slowly", store.folder)
    starting = threading.Thread(target=supervisor.start)
    starting.start()
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "stub.loading").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.write(2, a_version)
        store.commit(2)
        starting.join(30)
        assert (supervisor.state, supervisor.restarts) == ("up", 0)
        argv = supervisor.log_file.read_text()
        assert argv.count("--- launch") == 2
        assert f"--model-path {tmp_path} " in argv
    finally:
        supervisor.stop()
        starting.join()


def test_a_version_that_is_pruned_while_its_files_are_checked_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path / "weights", keep=1)
    store.write(1, a_version)
    store.commit(1)
    check = supervising.check_version

    def pruned_first(folder: Path, path: str) -> None:
        if path.endswith("v1"):
            store.write(2, a_version)
            store.commit(2)
        check(folder, path)

    monkeypatch.setattr(supervising, "check_version", pruned_first)
    supervisor = stub(tmp_path, "loads", store.folder)
    try:
        supervisor.start()
        assert (supervisor.state, supervisor.restarts) == ("up", 0)
    finally:
        supervisor.stop()


@pytest.mark.long
async def test_an_engine_that_hangs_comes_back_at_its_address_with_the_committed_weights(
    launch: Launch,
    model_dirs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepwell.backends.engines.supervisor.PROBE_EVERY_S", 0.1)
    store = WeightStore(tmp_path / "weights")
    supervisor = launch(store.folder, hang_timeout_s=5.0)
    url = supervisor.start()
    store.commit(5, model_dirs.new)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)

    async def back() -> bool:
        return supervisor.restarts > 0 and supervisor.state == "up"

    await until(back, 240.0)
    assert supervisor.url == url
    async with EngineClient(url) as client:
        assert await client.weight_version() == 5


@pytest.mark.long
async def test_an_engine_that_is_paused_or_busy_does_not_hang(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.backends.engines.supervisor.PROBE_EVERY_S", 0.1)
    supervisor = launch(hang_timeout_s=5.0, max_running_requests=1)
    async with EngineClient(supervisor.start()) as client:
        long = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
        calls = [asyncio.create_task(client.generate([40, 41], long)) for _ in range(6)]
        await asyncio.sleep(2)
        await client.pause("retract")
        await asyncio.sleep(12)
        await client.continue_()
        await asyncio.gather(*calls)
    assert (supervisor.state, supervisor.restarts) == ("up", 0)


def test_an_engine_that_generates_nothing_hangs_but_not_during_a_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.backends.engines.supervisor.PROBE_EVERY_S", 0.05)
    store = WeightStore(tmp_path / "weights")
    supervisor = stub(tmp_path, "generates nothing", store.folder, hang_timeout_s=0.5)
    try:
        supervisor.start()
        with store.lock.tried() as mine:
            assert mine
            time.sleep(1.5)
            assert supervisor.restarts == 0
        deadline = time.monotonic() + 30
        while (supervisor.state, supervisor.restarts) != ("up", 1):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(1.0)  # the second launch generates
        assert supervisor.restarts == 1
    finally:
        supervisor.stop()


@contextmanager
def asked_for_a_token(store: WeightStore, folder: Path) -> Iterator[None]:
    """Holds the store's lock from the moment at which the stub is asked."""
    while not (asked := folder / "stub.asked").exists():
        time.sleep(0.01)
    with store.lock.tried() as mine:
        assert mine
        asked.unlink()
        yield


@pytest.mark.slow
def test_a_publication_that_begins_while_the_engine_is_asked_for_a_token_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused in the middle of the question."""
    monkeypatch.setattr("stepwell.backends.engines.supervisor.PROBE_EVERY_S", 0.05)
    store = WeightStore(tmp_path / "weights")
    supervisor = stub(tmp_path, "is slow to generate", store.folder, hang_timeout_s=0.5)
    try:
        supervisor.start()
        with asked_for_a_token(store, tmp_path):
            time.sleep(0.8)
        with asked_for_a_token(store, tmp_path):
            store.commit(1, tmp_path)  # one that has ended before the question is given up
        with asked_for_a_token(store, tmp_path):
            time.sleep(0.8)
            assert supervisor.restarts == 0
    finally:
        supervisor.stop()


def test_an_engine_that_cannot_start_shows_the_end_of_its_log(launch: Launch) -> None:
    supervisor = launch(extra_args=("--no-such-flag",))
    with pytest.raises(EngineStartError) as e:
        supervisor.start()
    assert "exit code 2 before it was healthy" in str(e.value)
    assert "unrecognized arguments: --no-such-flag" in str(e.value)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_an_engine_that_is_too_slow_is_stopped_and_the_limit_named(launch: Launch) -> None:
    supervisor = launch(startup_timeout_s=0.05)
    with pytest.raises(EngineStartError, match=r"engine\.startup_timeout_s=0\.05"):
        supervisor.start()
    assert supervisor.status()["pid"] is None


def test_a_port_in_use_is_one_clear_line(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError) as e:
            launch(port=port).start()
    message = str(e.value)
    assert message == (
        f"engine.port is {port}, but something already listens on 127.0.0.1:{port}; "
        "stop it, or set engine.port=0 to take a free port"
    )


def test_a_port_that_is_given_up_just_now_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    sleep = time.sleep

    def give_up(seconds: float) -> None:
        taken.close()
        sleep(seconds)

    monkeypatch.setattr("stepwell.backends.engines.supervisor.time.sleep", give_up)
    supervisor = stub(tmp_path, "lives", port=port)
    try:
        assert supervisor.start() == f"http://127.0.0.1:{port}"
    finally:
        supervisor.stop()


def test_a_missing_model_and_a_missing_package_are_named(
    model_dirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model_path=tmp_path / "absent")
    with pytest.raises(EngineStartError, match=r"engine\.model_path is .*absent"):
        Supervisor(config, tmp_path).start()
    monkeypatch.setattr(commands, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(kind="sglang", model_path=model_dirs.base)
    with pytest.raises(
        EngineStartError,
        match=r"package sglang is neither installed here nor in .*make install-sglang",
    ):
        Supervisor(config, tmp_path).start()


def test_an_engine_that_was_stopped_before_its_start_is_not_waited_for(tmp_path: Path) -> None:
    supervisor = stub(tmp_path, "lives")
    supervisor.stop()
    told: list[str] = []

    def start() -> None:
        with pytest.raises(EngineStartError, match="was stopped") as error:
            supervisor.start()
        told.append(str(error.value))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(5)
    assert told == ["the engine was stopped"]


def test_stop_before_start_is_harmless(launch: Launch) -> None:
    supervisor = launch()
    supervisor.stop()
    supervisor.stop()
    assert supervisor.status()["state"] == "stopped"


def test_killing_the_supervisors_process_leaves_no_engine(
    engine_kind: str, model_dirs: Any, tmp_path: Path
) -> None:
    """The embedded engine does not either when its actor is killed (`test_server.py`)."""
    config = (
        stub_config(tmp_path, "lives")
        if engine_kind == "embedded"
        else EngineConfig(kind=engine_kind, model_path=model_dirs.base)
    )
    script = f"""
        import sys, time
        from stepwell.backends.config import EngineConfig
        from stepwell.backends.engines.supervisor import Supervisor
        config = EngineConfig.model_validate_json({config.model_dump_json()!r})
        supervisor = Supervisor(config, {str(tmp_path)!r})
        supervisor.start()
        print(supervisor.pid, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid, 0.1)
        own = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    finally:
        owner.kill()
        owner.wait()
    assert all(gone(pid) for pid in own)


@pytest.mark.long
async def test_a_publication_during_a_restart_is_caught_up(
    launch: Launch, model_dirs: Any, tmp_path: Path
) -> None:
    """Committed after the restarting engine read the pointer and before it was healthy."""
    store = WeightStore(tmp_path / "weights")
    supervisor = launch(store.folder)
    url = supervisor.start()
    assert supervisor.pid is not None
    old = supervisor.pid
    os.kill(old, signal.SIGKILL)

    async def relaunched() -> bool:
        return supervisor.pid not in (None, old)

    await until(relaunched)
    store.commit(6, model_dirs.new)

    async def current() -> bool:
        return supervisor.state == "up"

    await until(current)
    async with EngineClient(url) as client:
        assert await client.weight_version() == 6
    await asyncio.sleep(0)


@pytest.mark.long
async def test_a_restarted_engine_serves_nothing_until_a_publication_under_way_has_ended(
    launch: Launch, model_dirs: Any, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    supervisor = launch(store.folder)
    async with EngineClient(supervisor.start()) as client:
        assert supervisor.pid is not None
        with store.lock.tried() as mine:
            assert mine
            os.kill(supervisor.pid, signal.SIGKILL)

            async def listens() -> bool:
                return supervisor.restarts == 1 and await client.health()

            await until(listens, 120.0)
            asked = asyncio.create_task(client.generate([40, 41], {"max_new_tokens": 2}))
            done, _ = await asyncio.wait({asked}, timeout=0.3)
            assert not done
            assert await client.weight_version() == 0
            store.commit(5, model_dirs.new)
        answer = await asked
    assert answer["meta_info"]["weight_versions"] == [{"version": "5", "start": 0, "end": 2}]


@pytest.mark.long
async def test_an_engine_that_dies_again_while_it_is_brought_up_to_date_is_restarted_again(
    launch: Launch, model_dirs: Any, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    supervisor = launch(store.folder)
    async with EngineClient(supervisor.start()) as client:
        with store.lock.tried() as mine:
            assert mine
            for restarts in (1, 2):
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGKILL)

                async def listens(n: int = restarts) -> bool:
                    return supervisor.restarts == n and await client.health()

                await until(listens, 120.0)
            store.commit(5, model_dirs.new)

        async def up() -> bool:
            return supervisor.state == "up"

        await until(up, 120.0)
        assert await client.weight_version() == 5
