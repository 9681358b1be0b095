"""Reads configurations that are wrong, for the tests of what is said about them."""

import pytest

from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError


def fails(*overrides: str, config: str = "quickstart") -> str:
    """Error message of a configuration that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    return str(caught.value)
