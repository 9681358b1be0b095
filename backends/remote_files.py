"""This module brings files of object stores to this machine, so that `s3://…`, `hf://…` or any
other address that `fsspec` knows works where a path does.

    address ──fsspec──► a copy in the cache, one for each content ──► a path

A file whose content changes is copied again; a copy appears under its name when it is whole. The
cache is `$XDG_CACHE_HOME/stepwell/files`. Credentials are those of the store's own package (s3fs,
gcsfs, adlfs, huggingface_hub, …), which the user installs. Does not own what is in the files.
Loads no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.backends.errors import BackendConfigError
from stepwell.datapool.sealed import written_durably


class RemoteFile(NamedTuple):
    url: str
    """Its whole address, for messages and names."""
    path: Path
    """The copy."""


def is_remote(path: str | Path) -> bool:
    """True if `path` is an address like s3://bucket/file."""
    return "://" in str(path)


def fetch_files(url: str, suffix: str, key: str) -> list[RemoteFile]:
    """Copies of the files that `url` names, in order: a file, a folder of `*{suffix}` or a pattern.

    Args:
        key: what errors name.

    Raises:
        BackendConfigError: the protocol or its package is missing, or nothing can be read there.
    """
    with _clear_errors(url, key):
        fs, path = _open(url)
        if fs.isdir(path):
            found = sorted(fs.glob(f"{path.rstrip('/')}/*{suffix}"))
        else:
            found = sorted(fs.glob(path)) if has_magic(path) else [path]
        if not found:
            raise FileNotFoundError(f"no *{suffix} there")
        copies = []
        for name in found:
            folder = _cache(fs.unstrip_protocol(name), _state(fs, name))
            copies.append(RemoteFile(fs.unstrip_protocol(name), _copy(fs, name, folder, "")))
        return copies


def fetch_folder(url: str, wanted: list[str], key: str) -> Path:
    """A copy of the folder `url`, of those of its files whose names match one of `wanted`.

    Raises:
        BackendConfigError: as `fetch_files`.
    """
    with _clear_errors(url, key):
        fs, path = _open(url)
        names = [n for n in sorted(fs.find(path)) if any(fnmatch(Path(n).name, w) for w in wanted)]
        if not names:
            raise FileNotFoundError("no model there")
        folder = _cache(url, *(f"{name} {_state(fs, name)}" for name in names))
        for name in names:
            _copy(fs, name, folder, os.path.dirname(name.removeprefix(path).strip("/")))
        return folder


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped,unused-ignore]  # with the store's package: for those alone who have data there

    fs, path = fsspec.core.url_to_fs(url)
    return fs, path


def _state(fs: Any, name: str) -> str:
    """Changes with the content of a file."""
    key = str(fs.ukey(name))
    if "https" in fs.protocol:  # its key is the address alone; redirected ones change by themselves
        found = fs.info(name)
        known = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")
        key = " ".join([key, *(f"{what}={found[what]}" for what in known if found.get(what))])
    return key


def _cache(*parts: str) -> Path:
    """The folder of one content."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return home / "stepwell" / "files" / digest


def _copy(fs: Any, name: str, folder: Path, below: str) -> Path:
    target = folder / below / Path(name).name
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_durably(target) as draft:
            fs.get_file(name, draft.name)
    return target


@contextmanager
def _clear_errors(url: str, key: str) -> Iterator[None]:
    """Raise any failure inside the block as one clear `BackendConfigError`."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        yield
    except ImportError as e:
        raise BackendConfigError(
            f"{key} is {url!r}, and {protocol}:// needs a package that is not installed ({e}); "
            "install it with pip, or copy the files here"
        ) from e
    except FileNotFoundError as e:
        raise BackendConfigError(
            f"{key} is {url!r}, where nothing is found ({e}); check the address"
        ) from e
    except Exception as e:  # of whichever store's client
        if isinstance(e, ValueError) and "Protocol not known" in str(e):
            raise BackendConfigError(
                f"{key} is {url!r}, but {protocol}:// is no protocol that fsspec knows; use one of "
                "s3, gs, az, hf, https, hdfs, …, or copy the files here"
            ) from e
        raise BackendConfigError(
            f"{key} is {url!r}, which cannot be read ({type(e).__name__}: {e!s:.300}); check the "
            "address and your credentials"
        ) from e
