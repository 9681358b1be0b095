"""Any program as an agent: started per rollout, with its address in the environment.

stepwell train --config quickstart rollout.agent=examples.recipes.shell_agent:agent
"""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("program.py")


async def agent(task: Any, base_url: str, api_key: str) -> float:
    """One rollout: the last line that the program prints is its answer.

    Raises:
        RuntimeError: the program failed. That is no score of 0: the rollout is aborted.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        PROGRAM,
        task["question"],
        env=os.environ | {"OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_KEY": api_key},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, _ = await process.communicate()
    finally:  # however it ended, by itself or because the rollout ran out of time
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # all that it has left running, too
        await process.wait()
    if process.returncode:
        raise RuntimeError(f"{PROGRAM.name} ended with {process.returncode}")
    return float(printed.decode().strip().rpartition("\n")[2] == task["answer"])
