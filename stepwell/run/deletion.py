"""This module deletes a trajectory, or all that is marked with a tag, from a run and from files
exported of it, so that nothing of what somebody said is kept.

    both      the run's archive: files and catalogue are written anew
    alive     the run's pool, through `connect` ──► its gateways forget the trajectories, too
    stopped   its journal
    both      exported files are written anew without the rows

Owns the way there. Does not own what deleting means (`datapool/core/pool.py`,
`datapool/files/deletion.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from stepwell.datapool.errors import JournalError
from stepwell.datapool.files.archive.folder import Kind
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.deletion import delete_from_export, delete_from_journals
from stepwell.datapool.ops import Deleted
from stepwell.datapool.store.salvage import journals_in
from stepwell.layout import RUN_FILE
from stepwell.run.connection import connect
from stepwell.run.folder import GatewayPart, archive_folder, holder, journal_folder, live_run


async def delete(
    run_dir: Path, trajectory_uid: str | None, tag: str | None, exports: Sequence[Path] = ()
) -> list[str]:
    """Delete trajectories; return what was deleted and what was not, a line each.

    Raises:
        RunUnavailableError: `run_dir` is no run's folder, or its run is only starting.
        JournalError: a stopped run's journal cannot be read or written.
        ExportError: a file of `exports` is none of ours; those before it are written.
    """
    found = Deleted()
    notes: list[str] = []
    if holder(run_dir) is not None:
        run = live_run(run_dir)
        async with connect(run_dir) as pool:
            found = await pool.delete(trajectory_uid, tag)
        asked = () if trajectory_uid is None else (trajectory_uid,)
        if run.gateway is not None:
            uids = dict.fromkeys((*asked, *found.trajectories, *found.leased))
            notes += _forget(run.gateway, list(uids))
    else:
        found = delete_from_journals(journal_folder(run_dir), trajectory_uid, tag)
    lines = [f"{run_dir}: deleted {_named(found.trajectories)}"]
    if found.leased:
        lines.append(
            f"a trainer has {_named(found.leased)}: nobody else gets them, and they are deleted "
            "when it acks or returns them"
        )
    lines += notes
    lines += _from_archive(run_dir, trajectory_uid, tag, found.trajectories)
    for path in exports:
        lines.append(f"{path}: deleted {_named(delete_from_export(path, trajectory_uid, tag))}")
    for aside in _copies(journal_folder(run_dir)):
        lines.append(f"{aside}: a copy of a damaged journal, not searched; remove it")
    return lines


def _from_archive(
    run_dir: Path, trajectory_uid: str | None, tag: str | None, found: Sequence[str]
) -> Iterator[str]:
    """Delete from the run's archive, as from the pool with groups; a line of what was there, and of
    what is not reached.

    Args:
        found: what was in the pool.
    """
    if not (run_dir / RUN_FILE).is_file():
        return
    reader = ArchiveReader(archive_folder(run_dir))
    if not reader.folder.exists():
        return
    kind: Kind = "tag" if trajectory_uid is None else "trajectory"
    gone = reader.delete(kind, trajectory_uid or tag or "", with_group=True)
    # Also what the archiver had read when it was deleted from the pool.
    gone += reader.delete("trajectory", *found)
    yield f"{reader.folder.path}: deleted {_named(gone)}"
    yield "not reached: copies that somebody made of the archive's files, and exports not named"


def _copies(path: Path) -> Iterator[Path]:
    """Yield the journals that `salvage` put aside."""
    with suppress(JournalError):  # a live pool may have no journal
        for folder in journals_in(path):
            yield from sorted(folder.parent.glob(f"{folder.name}.damaged*"))


def _named(uids: Sequence[str]) -> str:
    return f"{len(uids)} trajectories" + (f": {', '.join(uids)}" if uids else "")


def _forget(gateway: GatewayPart, uids: Sequence[str]) -> Iterator[str]:
    """Have the gateways forget these, by the first that answers; a line if none does."""
    failed = []
    for url in gateway.urls:
        try:
            for uid in uids:
                gateway.ask(url, f"/v1/trajectories/{quote(uid, safe='')}", "DELETE")
        except OSError as e:
            failed.append(f"{url}: {e}")
        else:
            return
    yield (
        f"the gateways may still know them ({'; '.join(failed)}): call DELETE /v1/trajectories/UID "
        "with a key of yours, or restart them"
    )
