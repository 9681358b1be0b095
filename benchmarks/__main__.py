"""`python -m benchmarks NAME [--json|--markdown]`: run a benchmark and check its bounds.

Exit codes: 0 every bound holds; 1 one does not; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from benchmarks.registry import BENCHES, run_bench
from stepwell.cli import interruptible
from stepwell.trainer.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=list(BENCHES))
    form = parser.add_mutually_exclusive_group()
    for name, text in (("json", "print one JSON object"), ("markdown", "print Markdown tables")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=text)
    parser.set_defaults(form="table")
    # An option that is not given is not passed on: not every bench has each.
    absent = argparse.SUPPRESS
    parser.add_argument(
        "--quick", action="store_true", default=absent, help="little data, no timing bounds"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", default=absent, help="these parts of it"
    )
    parser.add_argument("--kills", type=int, metavar="N", default=absent, help="of resume")
    text = "of gateway's soak (default 10)"
    parser.add_argument("--minutes", type=float, metavar="N", default=absent, help=text)
    args: dict[str, Any] = vars(parser.parse_args())
    name = args.pop("name")
    try:
        return asyncio.run(interruptible(run_bench(name, **args)))
    except ConfigError as e:
        print(f"benchmarks: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
