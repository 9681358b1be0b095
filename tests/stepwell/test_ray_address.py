"""What Ray would stumble over, or wait a minute for, is told in one line before it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.ray_address import check_environment, find_ray
from stepwell.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RAY_AUTH_TOKEN_PATH", "{folder}/none", "holds no token (No such file or directory)"),
        ("RAY_AUTH_TOKEN_PATH", "{folder}/empty", "holds no token (it is empty); write one there"),
        ("RAY_AUTH_MODE", "tokn", "RAY_AUTH_MODE is 'tokn'; set it to token or disabled, or unset"),
        ("RAY_TMPDIR", "/tmp/" + "long" * 12, "too long by 14 characters for the paths of Ray's"),
    ],
)
def test_what_keeps_a_ray_of_our_own_from_starting_is_named(
    name: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    check_environment()
    monkeypatch.setenv(name, value.format(folder=tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_environment()
    assert name in str(caught.value)
    assert said in str(caught.value)


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
