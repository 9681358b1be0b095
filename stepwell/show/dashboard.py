"""This module shows a finished run in the dashboard, so that looking at it starts no engine, no Ray
and no training.

    runs/NAME ──► its journal, only read ──► a gateway without engines ──► http://127.0.0.1:…/ui

A run that is alive has its own dashboard, whose address is told instead. Does not own the pages
(`gateway/ui/`), nor which run is meant (`show/run.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import ValidationError

from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.errors import GatewayConfigError, PortInUseError
from stepwell.gateway.server import HttpServer
from stepwell.layout import GATEWAY_KEY
from stepwell.run.folder import archive_folder
from stepwell.show.archive import archive_rest
from stepwell.show.run import open_run
from stepwell.track.output import print_line
from stepwell.trainer.errors import ConfigError


async def view(where: str | None, port: int) -> None:
    """Serve the dashboard of the run at `where` until cancelled; or say where it is served.

    Raises:
        ConfigError: there is no such run, the port is taken, or the run's tokenizer or key is gone.
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
        folder = opened.folder.absolute()
        key_file = folder / GATEWAY_KEY
        has_key = key_file.is_file()  # as while it was alive
        values: dict[str, Any] = {"admin_keys": key_file.read_text()} if has_key else {}
        values |= {"port": port, "tokenizer_path": opened.tokenizer_path()}
        try:
            config = GatewayConfig.model_validate(values)
        except ValidationError as e:
            if not 0 <= port <= 65535:
                raise ConfigError(f"--port is {port}; give one from 0 to 65535") from e
            raise ConfigError(
                f"{key_file} holds no key; restore it, or start the run again, which writes one"
            ) from e
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
            needs = f", admin key in {key_file}" if has_key else ""
            print_line(f"dashboard of {opened.run.name}: {url}/ui{needs}\n(Ctrl-C stops it)")
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(server.stop)
