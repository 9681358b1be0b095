"""An engine for a machine that people work on: Stepwell's own, behind everything else.

stepwell train --config quickstart engine.kind=background
"""

from __future__ import annotations

import shutil

from stepwell import CommandLine, EngineConfig, Launch
from stepwell.backends.engines.commands import embedded
from stepwell.backends.errors import EngineStartError


def background(config: EngineConfig, launch: Launch) -> CommandLine:
    """The embedded engine at low priority, so that the machine stays usable beside it."""
    nice = shutil.which("nice")
    if nice is None:
        raise EngineStartError("engine.kind is 'background', but there is no `nice` on the PATH")
    line = embedded(config, launch)
    return CommandLine([nice, "-n", "10", *line.argv], {**line.env, "OMP_WAIT_POLICY": "passive"})
