"""A run's own Ray listens on loopback and ends with it; another's is joined, or the error says why
not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import ray
from pydantic import SecretStr

from stepwell.cluster.nodes import runtime_env
from stepwell.cluster.parts import POOL_NAME, start_cluster
from stepwell.cluster.ray import joined
from stepwell.datapool import PoolConfig, start_data_pool
from stepwell.layout import GATEWAY_KEY
from stepwell.run.folder import GatewayPart
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.rollout.worker import RolloutWorker
from tests.e2e.conftest import small_config
from tests.helpers import ray_nodes

DRIVER = """
import asyncio, os, subprocess, sys, time
import psutil, ray
from stepwell.cluster.ray import connected, while_raylet_lives

@ray.remote(num_cpus=0)
class Agent:
    def start(self):
        self.child = subprocess.Popen(["sleep", "600"])
        return self.child.pid

with connected(None, "test", 100):
    agent = Agent.remote()
    ray.get(agent.start.remote())
    processes = psutil.Process().children(recursive=True)
    print(*(p.pid for p in processes), flush=True)
    if sys.argv[1] == "gcs":
        next(p for p in processes if p.name() == "gcs_server").kill()
        time.sleep(1)
    elif sys.argv[1] == "raylet":
        async def wait():
            async with while_raylet_lives():
                next(p for p in processes if p.name() == "raylet").kill()
                await asyncio.sleep(600)
        asyncio.run(wait())
    else:
        time.sleep(600)
"""


VARIABLES = """
import logging, os, subprocess, threading
import psutil, ray
from ray._private.utils import publish_error_to_driver
from stepwell.cluster.ray import connected, environment

@ray.remote(num_cpus=0)
class Rank:
    def seen(self):
        name = "GLOO_SOCKET_IFNAME"
        child = subprocess.check_output(["printenv", name], text=True)  # as an engine is started
        return os.environ[name], child.strip()

with environment(GLOO_SOCKET_IFNAME="lo"), connected(None, "test", 100):
    rank = Rank.remote()
    print(*ray.get(rank.seen.remote()), os.environ["GLOO_SOCKET_IFNAME"])
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(process.name(), connection.laddr.ip)
    commands = [each.cmdline() for each in psutil.Process().children(recursive=True)]
    scripts = [word for words in commands for word in words[:4] if word.endswith(".py")]
    workers = [words[0] for words in commands if words and words[0].startswith("ray::")]
    print(*{os.path.basename(script) for script in scripts}, *workers)
    warned = threading.Event()
    logging.basicConfig()
    logging.root.handlers[0].addFilter(lambda record: warned.set() or True)
    gcs = ray._private.worker.global_worker.gcs_client
    publish_error_to_driver("worker_died", "a worker\\nwas lost", gcs)
    assert warned.wait(60)
ray._private.worker.print_to_stdstream({"lines": ["later"], "pid": 1, "is_err": True}, True)
print(os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def _gone(pids: list[int], timeout_s: float = 60.0) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    until = time.monotonic() + timeout_s
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return not left


@pytest.fixture(scope="module")
def driver() -> subprocess.CompletedProcess[str]:
    """One with variables and a Ray of its own, which has something to say."""
    return subprocess.run(
        [sys.executable, "-c", VARIABLES], capture_output=True, text=True, check=True, timeout=120
    )


@pytest.fixture(scope="module")
def said(driver: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Words of the lines that it prints."""
    return [line.split() for line in driver.stdout.splitlines()]


@pytest.mark.slow
def test_variables_reach_ranks_engines_and_the_driver_and_end_with_the_run(
    said: list[list[str]],
) -> None:
    (first, *_, last) = said
    assert [*first, *last] == ["lo", "lo", "lo", "None"]


def test_rays_ports_are_on_loopback(said: list[list[str]]) -> None:
    _, *listening, _, _ = said
    assert len(listening) > 3
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}, listening


def test_it_starts_nothing_that_a_run_does_not_ask(said: list[list[str]]) -> None:
    *_, started, _ = said
    assert {"guard.py", "ray::Rank"} <= {*started}  # ours
    assert not {"monitor.py", "log_monitor.py", "dashboard.py"} & {*started}, started
    assert not {"default_worker.py", "ray::IDLE"} & {*started}, started  # a worker for each core


def test_ray_warns_in_our_log_not_on_stdout(driver: subprocess.CompletedProcess[str]) -> None:
    assert "WARNING:stepwell.cluster.ray:Ray: a worker was lost" in driver.stderr
    assert "was lost" not in driver.stdout
    assert "\nlater\n" in driver.stderr, "a Ray that is none of ours prints as it does"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies",
    ["driver", *(pytest.param(part, marks=pytest.mark.long) for part in ("gcs", "raylet"))],
)
def test_no_process_is_left_whoever_is_killed(dies: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, dies], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) > 5
        if dies == "driver":
            driver.kill()
        driver.wait(120)
    finally:
        driver.kill()
        driver.wait()
    assert _gone(pids)


def test_an_address_where_nothing_answers_is_one_clear_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    where = rf"cluster\.address is '{address}', where nothing answers"
    with pytest.raises(ConfigError, match=where), joined(address):
        pass
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        where = r"cluster\.address is '.*', where nothing answers \(timed out\)"
        with (
            pytest.raises(ConfigError, match=where),
            joined(f"127.0.0.1:{mute.getsockname()[1]}"),
        ):
            pass
    what = r"cluster\.address is 'nowhere'; write host:port"
    with pytest.raises(ConfigError, match=what), joined("nowhere"):
        pass


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray that wants the token in this user's home."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    short = tempfile.mkdtemp(prefix="ray")  # sockets' paths have at most 107 bytes
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--num-cpus=1",
            "--include-dashboard=false",
            "--object-store-memory=100000000",
            f"--temp-dir={short}",
            "--disable-usage-stats",
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield f"127.0.0.1:{port}"
    family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
    os.killpg(process.pid, signal.SIGTERM)
    if not _gone(family, 15):
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()
    shutil.rmtree(short, ignore_errors=True)


def _wait_listening(address: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
            break
        except OSError:
            time.sleep(0.2)


JOINER = """
import sys, time
from stepwell.trainer.errors import ConfigError
from stepwell.cluster.ray import joined
try:
    with joined(sys.argv[1]):
        print("joined")
except ConfigError as e:
    print(e)
"""


@pytest.mark.parametrize("has_token", [True, False])
@pytest.mark.long
def test_a_cluster_with_a_token_is_joined_by_its_address(
    head: str, tmp_path: Path, has_token: bool
) -> None:
    _wait_listening(head)
    home = tmp_path if has_token else tmp_path / "another"
    home.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"} | {"HOME": str(home)}
    said = subprocess.run(
        [sys.executable, "-c", JOINER, head], env=env, capture_output=True, text=True, timeout=120
    )
    if has_token:
        assert said.stdout == "joined\n", said
    else:
        assert f"cluster.address is {head!r}" in said.stdout, said
        assert "token" in said.stdout


VISITOR = """
import asyncio, sys, time
import psutil, ray
from stepwell.cluster.ray import joined, while_head_lives, while_nodes_live
from stepwell.trainer.errors import RayEndedError

async def wait():
    with joined(sys.argv[1]):
        async with while_head_lives(), while_nodes_live({}):
            print("joined", flush=True)
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(5)  # parts are stopped
                if sys.argv[2:]:
                    raise ray.exceptions.RayActorError()

try:
    asyncio.run(wait())
except RayEndedError as e:
    print(e, flush=True)
    print("the end", flush=True)
"""


@pytest.mark.parametrize(
    ("dies", "then"),
    [
        ("gcs_server", ()),
        ("raylet", ()),
        ("head", ()),
        ("head", ("a call of the run fails as it stops",)),
    ],
)
@pytest.mark.long
def test_a_run_says_that_the_ray_it_joined_has_ended_and_that_the_same_command_goes_on(
    head: str, tmp_path: Path, dies: str, then: tuple[str, ...]
) -> None:
    _wait_listening(head)
    port = head.rpartition(":")[2]
    env = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"} | {"HOME": str(tmp_path)}
    visitor = subprocess.Popen(
        [sys.executable, "-c", VISITOR, head, *then], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == "joined\n"
        option = f"--gcs_server_port={port}"
        (gcs,) = (
            p for p in psutil.process_iter() if p.name() == "gcs_server" and option in p.cmdline()
        )
        family = gcs.parents()[0].children(recursive=True)
        for process in family:
            if dies in (process.name(), "head"):
                process.kill()
        lines = visitor.stdout.read().splitlines()  # Ray says more
        assert visitor.wait(60) == 0, lines
    finally:
        visitor.kill()
        visitor.wait()
    assert lines[-1] == "the end"
    assert f":{port} has ended" in lines[-2]
    assert "run the same command again, it goes on from the last checkpoint" in lines[-2]


async def asks(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    body = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        return 1.0


@pytest.mark.long
async def test_engines_of_a_run_draw_different_samples_of_one_prompt(tmp_path: Path) -> None:
    config = small_config(tmp_path, "cluster.engines=2", "run.seed=3")
    async with start_cluster(config) as run:
        sampling = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
        engines: Any = run.engines
        first, second = [await e.generate([5, 6, 7], sampling) for e in engines]
    assert first["output_ids"] != second["output_ids"]


@pytest.mark.long
async def test_on_two_nodes_a_worker_on_the_other_one_reaches_the_gateway(tmp_path: Path) -> None:

    other = {"num_cpus": 1, "resources": {"other": 1}}
    with ray_nodes({"num_cpus": 1}, other) as cluster:
        overrides = [f"cluster.address={cluster.address}", "gateway.port=0"]
        config = small_config(tmp_path, *overrides, f"rollout.agent={__name__}:asks")
        async with start_cluster(config) as run:
            assert "127.0.0.1" not in run.gateway_url
            key: Any = (tmp_path / GATEWAY_KEY).read_text()
            assert (tmp_path / GATEWAY_KEY).stat().st_mode & 0o777 == 0o600
            worker: Any = ray.remote(RolloutWorker).options(num_cpus=0, resources={"other": 1})

            there = worker.remote(config.rollout, run.gateway_urls, SecretStr(key))
            task = {"question": "1+1", "answer": "2", "instance_id": "a"}
            await run.pool.open_group("p", 1)
            ends = await there.run_group.remote(task, "p", 1)
            assert ends == {"complete": 1}


@pytest.mark.long
async def test_a_second_run_of_one_name_on_a_cluster_is_told_and_one_after_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, or another machine: no lock tells."""
    with ray_nodes({"num_cpus": 1}) as cluster:
        config = small_config(tmp_path, f"cluster.address={cluster.address}", "run.name=mine")
        with joined(cluster.address):
            other = {"namespace": "stepwell-mine", "lifetime": "detached"}
            start_data_pool(PoolConfig(durability="none"), name=POOL_NAME, **other)
        with monkeypatch.context() as at_once:
            at_once.setattr("stepwell.cluster.parts.NAME_WAIT_S", 0.0)
            with pytest.raises(ConfigError, match=r"run\.name is 'mine', and another run of that"):
                async with start_cluster(config):
                    pass
        with joined(cluster.address):
            ray.kill(ray.get_actor(POOL_NAME, "stepwell-mine"))
        async with start_cluster(config) as run:
            await run.pool.open_group("p", 1)


@pytest.mark.long
def test_a_project_that_is_too_large_to_travel_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.bin").write_bytes(os.urandom(1 << 16))
    monkeypatch.setattr("ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE", 1 << 12)
    with ray_nodes({"num_cpus": 1}) as cluster:
        said = rf"{tmp_path}, which a node there does not have, cannot be sent to it \(.*exceeds"
        with (
            pytest.raises(ConfigError, match=said),
            joined(cluster.address, runtime_env=runtime_env(tmp_path, {})),
        ):
            pass


@pytest.mark.long
async def test_commands_on_a_run_have_a_key_where_its_user_gave_the_gateway_keys(
    tmp_path: Path,
) -> None:
    of_the_last_start = "o" * 43
    (tmp_path / GATEWAY_KEY).write_text(of_the_last_start)
    async with start_cluster(small_config(tmp_path, f"gateway.admin_keys={'k' * 20}")) as run:
        gateway = GatewayPart(urls=run.gateway_urls, key_file=run.key_file)
        key = gateway.key()
        told = await asyncio.to_thread(gateway.ask, run.gateway_url, "/statistics")
    assert key is not None
    assert key.get_secret_value() == of_the_last_start
    assert told["calls"] is not None


STARTER = """
import asyncio, signal
from stepwell.cluster.ray import connected
signal.signal(signal.SIGTERM, lambda number, frame: print("told", flush=True))
try:
    with connected(None, "ends-at-once", 80):
        print("up")
except asyncio.CancelledError:
    print("stopped")
"""


@pytest.mark.long
def test_a_start_ends_when_its_whole_process_group_is_terminated() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    process, until = psutil.Process(starter.pid), time.monotonic() + 60
    while not any(child.name() == "gcs_server" for child in process.children()):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(starter.pid, signal.SIGTERM)
    out, _ = starter.communicate(timeout=90)
    assert out.split() == ["told", "stopped"]
    assert starter.returncode == 0
