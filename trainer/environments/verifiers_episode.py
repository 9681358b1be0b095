"""One episode of a `verifiers` environment (0.4), for the Python that has the package: a harness's
command. Standard library and verifiers only, since its environment is not ours.

    python verifiers_episode.py tasks   TASKSET [--config JSON]      JSONL of tasks, on stdout
    python verifiers_episode.py episode TASKSET --index I …          plays one, writes its reward

The tasks, tools and rewards are the environment's. The policy is asked at `--base-url`, the
rollout's: with `--client train` by verifiers' own train client, which renders prompts itself and
calls `/inference/v1/generate`; with `eval` in the chat dialect. Agents run on this machine unless
`--config` says otherwise (verifiers' own default is a sandbox of an account). An episode that
failed writes no reward and ends with status 1; one that verifiers' own machinery failed, with 75.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

INFRASTRUCTURE = 75
MACHINERY = ("SandboxError", "InterceptionError", "TunnelError", "ToolsetError", "ProviderError")
"""verifiers' errors that are no policy's and no task's."""


def environment(options: argparse.Namespace) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.env import EnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    given = json.loads(options.config)
    config = {**given, "taskset": {"id": options.taskset, **given.get("taskset", {})}}
    kind = environment_class(options.taskset, config.get("id", ""))
    section = concrete_type(kind, EnvConfig, origin=vf.Env) or vf.SingleAgentEnvConfig
    for name, field in section.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            config[name] = {"runtime": {"type": "subprocess"}, **config.get(name, {})}
    return load_environment(section.model_validate(config))


def text_of(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(getattr(message, "content", message)) for message in prompt or ())


def list_tasks(options: argparse.Namespace) -> None:
    env = environment(options)
    for i, task in enumerate(env.taskset):
        if options.size is not None and i >= options.size:
            break
        row = {
            "instance_id": str(task.data.name or task.data.id or i),
            "data_source": options.taskset,
            "question": text_of(task.data.prompt),
            "answer": None,
            "metadata": {"index": i},
        }
        print(json.dumps(row))


async def play(options: argparse.Namespace) -> int:
    from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig

    env = environment(options)
    task = next(t for i, t in enumerate(env.taskset) if i == options.index)
    endpoint = {"base_url": f"{options.base_url}/v1", "api_key_var": "STEPWELL_API_KEY"}
    client: Any = EvalClientConfig(**endpoint)
    if options.client == "train":
        client = TrainClientConfig(**endpoint, renderer_model_name=options.tokenizer)
    context = ModelContext(model=options.model, client=client)
    async with env.serving():
        (slot,) = env.slots(task, 1)
        episode = await env.run_slot(slot, context)
    errors = [*episode.errors, *(e for t in episode.traces for e in getattr(t, "errors", ()))]
    for error in errors:
        print(f"{error.type}: {error.message}", file=sys.stderr)
    if not episode.ok:
        return INFRASTRUCTURE if any(error.type in MACHINERY for error in errors) else 1
    reward = float(sum(trace.reward for trace in episode.traces))
    Path(options.out).write_text(str(reward))  # noqa: ASYNC240 - nothing else runs any more
    return 0


def main() -> int:
    # verifiers runs its agents by uv, which is beside this Python. So is the cache: the home of a
    # rollout is empty.
    here = Path(sys.prefix)
    os.environ["PATH"] = f"{here / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("UV_CACHE_DIR", str(here / "uv-cache"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tasks", "episode"))
    parser.add_argument("taskset")
    parser.add_argument("--config", default="{}", help="EnvConfig, as JSON")
    parser.add_argument("--size", type=int, help="tasks listed, at most")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--base-url", default=os.environ.get("STEPWELL_BASE_URL", ""))
    parser.add_argument("--model", default="policy")
    parser.add_argument("--client", choices=("eval", "train"), default="eval")
    parser.add_argument("--tokenizer", help="model whose chat template the train client renders")
    parser.add_argument("--out", default="reward.txt")
    options = parser.parse_args()
    if options.what == "tasks":
        list_tasks(options)
        return 0
    return asyncio.run(play(options))


if __name__ == "__main__":
    sys.exit(main())
