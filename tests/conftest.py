"""Fixtures of all rooms' tests: one Ray, and the number of examples that a property is tried on.

make test         25 examples of each property, nothing that is marked `long`
make test-long    500 examples, and everything that is marked `long`
"""

from __future__ import annotations

import gc
import logging
import os
import ssl
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import pytest
import ray
from hypothesis import HealthCheck, settings
from ray.cluster_utils import Cluster

from tests.helpers import ray_nodes

gc.disable()  # until all tests are imported

settings.register_profile(
    "short",
    max_examples=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # it measures a busy machine, not a test
)
settings.register_profile("long", settings.get_profile("short"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


SHARING = pytest.StashKey[set[Path]]()
"""Test files that share one Ray."""
NEXT = pytest.StashKey[pytest.Item | None]()
"""The test that this process runs after the one that ends."""


def pytest_configure(config: pytest.Config) -> None:
    """No test speaks TLS with the world, but each HTTP client reads the certificates of all its
    authorities, 50 ms a time. One is enough, for clients here and in the processes of tests."""
    end = ssl.PEM_FOOTER + "\n"
    first, _, _ = Path(certifi.where()).read_text().partition(end)
    file = tempfile.NamedTemporaryFile("w", prefix="stepwell-tests-", suffix=".pem")  # noqa: SIM115
    file.write(first + end)
    file.flush()
    config.add_cleanup(file.close)
    os.environ["SSL_CERT_FILE"] = file.name
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; tests say themselves how wide they are


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that share one Ray come first, and it ends with the last of them. A process that had a
    Ray of its own on 127.0.0.1 cannot join another at the machine's address any more: its driver's
    port stays on 127.0.0.1, and Ray takes it for dead. And a run looks at every Ray that its
    process has started."""
    shared = {item.path for item in items if "_shared_ray" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in shared)
    config.stash[SHARING] = shared


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    item.config.stash[NEXT] = nextitem


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Logs of half a character, which some tests provoke, reach pytest-xdist escaped: it sends
    UTF-8 alone."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_collection_finish() -> None:
    """The garbage collector has a million objects less to walk through in each test: those that
    importing torch, transformers and all tests made. And it looks more rarely: with pytest's
    reports the heap of a test of a millisecond is a large one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)
    gc.enable()
    # pytest hangs two handlers on every logger that hands nothing on, three times a test. PyTorch
    # has ninety of them; now what they say comes through the one at their top.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def _shared_ray() -> Iterator[Cluster]:
    with ray_nodes({"num_cpus": 2}) as ray_of_the_tests:
        yield ray_of_the_tests


@pytest.fixture(scope="module")
def cluster(_shared_ray: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The namespace of a test file on the Ray that all files share; its actors end with it. Who
    stops nodes, or needs resources of another kind, starts a Ray of their own."""
    namespace = uuid.uuid4().hex
    address = _shared_ray.address
    ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    yield namespace
    ray.shutdown()
    after = request.config.stash[NEXT]
    if after is None or after.path not in request.config.stash[SHARING]:
        _shared_ray.shutdown()
