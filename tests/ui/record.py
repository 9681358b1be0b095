"""Record a situation for the tests of alerts: one tick of a dashboard as it was sent.

    python -m tests.ui.record http://127.0.0.1:8100 engine_down [SECONDS] [--key FILE]

Written to `tests/ui/situations/NAME.json`, without events and with what alerts look at alone.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

SITUATIONS = Path(__file__).parent / "situations"
KEPT = ("at", "is_over", "calls", "pool", "pool_error", "recent", "metrics", "metrics_age_s")


def tick(url: str, seconds: float, key: str | None) -> dict[str, Any]:
    """The last tick of so many seconds."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/ui/api/live", headers=headers)
    until, found = time.monotonic() + seconds, None
    with urllib.request.urlopen(request, timeout=30) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                found = json.loads(line[6:])
                if time.monotonic() >= until:
                    break
    if found is None:
        raise RuntimeError(f"{url} sent no tick")
    return dict(found)


def situation(found: dict[str, Any]) -> dict[str, Any]:
    """The parts of a tick that alerts look at."""
    engines = found["gateway"].get("engine", {}).get("engines", [])
    return {key: found[key] for key in KEPT if key in found} | {
        "gateway": {"engine": {"engines": engines}}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("seconds", nargs="?", type=float, default=3.0)
    parser.add_argument("--key", type=Path, help="file of an admin key")
    args = parser.parse_args()
    found = tick(args.url, args.seconds, args.key and args.key.read_text().strip())
    print([(alert["title"], alert["why"]) for alert in found["alerts"]])
    SITUATIONS.mkdir(exist_ok=True)
    text = json.dumps(situation(found), indent=1, sort_keys=True)
    (SITUATIONS / f"{args.name}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
