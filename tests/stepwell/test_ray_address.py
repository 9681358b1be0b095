"""An address where no Ray is, which Ray would wait a minute for, is told in one line at once."""

from __future__ import annotations

import socket
import threading

import pytest

from stepwell.cluster.address import find_ray
from stepwell.trainer.errors import ConfigError


def test_auto_is_the_ray_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = r"cluster\.address is 'auto' and RAY_ADDRESS is '127\.0\.0\.1:1', where nothing answers"
    with pytest.raises(ConfigError, match=said):
        find_ray("auto")


def test_auto_in_the_environment_is_the_ray_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("stepwell.cluster.address.psutil.process_iter", lambda: iter(()))
    with pytest.raises(ConfigError, match="no Ray that could be joined runs on this machine"):
        find_ray("auto")


def test_a_ray_clients_address_is_answered_with_the_one_to_give() -> None:
    with pytest.raises(
        ConfigError, match="a Ray Client's; give the host:port of the cluster's GCS"
    ):
        find_ray("ray://127.0.0.1:10001")


@pytest.mark.parametrize("address", ["10.0.0.2", "head:gcs", ":6379"])
def test_what_is_no_address_is_told_without_asking_anybody(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address!r}; write host:port, or auto"):
        find_ray(address)


def test_something_else_that_listens_there_is_no_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        listening = threading.Thread(target=answer)
        listening.start()
        with pytest.raises(ConfigError, match=r"where nothing answers \(no gRPC server\)"):
            find_ray(f"127.0.0.1:{port}")
        listening.join()
