"""This module lists mistakes that newcomers make, so that each is shown to be answered by one line
that names its cause, in the time in which a reader still knows what was typed.

A mistake is a command in the folder that `write_files` fills. Its answer is one line on stderr that
holds every text of `says`. A mistake in the configuration is told within a second, one in an agent
or a model that has to be loaded within five; those that only a running system can know have none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.newcomer.user import Step, User, WentWrongError, busy

CONFIGURATION = 1.0
LOADED = 5.0
RUNNING = None
"""Seconds in which a mistake is told."""


@dataclass(frozen=True)
class Mistake:
    name: str
    argv: tuple[str, ...]
    says: tuple[str, ...]
    """All in one line of what is printed."""
    limit_s: float | None = CONFIGURATION
    environment: dict[str, str] = field(default_factory=dict)


LATE = "too late"


def make(user: User, mistake: Mistake, folder: Path) -> Step:
    """Make the mistake and check what is told of it, and after how long.

    A limit that was missed is measured again, once. If the machine is busy with other work the CPU
    seconds count, which are what the user of an idle one waits.
    """
    step = _make(user, mistake, folder)
    return _make(user, mistake, folder) if step.why_not.startswith(LATE) else step


def _make(user: User, mistake: Mistake, folder: Path) -> Step:
    name, limit_s = f"mistake: {mistake.name}", mistake.limit_s
    try:
        done = user.run(*mistake.argv, cwd=folder, fails=True, environment=mistake.environment)
    except WentWrongError as e:
        return Step(name, 0.0, str(e), limit_s)
    # What argparse says of how to call the command is not of the mistake.
    told = [line for line in done.err.splitlines() if not line.startswith(("usage:", " "))]
    lines = [*told, *done.out.splitlines()]
    why = note = ""
    if not any(all(text in line for text in mistake.says) for line in lines):
        why = f"no line says {', '.join(mistake.says)}: {done.last_line}"
    elif "Traceback" in done.err:
        why = "a traceback"
    elif limit_s is not None and not done.code:
        why = "exit code 0"
    elif limit_s is not None and len(told) != 1:
        why = f"{len(told)} lines, not one"
    elif limit_s is not None and done.seconds > limit_s:
        if busy() and done.cpu_s <= limit_s:
            note = f" ({done.cpu_s:.1f} s of CPU; the machine is busy)"
        else:
            why = f"{LATE}, {done.cpu_s:.1f} s of CPU"
    return Step(name, done.seconds, why, limit_s, note)


FILES = {
    "wrong.yaml": """\
extends: quickstart
run: { name: wrong }
logging: { wandb: disabled, console: plain }
data:
  train: { kind: jsonl, path: good.jsonl }
  val: { kind: jsonl, path: held_out.jsonl }
rollout: { n: 2, agent: agents:good, timeout_s: 10, max_outstanding_groups: 2 }
trainer: { total_steps: 2, train_batch_size: 2, starvation_timeout_s: 20 }
""",
    "good.jsonl": "".join(
        f'{{"question": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(10, 40)
    ),
    "held_out.jsonl": '{"question": "What is 1 + 1?", "answer": "2"}\n',
    "empty.jsonl": "",
    "broken.jsonl": '{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": \n',
    "other_key.jsonl": '{"instruction": "1 + 1?", "answer": "2"}\n',
    "agents.py": """\
from openai import AsyncOpenAI


async def ask(task, base_url, api_key):
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    message = {"role": "user", "content": task["question"]}
    reply = await client.chat.completions.create(
        model="policy", messages=[message], max_tokens=8
    )
    return reply.choices[0].message.content or ""


async def good(task, base_url, api_key):
    return float(task["answer"] in await ask(task, base_url, api_key))


def not_async(task, base_url, api_key):
    return 1.0


async def only_a_prompt(prompt):
    return 1.0


async def raising(task, base_url, api_key):
    await ask(task, base_url, api_key)
    return task["solution"]


async def text(task, base_url, api_key):
    return await ask(task, base_url, api_key)


async def nan(task, base_url, api_key):
    await ask(task, base_url, api_key)
    return float("nan")


async def no_call(task, base_url, api_key):
    return 1.0


async def unscored(task, base_url, api_key):
    await ask(task, base_url, api_key)


async def wrong_key(task, base_url, api_key):
    return await good(task, base_url, "sk-of-another-service")
""",
    "unclosed.py": "async def agent(task, base_url, api_key:\n    return 1.0\n",
    "needs_a_package.py": "import langgraph_of_mine\n",
    "rewards.py": """\
def text(data_source, solution_str, ground_truth, extra_info=None):
    return "good"


def raising(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 / 0
""",
    "in_the_way": "a file where a folder is wanted\n",
}


def write_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)


def train(*overrides: str) -> tuple[str, ...]:
    return ("stepwell", "train", "--config", "wrong.yaml", *overrides)


def tasks(path: str) -> str:
    return f"data.train.path={path}"


MISTAKES = (
    # the configuration
    Mistake(
        "a preset's name with a typo",
        ("stepwell", "train", "--config", "quickstrat"),
        ("did you mean 'quickstart'", "smollm2"),
    ),
    Mistake("a key with a typo", train("trainer.total_step=5"), ("did you mean 'total_steps'",)),
    Mistake(
        "verl's key",
        train("actor_rollout_ref.actor.optim.lr=1e-6"),
        ("actor_rollout_ref.actor.optim.lr", "backend.lr"),
    ),
    Mistake("TRL's key", train("num_generations=8"), ("num_generations", "rollout.n")),
    Mistake("slime's key", train("n_samples_per_prompt=8"), ("n_samples_per_prompt", "rollout.n")),
    Mistake("an option for a key", train("--lr", "1e-6"), ("--lr", "KEY=VALUE")),
    Mistake(
        "a word where a number belongs",
        train("trainer.total_steps=ten"),
        ("trainer.total_steps", "'ten'", "integer"),
    ),
    Mistake(
        "a batch larger than what is outstanding",
        train("trainer.train_batch_size=64"),
        ("trainer.train_batch_size", "rollout.max_outstanding_groups", "64", "2"),
    ),
    Mistake("no such file of tasks", train(tasks("task.jsonl")), ("data.train", "'task.jsonl'")),
    Mistake("an empty file of tasks", train(tasks("empty.jsonl")), ("data.train", "empty.jsonl")),
    Mistake("a broken line in the tasks", train(tasks("broken.jsonl")), ("broken.jsonl:2",)),
    Mistake(
        "tasks with another key",
        train(tasks("other_key.jsonl")),
        ("other_key.jsonl:1", "no 'question'", "prompt_key", "instruction"),
    ),
    Mistake(
        "no such model folder", train("model.path=/models/none"), ("model.path", "/models/none")
    ),
    Mistake(
        "a model of the hub, offline",
        train("model.path=Qwen/Qwen3-0.6B"),
        ("model.path", "Qwen/Qwen3-0.6B", "offline"),
        LOADED,
        {"HF_HUB_OFFLINE": "1"},
    ),
    Mistake(
        "a run folder that cannot be", train("run.dir=in_the_way/run"), ("run.dir", "in_the_way")
    ),
    Mistake(
        "no CUDA",
        train("backend.device=cuda"),
        ("backend.device", "'cuda'", "no GPU", "auto"),
        LOADED,
    ),
    Mistake("no SGLang", train("engine=sglang"), ("engine", "sglang", "install"), LOADED),
    Mistake(
        "to attach to a folder that is no run's",
        ("stepwell", "train", "--attach", "runs/nothing"),
        ("runs/nothing", "stepwell serve"),
    ),
    # an agent, a reward or a model that is loaded
    Mistake(
        "an agent's module with a typo",
        train("rollout.agent=agent:good"),
        ("rollout.agent", "'agent:good'"),
        LOADED,
    ),
    Mistake(
        "an agent's function with a typo",
        train("rollout.agent=agents:god"),
        ("rollout.agent", "'agents:god'", "did you mean 'good'"),
        LOADED,
    ),
    Mistake(
        "an agent with a syntax error",
        train("rollout.agent=unclosed:agent"),
        ("rollout.agent", "unclosed.py", "line 1", "never closed"),
        LOADED,
    ),
    Mistake(
        "an agent whose package is missing",
        train("rollout.agent=needs_a_package:agent"),
        ("rollout.agent", "langgraph_of_mine"),
        LOADED,
    ),
    Mistake(
        "an agent that is not async",
        train("rollout.agent=agents:not_async"),
        ("rollout.agent", "async def"),
        LOADED,
    ),
    Mistake(
        "an agent with another signature",
        train("rollout.agent=agents:only_a_prompt"),
        ("rollout.agent", "(task, base_url, api_key)"),
        LOADED,
    ),
    Mistake(
        "a reward's function with a typo",
        train("rollout.reward=rewards.py:score"),
        ("rollout.reward", "score", "text"),
        LOADED,
    ),
    # what only a running system can know
    Mistake(
        "an agent that always raises",
        train("rollout.agent=agents:raising"),
        ("KeyError", "'solution'"),
        RUNNING,
    ),
    Mistake(
        "an agent that returns text",
        train("rollout.agent=agents:text"),
        ("agents:text", "number", "str"),
        RUNNING,
    ),
    Mistake(
        "an agent that returns NaN",
        train("rollout.agent=agents:nan"),
        ("agents:nan", "nan"),
        RUNNING,
    ),
    Mistake(
        "an agent that never calls the model",
        train("rollout.agent=agents:no_call"),
        ("no_steps", "never called the model"),
        RUNNING,
    ),
    Mistake(
        "an agent that nobody scores",
        train("rollout.agent=agents:unscored"),
        ("reward", "None"),
        RUNNING,
    ),
    Mistake(
        "a key of another service",
        train("rollout.agent=agents:wrong_key", "gateway.admin_keys=[a-key-of-this-gateway]"),
        ("AuthenticationError",),
        RUNNING,
    ),
    Mistake(
        "a reward function that returns text",
        train("rollout.agent=agents:unscored", "rollout.reward=rewards.py:text"),
        ("reward text", "'good'"),
        RUNNING,
    ),
    Mistake(
        "a reward function that always raises",
        train("rollout.agent=agents:unscored", "rollout.reward=rewards.py:raising"),
        ("reward raising", "ZeroDivisionError"),
        RUNNING,
    ),
)
