"""This module deletes a trajectory, all that is marked with a tag, or all of a user from a run and
from files exported of it, so that nothing of what somebody said is kept.

    alive     the run's pool, through `connect` ──► its gateways forget the trajectories, too
    stopped   its journal
    both      the run's archive: files and catalogue are written anew
              the trainer's copies: `trained/`, `validation/`, `rollouts.jsonl`, recordings
              exported files are written anew without the rows

Owns the way there, and the list of what is not reached. Does not own what deleting means
(`datapool/core/pool.py`, `datapool/files/deletion.py`, `datapool/files/copies.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote

from stepwell.datapool.errors import JournalError, NoJournalError
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.copies import TrainerCopies
from stepwell.datapool.files.deletion import (
    delete_from_export,
    delete_from_journals,
    pool_time,
)
from stepwell.datapool.files.tombstones import Kind
from stepwell.datapool.ops import Delete, Deleted
from stepwell.datapool.store.salvage import journals_in
from stepwell.gateway.replicas import FORGET_HEADER
from stepwell.layout import RUN_FILE
from stepwell.run.connection import connect
from stepwell.run.folder import (
    GatewayPart,
    archive_folder,
    holder,
    journal_folder,
    live_run,
    read_run,
)


async def delete(run_dir: Path, asked: Delete, exports: Sequence[Path] = ()) -> list[str]:
    """Delete trajectories; return what was deleted and what was not, a line each.

    Raises:
        RunUnavailableError: `run_dir` is no run's folder, or its run is only starting.
        JournalError: a stopped run's journal cannot be read or written, or has gone.
        DamagedFileError: a file of the run cannot be read, so that it could still hold it.
        ExportError: a file of `exports` is none of ours; those before it are written.
    """
    notes: list[str] = []
    is_run = (run_dir / RUN_FILE).is_file()
    own = () if asked.trajectory_uid is None else (asked.trajectory_uid,)
    files: list[str] = []
    if holder(run_dir) is not None:
        gateway = live_run(run_dir).gateway
        async with connect(run_dir) as pool:
            found = await pool.delete(asked.trajectory_uid, asked.tag, asked.user)
        uids = dict.fromkeys((*own, *found.trajectories, *found.leased))
        notes += _forget(gateway, uids)
        archived = delete_archived(run_dir, asked, with_groups=True)
    else:
        gateway = None
        archived = delete_archived(run_dir, asked, with_groups=True) if is_run else []
        # Also what came too late of these, and waits: its rows do not say whose it is.
        each = (asked, *map(Delete, archived))
        try:
            found = delete_from_journals(journal_folder(run_dir), *each)
        except NoJournalError:
            if not (is_run and _keeps_nothing(run_dir)):
                raise
            found = Deleted()  # the trainer's copies remain
        uids = dict.fromkeys((*own, *found.trajectories, *found.leased))
    if is_run:
        files, gone = _from_files(run_dir, asked, uids, archived)
        notes += _forget(gateway, [uid for uid in gone if uid not in uids])
    lines = [f"{run_dir}: deleted {_named(found.trajectories)}"]
    if found.leased:
        lines.append(
            f"a trainer has {_named(found.leased)}: nobody else gets them, and they are deleted "
            "when it acks or returns them"
        )
    lines += dict.fromkeys(notes)
    lines += files
    for path in exports:
        lines.append(f"{path}: deleted {_named(delete_from_export(path, asked))}")
    for aside in _copies(journal_folder(run_dir)):
        lines.append(f"{aside}: a copy of a damaged journal, not searched; remove it")
    if is_run:
        lines.append(not_reached(run_dir))
    return lines


def delete_archived(run_dir: Path, asked: Delete, *, with_groups: bool) -> list[str]:
    """Delete from a run's archive; the uids of what was there. Raises as `ArchiveReader.delete`."""
    kind, value = _kind_of(asked)
    reader = ArchiveReader(archive_folder(run_dir))
    at = pool_time(journal_folder(run_dir))
    return reader.delete(kind, value, with_group=with_groups, at=at)


def delete_copied(
    run_dir: Path, asked: Delete, uids: Iterable[str] = (), *, with_groups: bool
) -> list[str]:
    """Delete from the trainer's copies; the uids of what was there. Raises as
    `TrainerCopies.delete`.

    Args:
        uids: of what was deleted elsewhere, which copies do not have under a tag.
    """
    kind, value = _kind_of(asked)
    copies = TrainerCopies(run_dir)
    gone = [] if kind == "tag" else copies.delete(kind, value, with_groups=with_groups)
    return [*dict.fromkeys((*gone, *copies.delete("trajectory", *dict.fromkeys(uids))))]


def _keeps_nothing(run_dir: Path) -> bool:
    """True if the pool of the run in `run_dir` had no journal while it was alive."""
    durability: str | None = read_run(run_dir).config.get("pool", {}).get("durability")
    return durability == "none"


def _kind_of(asked: Delete) -> tuple[Kind, str]:
    if asked.trajectory_uid is not None:
        return "trajectory", asked.trajectory_uid
    return ("tag", asked.tag) if asked.tag is not None else ("user", asked.user or "")


def _from_files(
    run_dir: Path, asked: Delete, uids: Collection[str], archived: list[str]
) -> tuple[list[str], list[str]]:
    """Delete from the archive and the trainer's copies; a line of what was where, and the uids of
    all that was there.

    Args:
        uids: of what was in the pool.
        archived: what was deleted from the archive.
    """
    lines = []
    reader = ArchiveReader(archive_folder(run_dir))
    if reader.folder.exists():
        # Also what the archiver had read when it was deleted from the pool.
        archived = [*archived, *reader.delete("trajectory", *uids)]
        lines.append(f"{reader.folder.path}: deleted {_named(archived)}")
    copied = delete_copied(run_dir, asked, (*uids, *archived), with_groups=True)
    lines.append(f"{run_dir}, copies of the trainer: deleted {_named(copied)}")
    return lines, [*dict.fromkeys((*archived, *copied))]


def not_reached(run_dir: Path) -> str:
    """The line of what a deletion does not reach."""
    beside = [f"{run_dir / name}" for name in ("wandb", "tensorboard") if (run_dir / name).is_dir()]
    tables = f"tables of trackers ({', '.join(beside)})" if beside else "tables sent to trackers"
    return (
        "not reached: copies that somebody made of files, exports not named (--exports), "
        f"{tables}, and weights, which may have learnt from it"
    )


def _copies(path: Path) -> Iterator[Path]:
    """Yield the journals that `salvage` put aside."""
    with suppress(JournalError):  # a live pool may have no journal
        for folder in journals_in(path):
            yield from sorted(folder.parent.glob(f"{folder.name}.damaged*"))


def _named(uids: Sequence[str]) -> str:
    return f"{len(uids)} trajectories" + (f": {', '.join(uids)}" if uids else "")


def _forget(gateway: GatewayPart | None, uids: Collection[str]) -> Iterator[str]:
    """Have all gateways forget these; a line of those that may not have. Where one answers, a
    connection that is refused is of one that has ended: it has nothing to forget."""
    failed: dict[str, OSError] = {}
    if gateway is None or not uids:
        return
    for url in gateway.urls:
        try:
            for uid in uids:
                path = f"/v1/trajectories/{quote(uid, safe='')}"
                gateway.ask(url, path, "DELETE", headers={FORGET_HEADER: "command"})
        except OSError as e:
            failed[url] = e
    if len(failed) < len(gateway.urls):
        failed = {url: e for url, e in failed.items() if not _is_refused(e)}
    if failed:
        said = "; ".join(f"{url}: {e}" for url, e in failed.items())
        yield (
            f"the gateways may still know them ({said}): call DELETE /v1/trajectories/UID with a "
            "key of yours, or restart them"
        )


def _is_refused(error: OSError) -> bool:
    reason = error.reason if isinstance(error, URLError) else error
    return isinstance(reason, ConnectionRefusedError)
