"""This module shows a finished run in the dashboard, so that looking at it starts no engine, no Ray
and no training.

    runs/NAME ──► its journal, only read ──► a gateway without engines ──► http://127.0.0.1:…/ui

A run that is alive has its own dashboard, whose address is told instead. Does not own the pages
(`gateway/ui/`), nor which run is meant (`show/run.py`).
"""

from __future__ import annotations

import asyncio

from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.errors import GatewayConfigError, PortInUseError
from stepwell.gateway.server import HttpServer
from stepwell.run.folder import archive_folder
from stepwell.show.archive import archive_rest
from stepwell.show.run import open_run
from stepwell.track.output import print_line
from stepwell.trainer.errors import ConfigError


async def view(where: str | None, port: int) -> None:
    """Serve the dashboard of the run at `where` until cancelled; or say where it is served.

    Raises:
        ConfigError: there is no such run, the port is taken, or the run's tokenizer is gone.
        JournalError: its journal is damaged.
    """
    async with open_run(where) as opened:
        if opened.is_alive:
            gateway = opened.run.gateway
            at = (
                "still starting"
                if gateway is None
                else f"alive: its dashboard is {gateway.urls[0]}/ui"
            )
            print(f"{opened.run.name} is {at}")
            return
        config = GatewayConfig(port=port, tokenizer_path=opened.tokenizer_path())
        folder = opened.folder.absolute()
        await archive_rest(folder, opened.run)
        archive = archive_folder(folder).absolute()
        wiring = Wiring(run_dir=folder, archive_dir=archive, read_only=True)
        server = HttpServer(config, wiring, opened.pool)
        try:
            url = await asyncio.to_thread(server.start)
        except PortInUseError as e:
            raise ConfigError(f"--port is {port}, which is taken; --port 0 finds a free one") from e
        except GatewayConfigError as e:
            raise ConfigError(f"{opened.folder}: the run's tokenizer cannot be read ({e})") from e
        try:
            print_line(f"dashboard of {opened.run.name}: {url}/ui\n(Ctrl-C stops it)")
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(server.stop)
