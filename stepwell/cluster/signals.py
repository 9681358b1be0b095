"""Signals that end a run as its user asks: Ctrl-C, SIGTERM, and a terminal that closes."""

from __future__ import annotations

import signal

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stopping_signals() -> tuple[signal.Signals, ...]:
    """`STOPPING`, but for SIGHUP where whoever started this process has it ignored (`nohup`)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOPPING[:2] if is_ignored else STOPPING
