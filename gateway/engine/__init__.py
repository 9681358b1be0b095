"""This room asks the engines for tokens so that a call is answered exactly, whatever happens to an
engine meanwhile.

    sampler.py ── generate ──► the engine that fleet.py chooses ──► generation.py joins and checks
                                       ▲
    checks.py ── how is each engine? ──┘
"""

from stepwell.gateway.engine.generation import Generation
from stepwell.gateway.engine.sampler import Sampler

__all__ = ["Generation", "Sampler"]
