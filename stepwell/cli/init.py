"""This module writes a folder with an agent, a reward, tasks, a configuration and a test, so that
a new user changes what runs instead of beginning with nothing: `stepwell init NAME`.

Owns: copying `template/` and putting the name in. Does not own what the files say.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from stepwell.config.load import named_as
from stepwell.trainer.errors import ConfigError

TEMPLATE = Path(__file__).resolve().parent / "template"


def write_project(folder: Path) -> str:
    """Write the files of the template to the new `folder`; returns what to do next.

    Raises:
        ConfigError: the folder exists, or cannot be written.
    """
    name = named_as(folder.resolve().name)
    files = sorted(path for path in TEMPLATE.iterdir() if path.is_file())
    try:
        folder.mkdir(parents=True)
        for file in files:
            (folder / file.name).write_text(file.read_text("utf-8").replace("NAME", name), "utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another name, or remove it") from None
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written ({e.strerror}); choose another") from e
    written = "\n".join(f"  {folder / file.name}" for file in files)
    return (
        f"{written}\nnext: cd {shlex.quote(str(folder))} && stepwell train --config config.yaml\n"
        "test: pip install pytest && python -m pytest    (agent and reward, without a model)"
    )
