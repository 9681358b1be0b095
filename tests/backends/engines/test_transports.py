"""Every transport brings the same bytes to a running engine, and other bytes are caught."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
from ast import literal_eval
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from stepwell.backends.config import EngineConfig, WeightTransport
from stepwell.backends.engines.api import Bucket, EngineState
from stepwell.backends.engines.client import EMBEDDED, EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineRequestError, WeightUpdateError
from stepwell.backends.weights import (
    Transport,
    WeightStore,
    build_transport,
    publish,
    transports,
)
from stepwell.backends.weights.delta import write_delta
from stepwell.backends.weights.digest import checkpoint_hashes
from stepwell.backends.weights.ipc import read_shared
from stepwell.backends.weights.sender import Sender
from stepwell.backends.weights.transports import Lead, Nccl, Target, Update
from stepwell.datapool.sealed import seal
from tests.builders import until
from tests.engines import FakeEngine
from tests.helpers import gone

PROMPT = [40, 41, 42, 43]
TRANSPORTS: tuple[WeightTransport, ...] = ("disk", "delta", "nccl", "ipc")


def transport_of(name: WeightTransport, lead: Lead | None = None, **options: Any) -> Transport:
    """A transport whose sender reads what was written, as a backend without `lead` does."""
    config = EngineConfig.model_validate({"weight_transport": name, **options})
    return build_transport(config, lead or Sender().call)


class Recorded(Sender):
    """A sender that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return super().call(method, *args)


async def log_probs(client: EngineClient) -> tuple[list[int], torch.Tensor]:
    """A greedy answer and its log-probs."""
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    answer = await client.generate(PROMPT, params, return_logprob=True)
    scored = answer["meta_info"]["output_token_logprobs"]
    return answer["output_ids"], torch.tensor([entry[0] for entry in scored])


async def agrees(client: EngineClient, reference: Callable[..., Any], path: Path) -> bool:
    ids, found = await log_probs(client)
    wanted = reference(path).log_probs(PROMPT, ids)
    return bool(torch.allclose(found, wanted, atol=1e-4))


def with_other_norm(path: Path, folder: Path) -> str:
    """A copy of a model that differs in one tensor; its name."""
    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] * torch.linspace(0.2, 3.0, len(tensors[name]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    seal(folder)
    return name


async def verified_by(client: EngineClient) -> str:
    """Return the way in which a replica alone is verified."""
    embedded = (await client.server_info()).get("version") == EMBEDDED
    return "checksum" if embedded else "agreement"


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_version_arrives_whole_and_its_checksum_is_held_against_the_checkpoint(
    name: WeightTransport,
    client: EngineClient,
    model_dirs: Any,
    reference: Callable[..., Any],
    tmp_path: Path,
) -> None:
    store, transport = WeightStore(tmp_path / "weights"), transport_of(name)
    path = store.write(3, lambda folder: shutil.copytree(model_dirs.new, folder))
    done = await publish([client], str(path), 3, "retract", store=store, transport=transport)
    assert done.verified == {client.url: await verified_by(client)}
    assert done.fenced == {}
    assert await client.weight_version() == 3
    assert await agrees(client, reference, model_dirs.new)
    current = store.current()
    assert current is not None
    assert current.version == 3
    # And again: no session, group or lock of the first is in the way of the second.
    other = store.path(4)
    with_other_norm(model_dirs.new, other)
    done = await publish([client], str(other), 4, "retract", store=store, transport=transport)
    assert done.verified == {client.url: await verified_by(client)}
    assert await agrees(client, reference, other)
    assert done.pause_s >= done.load_s > 0
    await transport.close()


async def test_every_transport_gives_an_engine_the_same_bytes(
    client: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    """By the engine's own hashes, of whatever layout it keeps weights in."""
    store, found = WeightStore(tmp_path / "weights"), []
    with_other_norm(model_dirs.base, tmp_path / "other")
    for number, name in enumerate(TRANSPORTS):
        transport = transport_of(name, weight_bucket_mb=1)
        for version, source in ((1, tmp_path / "other"), (2, model_dirs.new)):
            path = store.write(2 * number + version, lambda f, s=source: shutil.copytree(s, f))
            await publish([client], path, store.number(path), store=store, transport=transport)
        found.append(await client.weight_hashes())
        await transport.close()
    assert found[0]
    assert all(hashes == found[0] for hashes in found)


async def test_weights_go_in_buckets_through_one_group_that_lasts(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any], caplog: Any
) -> None:
    """A bucket of 1 MB takes the small model whole, one of a few bytes each tensor alone."""
    sender = Recorded()
    transport = transport_of("nccl", sender.call)
    assert isinstance(transport, Nccl)
    transport._limit = 1024
    for version, path in ((1, model_dirs.new), (2, model_dirs.base)):
        done = await publish([client], str(path), version, transport=transport)
        assert done.transfer_s > 0
        assert await agrees(client, reference, path)
    assert sender.calls.count("open") == 1
    assert sender.calls.count("broadcast") > 20
    assert "read from disk" not in caplog.text
    await transport.close()


async def test_buckets_go_to_an_engine_that_is_not_paused_and_halves_never_mix(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any]
) -> None:
    transport = transport_of("nccl", weight_bucket_mb=1)
    done = await publish([client], str(model_dirs.new), 1, "drain", transport=transport)
    assert done.pause_s == 0
    assert await agrees(client, reference, model_dirs.new)
    await transport.close()


@asynccontextmanager
async def liar(url: str, instead: Path) -> AsyncIterator[EngineClient]:
    """The engine at `url`, but it loads `instead` of what it is told, as the version it is told."""
    session = aiohttp.ClientSession()

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == "/update_weights_from_disk":
            told = json.loads(body)
            if told["weight_version"] != "0":
                body = json.dumps({**told, "model_path": str(instead)}).encode()
        headers = {"content-type": "application/json"}
        target = f"{url}{request.path}"
        async with session.request(request.method, target, data=body, headers=headers) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type="application/json"
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await runner.cleanup()
        await session.close()


async def test_a_replica_that_loaded_wrong_bytes_under_the_right_version_is_caught(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any], tmp_path: Path
) -> None:
    """The embedded engine's wrong bytes are caught; one SGLang alone agrees with itself."""
    with_other_norm(model_dirs.new, tmp_path / "wrong")
    async with liar(client.url, tmp_path / "wrong") as lying:
        if await verified_by(client) == "agreement":
            done = await publish([lying], str(model_dirs.new), 6, "retract")
            assert done.verified == {lying.url: "agreement"}
            return
        with pytest.raises(WeightUpdateError, match=r"1 of \d+ tensors differ.*norm") as e:
            await publish([lying], str(model_dirs.new), 6, "retract")
        assert e.value.replica == lying.url
        assert e.value.serving == {lying.url: 0}
    assert await agrees(client, reference, model_dirs.base)


async def test_tensors_are_taken_within_a_session_only(client: EngineClient) -> None:
    bucket = Bucket(("model.norm.weight",), ("float32",), ((32,),))
    with pytest.raises(EngineRequestError, match="begin_weight_update"):
        await client.update_weights_from_distributed(bucket, "none", version=5)
    with pytest.raises(EngineRequestError, match="begin_weight_update"):
        await client.update_weights_from_tensor([""], version=5)
    await client.begin_weight_update()
    await client.begin_weight_update()  # one that a publisher left open is closed
    with pytest.raises(EngineRequestError, match="none"):
        await client.update_weights_from_distributed(bucket, "none", version=5)
    await client.end_weight_update()
    with pytest.raises(EngineRequestError, match="no weight-update session"):
        await client.end_weight_update()
    assert await client.weight_version() == 0


async def test_a_publication_that_comes_to_nothing_leaves_no_weights_behind(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any]
) -> None:
    """Its buckets are with the engine, and the next publication must not load them."""
    transport = transport_of("nccl")

    async def fails(phase: str, when: str) -> None:
        if (phase, when) == ("pause", "before"):
            raise RuntimeError("no pause today")

    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="no pause today"):
            await publish([client], str(model_dirs.new), 7, transport=transport, hook=fails)
        assert await agrees(client, reference, model_dirs.base)
        assert await client.weight_version() == 0
    await publish([client], str(model_dirs.new), 8, transport=transport)
    assert await agrees(client, reference, model_dirs.new)
    await transport.close()


async def test_a_group_that_breaks_leaves_the_version_on_disk_to_be_read(
    client: EngineClient,
    model_dirs: Any,
    reference: Callable[..., Any],
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "JOIN_TIMEOUT_S", 5.0)

    class Breaks(Sender):
        def broadcast(self, number: int) -> None:
            self.leave()
            raise RuntimeError("the cable is out")

    broken = transport_of("nccl", Breaks().call)
    done = await publish([client], str(model_dirs.new), 1, "retract", transport=broken)
    assert done.fenced == {}
    assert "version 1 is read from disk: " in caplog.text
    assert await agrees(client, reference, model_dirs.new)
    await broken.close()


@pytest.mark.slow
async def test_a_crashed_engine_comes_back_at_its_address_with_the_committed_weights_in_a_new_group(
    model_dirs: Any, reference: Callable[..., Any], tmp_path: Path
) -> None:
    sender, store = Recorded(), WeightStore(tmp_path / "weights")
    transport = transport_of("nccl", sender.call)
    supervisor = Supervisor(EngineConfig(model_path=model_dirs.base), tmp_path, store.folder)
    url = await asyncio.to_thread(supervisor.start)
    try:
        async with EngineClient(url) as engine:
            first = store.write(1, lambda folder: shutil.copytree(model_dirs.new, folder))
            await publish([engine], first, 1, store=store, transport=transport)
            assert supervisor.pid is not None
            os.killpg(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1 and supervisor.state == "up", 120)
            info = await engine.model_info()
            assert (info["weight_version"], info["model_path"]) == ("1", str(first))
            assert supervisor.url == url
            second = store.write(2, lambda folder: shutil.copytree(model_dirs.base, folder))
            done = await publish([engine], second, 2, store=store, transport=transport)
            assert done.transfer_s > 0
            assert await agrees(engine, reference, model_dirs.base)
            assert sender.calls.count("open") == 2
    finally:
        await transport.close()
        pid = supervisor.pid
        await asyncio.to_thread(supervisor.stop)
    assert supervisor.status()["state"] == "stopped"
    assert pid is not None
    assert await gone(pid)


async def test_twenty_updates_of_a_few_tensors_and_a_missed_one_end_bit_equal(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any], tmp_path: Path
) -> None:
    store, transport = WeightStore(tmp_path / "weights", keep=3), transport_of("delta")
    weights = load_file(model_dirs.new / "model.safetensors")
    names = sorted(weights)
    read: list[str] = []
    load = client.update_weights_from_disk

    async def noted(path: str, *args: Any, **how: Any) -> None:
        read.append(",".join(sorted(load_file(Path(path) / "model.safetensors"))))
        await load(path, *args, **how)

    client.update_weights_from_disk = noted  # type: ignore[method-assign]
    for version in range(1, 21):
        changed = names[version % len(names)]
        weights[changed] = weights[changed] + 1e-3

        def save(folder: Path) -> None:
            shutil.copytree(model_dirs.new, folder)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

        path = store.write(version, save)
        if version == 11:  # this one misses it
            store.commit(version, path)
            continue
        done = await publish([client], path, version, "retract", store=store, transport=transport)
        assert done.verified == {client.url: await verified_by(client)}
        whole = version in (1, 12)
        assert read[-1] == (",".join(names) if whole else changed)
        assert not list(store.folder.glob(".tmp-*delta*"))
    assert await agrees(client, reference, path)
    if await verified_by(client) == "checksum":
        (rank,) = await client.weight_hashes() or [{}]
        assert rank["checksums"].items() >= checkpoint_hashes(path, "auto").items()


async def test_a_version_goes_whole_where_the_disk_takes_no_difference(
    client: EngineClient, model_dirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, changed: Any, since: int, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stepwell.backends.weights.transports.write_delta", full)
    store, transport = WeightStore(tmp_path / "weights", keep=3), transport_of("delta")
    for version in (1, 2):
        path = store.write(version, lambda folder: shutil.copytree(model_dirs.new, folder))
        await publish([client], path, version, "retract", store=store, transport=transport)
    assert await client.weight_version() == 2
    assert [path.name for path in store.folder.glob(".tmp-*")] == []


@pytest.fixture
async def embedded(engine: Any, client: EngineClient) -> EngineClient:
    if engine.kind != "embedded":
        pytest.skip("SGLang has its own refusals")
    return client


async def test_what_changed_is_refused_beside_other_weights(
    embedded: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    write_delta(model_dirs.new, ["model.norm.weight"], 4, tmp_path / "delta")
    with pytest.raises(EngineRequestError, match="changed since version 4, and version 0"):
        await embedded.update_weights_from_disk(str(tmp_path / "delta"), 5)
    assert await embedded.weight_version() == 0


async def test_handles_that_name_code_are_refused(embedded: EngineClient) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    await embedded.begin_weight_update()
    evil = base64.b64encode(pickle.dumps([("a", Evil())])).decode()
    with pytest.raises(EngineRequestError, match=r"posix\.system is not part of a tensor's handle"):
        await embedded.update_weights_from_tensor([evil], version=1)
    with pytest.raises(EngineRequestError, match="a bucket of the session failed"):
        await embedded.end_weight_update(1)
    assert await embedded.weight_version() == 0


def test_tensors_in_shared_memory_are_read_as_they_were_written(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.arange(5.0)}
    save_file(weights, tmp_path / "model.safetensors")
    sender = Sender()
    sender.hold(weights, is_live=True)
    sender.held_as(str(tmp_path))
    weights["b"].zero_()  # training goes on
    (bucket,) = sender.plan(str(tmp_path), None)
    assert bucket == Bucket(("b", "a"), ("float32", "bfloat16"), ((5,), (3, 4)))
    found = read_shared(sender.share(0, 1, False))
    assert torch.equal(found["a"], weights["a"])
    assert torch.equal(found["b"], torch.arange(5.0))


def test_a_version_is_sent_whole_after_it_could_not_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: torch.ones(4) for name in "abc"}
    save_file(weights, tmp_path / "model.safetensors")
    sender = Sender()
    sender.hold(weights, is_live=True)
    sender.held_as(str(tmp_path))
    join, n_joined = torch.cat, 0

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        nonlocal n_joined
        n_joined += 1
        if n_joined == 2:
            raise RuntimeError("out of memory")
        return join(tensors)

    monkeypatch.setattr(torch, "cat", cat)
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.plan(str(tmp_path), 16)
    buckets = sender.plan(str(tmp_path), 16)
    assert sorted(name for bucket in buckets for name in bucket.names) == ["a", "b", "c"]


READER = """
import sys
from stepwell.backends.weights.digest import tensor_hash
from stepwell.backends.weights.ipc import read_shared
for handle in sys.stdin:  # until the test has all answers: torch unlinks what a process leaves open
    print({name: tensor_hash(t) for name, t in read_shared(handle.strip()).items()}, flush=True)
"""


class OfTwoRanks(FakeEngine):
    """An engine of two processes, each of which reads the handle that is its own, as SGLang's do
    (`deserialize_own_rank`)."""

    def __init__(self, ranks: Sequence[asyncio.subprocess.Process]) -> None:
        super().__init__()
        self.ranks = ranks
        self.read: list[list[dict[str, str]]] = []

    async def begin_weight_update(self) -> None:
        return

    async def update_weights_from_tensor(
        self, handles: Sequence[str], *, version: Any, flush_cache: bool = True
    ) -> None:
        async def rank(number: int, handle: str) -> dict[str, str]:
            stdin, stdout = self.ranks[number].stdin, self.ranks[number].stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(f"{handle}\n".encode())
            return dict(literal_eval((await stdout.readline()).decode()))

        self.read.append(list(await asyncio.gather(*map(rank, range(2), handles))))

    async def end_weight_update(self, version: Any = None) -> None:
        self.version = version


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes import torch, on a machine that may be busy
async def test_each_process_of_an_engine_reads_all_tensors_from_memory_of_the_machine(
    model_dirs: Any,
) -> None:
    """Tensor parallel: each loads its part of the whole, which is there once."""
    transport = transport_of("ipc", weight_bucket_mb=1)
    command = (sys.executable, "-c", READER)
    ranks = [
        await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 20)
        for _ in range(2)
    ]
    engine = OfTwoRanks(ranks)
    target = Target(cast(Any, engine), EngineState(0, ranks=2))
    update = Update(str(model_dirs.new), 1)
    await transport.prepare(update, [target], None)
    await transport.send(update, target)
    await transport.end()
    for rank in ranks:
        await rank.communicate(b"")
    for number in range(2):
        found = {name: h for bucket in engine.read for name, h in bucket[number].items()}
        assert found == checkpoint_hashes(model_dirs.new, "auto")
    assert engine.version == 1


def shared_memory() -> set[Path]:
    """Memory that this process shares, but for what has no content."""
    found = Path("/dev/shm").glob(f"torch_{os.getpid()}_*")
    return {path for path in found if path.stat().st_size > mmap.PAGESIZE}


def test_memory_that_a_reader_never_took_is_freed_by_the_next_publication(
    model_dirs: Any,
) -> None:
    """A bucket is up to 512 MB of /dev/shm, and an engine may die amid every publication."""
    before, sender = shared_memory(), Sender()
    for _ in range(3):
        (whole,) = sender.plan(str(model_dirs.new), None)
        found = read_shared(sender.share(0, 2, True))  # the second one of two has died
        assert [*found] == [*whole.names]
        assert len(shared_memory() - before) <= 2  # this one, and the one before
        sender.release()
    sender.release()
    assert shared_memory() <= before


LATE = """
import base64, io, sys
from stepwell.backends.weights import ipc
named = ipc._Unpickler(io.BytesIO(base64.b64decode(sys.stdin.readline()))).load()
print("mapped", flush=True)
sys.stdin.readline()
del named
print("lives", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # a process imports torch, on a machine that may be busy
def test_a_reader_that_gives_memory_up_after_the_next_publication_lives_on(
    model_dirs: Any,
) -> None:
    before, sender = shared_memory(), Sender()
    argv, pipe = [sys.executable, "-c", LATE], subprocess.PIPE
    late = subprocess.Popen(argv, text=True, stdin=pipe, stdout=pipe)
    assert late.stdin is not None
    assert late.stdout is not None
    sender.plan(str(model_dirs.new), None)
    print(sender.share(0, 1, True), file=late.stdin, flush=True)
    assert late.stdout.readline() == "mapped\n"
    sender.release()
    sender.release()
    assert shared_memory() <= before
    assert late.communicate("\n")[0] == "lives\n"
    assert late.returncode == 0
