"""This module runs the generator that `gateway.rollout_generator` names, so that agents of slime's
Rollout Buffer start with its trainer.

    /start_rollout ──► running ──► finished | failed (why)      again with another payload: anew

A generator is called in a daemon thread, which ends with the gateway, and may run for days. Does
not own: what generators write (`writes.py`).
"""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

from stepwell.gateway.functions import Function

log = logging.getLogger(__name__)


class RolloutGenerator:
    def __init__(self, function: Function | None) -> None:
        self._function = function
        self._payload: dict[str, Any] = {}
        self._thread: Thread | None = None
        self.state = "none" if function is None else "not started"

    @property
    def is_configured(self) -> bool:
        return self._function is not None

    def start(self, payload: dict[str, Any]) -> None:
        """Run it, unless it runs with this very payload already."""
        if self._function is None:
            return
        if self._thread is not None and self._thread.is_alive():
            if payload == self._payload:
                return
            # A thread cannot be stopped: its generator goes on beside the new one, as in slime.
            log.warning("the rollout generator was still running; it is started anew")
        self._payload, self.state = payload, "running"
        self._thread = Thread(target=self._run, args=(self._function, payload), daemon=True)
        self._thread.start()

    def _run(self, function: Function, payload: dict[str, Any]) -> None:
        state = "finished"
        try:
            function(payload)
        except (Exception, SystemExit) as e:  # foreign code: the buffer serves on, and says why
            log.exception("the rollout generator failed")
            state = f"failed ({type(e).__name__}: {e!s:.200})"
        if payload is self._payload:
            self.state = state
