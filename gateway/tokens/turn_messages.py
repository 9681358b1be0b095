"""This module keeps the messages of a turn with its Step, so that people read trajectories as text
and exports of text need no tokenizer.

    Step.metadata["messages"]   [what the agent said since the turn that this one extends …, reply]

Along a branch, from its root on, these lists are the conversation. Owns: their bound and their
redaction. Does not own: which messages are new (`tokens/graph.py`). Training reads ids only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import orjson

from stepwell.gateway.config import TUNING, GatewayConfig, Tuning
from stepwell.gateway.tokens.messages import Message

log = logging.getLogger(__name__)

MESSAGES: Final = "messages"
"""Key of a Step's metadata."""


class TurnMessages:
    """Keeps a turn's messages as `gateway.keep_messages` and the keys below it say."""

    def __init__(self, config: GatewayConfig, tuning: Tuning = TUNING) -> None:
        """
        Raises:
            GatewayConfigError: `gateway.redact_messages` names no function.
        """
        self._limit = tuning.max_message_bytes if config.keep_messages else 0
        self._redact = config.function("redact_messages")

    def of(self, new: Sequence[Message], reply: Message) -> list[Message] | None:
        """The turn's messages as its Step keeps them; None: it keeps none."""
        if not self._limit:
            return None
        said = [*new, reply]
        try:
            text = orjson.dumps(said)
            if self._redact is not None:
                said = self._redact(orjson.loads(text))
                text = orjson.dumps(said)
        except TypeError:  # an integer beyond 64 bits or half a surrogate: no Step can carry it
            return None
        except Exception:  # foreign code: what it did not redact is not kept
            log.exception("gateway.redact_messages failed; the turn's messages are not kept")
            return None
        return said if len(text) <= self._limit else None
