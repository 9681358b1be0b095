"""This module brings models that are named by their id on the Hugging Face hub to this machine, so
that `model.path=Qwen/Qwen3-0.6B` is enough.

    a folder that is there ──────────────────────────────► itself
    an id, in the hub's cache or to be downloaded there ──► the snapshot's folder
    an id, and the hub cannot be reached ─────────────────► one clear line

`huggingface_hub` owns the cache (`HF_HOME`), the endpoint (`HF_ENDPOINT`) and the login
(`HF_TOKEN`). Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepwell.backends.errors import BackendConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]
"""Files fetched from a model's repository; the same weights in other formats stay there."""
RUNS = "runs"
"""Folder of runs, and of the models that a command of ours makes; no owner on the hub is meant."""
ANSWER_S = 10.0


def is_hub_id(name: str | Path) -> bool:
    """True if `name` is like owner/model and no path that is, or could be, on this machine."""
    path = Path(name)
    here = path.exists() or path.parent.exists() or path.parts[:1] == (RUNS,)
    return _ID.fullmatch(str(name)) is not None and not here


def fetch_model(name: str, revision: str | None, key: str) -> Path:
    """The folder of the model `name`, downloaded unless it is in the cache.

    Args:
        revision: commit, tag or branch; None: the newest.
        key: what errors name.

    Raises:
        BackendConfigError: the hub has no such model, does not give it to us, or is out of reach.
    """
    from huggingface_hub import snapshot_download

    with _one_line_errors(name, revision, key):
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED))


def fetch_model_config(name: str, revision: str | None, key: str) -> dict[str, Any]:
    """The config.json of the model `name`, which alone is downloaded unless it is in the cache.

    Raises:
        BackendConfigError: as `fetch_model`.
    """
    from huggingface_hub import hf_hub_download

    with _one_line_errors(name, revision, key):
        found = hf_hub_download(name, "config.json", revision=revision)
    config: dict[str, Any] = json.loads(Path(found).read_text())
    return config


@contextmanager
def _one_line_errors(name: str, revision: str | None, key: str) -> Iterator[None]:
    """The hub client's errors inside the block are one line with the remedy.

    Raises:
        BackendConfigError: the hub has no such model, does not give it to us, or is out of reach.
    """
    from huggingface_hub import errors

    whose = f"{key} is {name!r}, which is no folder here"
    at = "" if revision is None else f" --revision {revision}"
    try:
        yield
    except errors.GatedRepoError as e:
        raise BackendConfigError(
            f"{key} is {name!r}, a model that is given after its terms were accepted; accept them "
            f"at https://huggingface.co/{name} and set HF_TOKEN, or run `hf auth login`"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise BackendConfigError(
            f"{whose} and no model of the hub; check the name, or, if it is private, set HF_TOKEN "
            "or run `hf auth login`"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise BackendConfigError(
            f"model.revision is {revision!r}, which {name} does not have on the hub; name a "
            "commit, tag or branch of it"
        ) from e
    except (errors.LocalEntryNotFoundError, ConnectionError) as e:
        raise BackendConfigError(
            f"{whose}, and the hub cannot be reached: this machine is offline, or HF_HUB_OFFLINE "
            f"is set; run `hf download {name}{at}` where there is a network and copy the folder "
            "here, or name a folder"
        ) from e
    except Exception as e:  # of whichever HTTP client its release has
        raise BackendConfigError(
            f"{key} is {name!r}, which could not be downloaded "
            f"({type(e).__name__}: {str(e).splitlines()[0]}); try again, or name a folder"
        ) from e


@contextmanager
def offline_if_unreachable(dataset: str, revision: str | None) -> Iterator[bool]:
    """Inside the block the client takes `dataset` from its cache if the hub cannot be reached,
    where it would otherwise try for half a minute. Gives whether it can."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    reached = _is_reachable(dataset, revision)
    if not reached:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reached
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _is_reachable(dataset: str, revision: str | None) -> bool:
    from huggingface_hub import HfApi, errors

    try:
        HfApi().dataset_info(dataset, revision=revision, timeout=ANSWER_S)
    except errors.HfHubHTTPError:  # it answers; what is wrong, loading will tell
        return True
    except Exception:  # noqa: BLE001 - of whichever HTTP client its release has
        return False
    return True
