"""A reward computed by a server: one POST per answer, sent again while the server fails
(`server.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from stepwell.trainer.rewards.server import RewardServer


class RemoteReward:
    """Asks `url` for the score, until it answers or the call is cancelled.

    Args:
        url: takes a JSON POST; answers a score in any form that a function may return: a number, a
            list of one per step, or an object with either under "score".
        payload: "verl" sends {data_source, solution_str, ground_truth, extra_info}; "slime" sends
            {prompt, response, label}, as its remote reward model does.
        backoff_s, timeout_s: as `RewardServer`; all tries together have `rollout.reward.timeout_s`.
        headers: of each request, e.g. {"Authorization": "Bearer …"}.
    """

    def __init__(
        self,
        url: str,
        payload: Literal["verl", "slime"] = "verl",
        backoff_s: float = 1.0,
        timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if payload not in ("verl", "slime"):
            raise ValueError(f"payload is {payload!r}; it should be 'verl' or 'slime'")
        self._payload = payload
        self._server = RewardServer(f"the reward server {url}", url, backoff_s, timeout_s, headers)

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        **kwargs: Any,
    ) -> Any:
        """The server's answer.

        Raises:
            RewardCrashError: the server refuses the request.
        """
        if self._payload == "slime":
            return await self._server.post(
                {
                    "prompt": extra_info.get("question", extra_info.get("messages")),
                    "response": solution_str,
                    "label": ground_truth,
                }
            )
        return await self._server.post(
            {
                "data_source": data_source,
                "solution_str": solution_str,
                "ground_truth": ground_truth,
                "extra_info": dict(extra_info),
            }
        )

    async def aclose(self) -> None:
        await self._server.aclose()


class RemoteRM(RemoteReward):
    """slime's `--rm-type remote_rm`; `rm_url` is its `--rm-url`."""

    def __init__(self, rm_url: str, **kwargs: Any) -> None:
        super().__init__(rm_url, "slime", **kwargs)
