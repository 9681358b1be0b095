"""Play the newcomer from the built wheel in an empty folder: `make test-newcomer`.

    install ─► stepwell init ─► train 12 steps ─► look ─► live traffic ─► a plug-in ─► mistakes

Prints one table of steps with their seconds, and the minutes from the empty folder to a trained own
agent. Exit code 1 if a step fails. `python -m tests.newcomer --environment DIR live mistakes` plays
some steps in an environment that has the wheel already.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.newcomer.live import live_traffic
from tests.newcomer.mistakes import MISTAKES, make, write_files
from tests.newcomer.user import CONSTRAINTS, INSTALLATION, ROOT, User, WentWrongError, emptied

GOAL_MIN = 8.0
"""From an empty folder to a trained own agent, on two cores."""
STEPS = 12
INIT, TRAIN = "stepwell init mine", f"stepwell train (own agent, {STEPS} steps)"
FIRST_AGENT = {*INSTALLATION, INIT, TRAIN}
LOOK = """\
import json, pathlib, sys
from transformers import AutoModelForCausalLM
lines = [json.loads(line) for line in pathlib.Path(sys.argv[1], "metrics.jsonl").open()]
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
print(len({r["step"] for r in lines} - {0}), sum(p.numel() for p in model.parameters()))
"""


def own_agent(user: User) -> None:
    """`stepwell init`, and the run that README promises of it."""
    with user.step(INIT):
        user.run("stepwell", "init", "mine")
    mine = user.folder / "mine"
    with user.step(TRAIN):
        user.run(
            "stepwell",
            "train",
            "--config",
            "config.yaml",
            f"trainer.total_steps={STEPS}",
            cwd=mine,
            within_s=900,
        )
        summary = json.loads((mine / "runs/mine/summary.json").read_text())
        before, after = summary["eval_before"], summary["eval_after"]
        if after <= before:
            raise WentWrongError(f"the score was {before:.2f} and is {after:.2f}")


def own_test(user: User) -> None:
    """The test that `stepwell init` wrote."""
    with user.step("pip install pytest; pytest"):
        user.run("pip", "install", "--quiet", "-c", CONSTRAINTS, "pytest")
        user.run("pytest", cwd=user.folder / "mine")


def look(user: User) -> None:
    """The files of the run, and its model in transformers."""
    mine = user.folder / "mine"
    with user.step("look at the run: files, export, transformers"):
        run_dir = mine / "runs/mine"
        wanted = ("run.json", "metrics.jsonl", "summary.json", "reward.png", "logs/trainer.log")
        if missing := [name for name in wanted if not (run_dir / name).exists()]:
            raise WentWrongError(f"{run_dir} has no {', '.join(missing)}")
        user.run("stepwell", "export", "runs/mine", "--to", "model", cwd=mine)
        seen = user.run("python", "-c", LOOK, "runs/mine", "model", cwd=mine).out.split()
        if seen[0] != str(STEPS):
            raise WentWrongError(f"{run_dir}/metrics.jsonl has {seen[0]} steps")


def plug_in(user: User) -> None:
    """A training backend and an engine of another package."""
    with user.step("a plug-in: pip install ./plugin, stepwell backends"):
        user.run("pip", "install", "--quiet", "--no-deps", ROOT / "examples" / "plugin")
        listed = user.run("stepwell", "backends").out
        if missing := [name for name in ("jsonl", "background") if name not in listed]:
            raise WentWrongError(f"stepwell backends does not list {', '.join(missing)}")
    with user.step("train on the engine of the plug-in"):
        user.run(
            "stepwell",
            "train",
            "--config",
            "quickstart",
            "run.name=plugin",
            "engine.kind=background",
            "trainer.total_steps=2",
            "data.val.size=8",
            within_s=600,
        )


def mistakes(user: User) -> None:
    folder = user.folder / "wrong"
    write_files(emptied(folder))
    # The first start of a program after its installation reads it from disk.
    user.run("stepwell", "--version")
    for mistake in MISTAKES:
        shutil.rmtree(folder / "runs", ignore_errors=True)  # a run that is complete starts nothing
        user.add(make(user, mistake, folder))


PARTS: dict[str, Callable[[User], None]] = {
    "agent": own_agent,
    "test": own_test,
    "look": look,
    "live": live_traffic,
    "plugin": plug_in,
    "mistakes": mistakes,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=__doc__)
    parser.add_argument("--folder", type=Path, help="an empty folder; default: a new one")
    parser.add_argument("--environment", type=Path, help="has the wheel; default: installed anew")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all, in order")
    args = parser.parse_args()
    # Who is run in the background ignores Ctrl-C, and so would what is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as scratch:
        folder: Path = (args.folder or Path(scratch)).absolute()
        environment = (args.environment or folder / "env").absolute()
        user = User(folder, environment)
        if args.environment is None:
            user.install()
        if not user.failed:
            for name in args.parts or PARTS:
                PARTS[name](user)
        user.show()
        failed = [step.name for step in user.steps if step.why_not]
        print(f"{len(user.steps) - len(failed)} of {len(user.steps)} steps went well")
        minutes = sum(step.seconds for step in user.steps if step.name in FIRST_AGENT) / 60
        if args.environment is None and not args.parts:
            took = f"{minutes:.1f} min (goal: {GOAL_MIN:g})"
            print(f"from an empty folder to a trained own agent: {took}")
        return int(bool(failed) or minutes > GOAL_MIN)


if __name__ == "__main__":
    sys.exit(main())
