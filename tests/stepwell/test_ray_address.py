"""An address where no Ray is, which Ray would wait a minute for, is told in one line at once."""

from __future__ import annotations

import pytest

from stepwell.cluster.address import find_ray
from stepwell.trainer.errors import ConfigError


def test_auto_is_the_ray_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = r"cluster\.address is 'auto' and RAY_ADDRESS is '127\.0\.0\.1:1', where nothing answers"
    with pytest.raises(ConfigError, match=said):
        find_ray("auto")


def test_a_ray_clients_address_is_answered_with_the_one_to_give() -> None:
    with pytest.raises(
        ConfigError, match="a Ray Client's; give the host:port of the cluster's GCS"
    ):
        find_ray("ray://127.0.0.1:10001")
