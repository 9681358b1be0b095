"""This room asks the engines for tokens so that a call is answered exactly, whatever happens to an
engine meanwhile.

    client.py ── generate ──► the engine that fleet.py chooses ──► answers.py checks what it says
                                       ▲
    checks.py ── how is each engine? ──┘
"""

from stepwell.gateway.engine.answers import Generation, Sampling, TopLogProbs
from stepwell.gateway.engine.client import EngineClient

__all__ = ["EngineClient", "Generation", "Sampling", "TopLogProbs"]
