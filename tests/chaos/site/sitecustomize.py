"""Python imports this module at the start of every process whose PYTHONPATH has this folder: only
those of `tests/chaos/planted.py`, Ray's actors included. It arms the plant that the environment
names."""

from __future__ import annotations

import os

if "STEPWELL_CHAOS_PLANT" in os.environ:
    from tests.chaos.plants import arm

    arm()
