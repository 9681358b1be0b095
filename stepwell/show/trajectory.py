"""This module shows what is in a run's pool: `stepwell groups` and `stepwell show`.

    groups       ListGroups, ListTrajectories, drop reasons            a table
    show         rows of an export (`datapool/files/columns.py`) ──► the tree of turns, the text of
                 each, coloured by the mask. █ is trained on, · is not

The tokens are those of the journal, or of an exported file. What an agent wrote is text: control
characters are shown, never sent to the terminal. Does not own finding the run (`show/run.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stepwell.datapool.files.archive.lookup import locate, why_closed
from stepwell.datapool.files.archive.reader import ArchiveReader, fate
from stepwell.datapool.files.archive.unarchived import begun, of_group
from stepwell.datapool.files.columns import Row, loads, to_rows
from stepwell.datapool.files.export import read
from stepwell.datapool.files.trained import TRAINED as FOLDER
from stepwell.datapool.files.trained import with_rewards
from stepwell.datapool.inspect.pages import ExportedTrajectory, GroupRow, TrajectoryRow
from stepwell.datapool.questions import FOUND
from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.run.folder import archive_folder
from stepwell.show.archive import archive_rest
from stepwell.show.run import RunView, open_run
from stepwell.track.console import all_safe, safe
from stepwell.trainer.errors import ConfigError, shown

STATES = {"ready": "green", "complete": "green", "held": "yellow", "leased": "cyan"}
STATES |= {"aborted": "red", "dropped": "red", "trained": "cyan"}
RECENT = 10
"""Dropped groups that are named."""
TRAINED, MASKED = ("█ ", "green"), ("· ", "dim")
SHADES = ("green", "bright_green")
"""Colours of trained tokens, in turn, so that their borders are seen."""


class Tokens(Protocol):
    """Text of single tokens; `ChatTokenizer` is one."""

    def token_bytes(self, token_id: int) -> bytes: ...


# -- groups ------------------------------------------------------------------------------------


async def read_groups(
    view: RunView,
    channel: str,
    filters: Mapping[str, Any],
    *,
    prompt_uid: str | None = None,
    limit: int = 50,
) -> dict[str, Any]:
    """The first groups that pass the filters, what was dropped and why, as JSON values; of one
    group its trajectories, too.

    Raises:
        ConfigError: no such channel or group, or a limit below 1.
    """
    if limit < 1:
        raise ConfigError(f"--limit is {limit}; give 1 or more")
    pool, counts = view.pool, await view.pool.get_statistics()
    if channel not in counts:
        raise ConfigError(f"--channel is {channel!r}; this run has {', '.join(counts)}")
    rows: list[GroupRow] = []
    cursor: str | None = None
    while True:
        page = await pool.list_groups(channel, cursor, 1000, prompt_uid=prompt_uid, **filters)
        rows += page.items
        if (cursor := page.cursor) is None or len(rows) > limit:
            break
    is_there = bool(rows) or prompt_uid is None
    if not is_there and filters:  # it may be there and not pass
        is_there = bool((await pool.list_groups(channel, limit=1, prompt_uid=prompt_uid)).items)
    if not is_there:
        raise ConfigError(
            f"--prompt is {prompt_uid!r}, which is no group in channel {channel!r} of "
            f"{view.folder}; `stepwell groups` lists them, and `stepwell show` finds one that was "
            "trained or dropped"
        )
    rows = await asyncio.to_thread(with_rewards, view.folder, rows)
    found: dict[str, Any] = {
        "run": view.run.name,
        "channel": channel,
        "counts": counts[channel]["groups"],
        "groups": [_plain(row) for row in rows[:limit]],
        "more": len(rows) > limit or cursor is not None,
        "dropped": await _dropped(view, channel),
    }
    if prompt_uid is not None:
        listed = await pool.list_trajectories(channel, limit=1000, prompt_uid=prompt_uid)
        found["trajectories"] = [_plain(row) for row in listed.items]
    return found


async def _dropped(view: RunView, channel: str) -> list[dict[str, Any]]:
    """The last ones, as far as the pool remembers: since it was started, 20,000 events."""
    found: list[dict[str, Any]] = []
    cursor = None
    while page := await view.pool.get_events(cursor, channel, ("dropped",)):
        found += [
            {"prompt_uid": e.prompt_uid, "reason": e.data["reason"], "at": e.time}
            for e in page.events
        ]
        if not page.events:
            break
        cursor = page.cursor
    return found[-RECENT:]


def _plain(row: GroupRow | TrajectoryRow) -> dict[str, Any]:
    return asdict(row) | {"marks": row.marks.as_dict()}


def groups_screen(found: Mapping[str, Any]) -> RenderableType:
    found = all_safe(found)
    lines: list[RenderableType] = [_groups(found["groups"])] if found["groups"] else []
    if not found["groups"]:
        lines.append(f"no group of channel {found['channel']} passes")
    if found["more"]:
        lines.append(Text("… there are more: --limit", "dim"))
    if "trajectories" in found:
        lines += ["", _trajectories(found["trajectories"])]
    counts = found["counts"]
    reasons = sorted(counts["drop_reasons"].items(), key=lambda item: -item[1])
    said = " · ".join(f"{reason} {n:,}" for reason, n in reasons)
    lines += ["", Text.assemble((f"dropped {counts['dropped']:,}", "bold"), f"  {said}")]
    for each in found["dropped"]:
        lines.append(Text.assemble("  ", each["prompt_uid"], "  ", (each["reason"], "red")))
    if counts["dropped"] and not found["dropped"]:  # since the pool was started
        where = f"left == 'dropped' and channel == {found['channel']!r}"
        lines.append(Text(f'  stepwell data query "{where}" names them', "dim"))
    return Group(*lines)


def _groups(groups: Sequence[Mapping[str, Any]]) -> _Listing:
    table = _Listing("group", "state", "done", "reward", "version", "call tokens", "why, tags")
    for g in groups:
        wanted = g["n_rollouts"]
        tags = " ".join(f"#{tag}" for tag in g["marks"]["tags"])
        table.add_row(
            g["prompt_uid"],
            Text(g["state"], STATES.get(g["state"], "")),
            f"{g['n_complete']}" if wanted is None else f"{g['n_complete']}/{wanted}",
            _number(g["reward_mean"]) + (f" ±{g['reward_std']:.2f}" if g["reward_std"] else ""),
            _versions(g),
            f"{g['n_tokens']:,}",
            Text(f"{g['reason'] or ''} {tags}".strip()),
        )
    return table


def _trajectories(rows: Sequence[Mapping[str, Any]]) -> _Listing:
    table = _Listing("trajectory", "state", "steps", "reward", "version", "tokens", "why, tags")
    for t in rows:
        tags = " ".join(f"#{tag}" for tag in t["marks"]["tags"])
        table.add_row(
            t["trajectory_uid"],
            Text(t["state"], STATES.get(t["state"], "")),
            f"{t['n_steps']}",
            _number(t["reward"]),
            _versions(t),
            f"{t['n_unique_tokens']:,}",
            Text(f"{t['reason'] or ''} {tags}".strip()),
        )
    return table


class _Listing:
    """A table whose first column is a uid. Uids are never broken, so that they can be copied: where
    the table is wider than the terminal, each uid has a line of its own, above its row."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[tuple[str, tuple[str | Text, ...]]] = []

    def add_row(self, uid: str, *cells: str | Text) -> None:
        self._rows.append((uid, cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max((cell_len(uid) for uid, _ in self._rows), default=0)
        widths = [
            max(cell_len(text if isinstance(text, str) else text.plain) for text in column)
            for column in zip(self._names[1:], *(cells for _, cells in self._rows), strict=True)
        ]
        if longest + 2 * len(widths) + sum(widths) <= options.max_width:
            table = self._table([longest, *widths])
            for uid, cells in self._rows:
                table.add_row(Text(uid), *cells)
            yield table
            return
        yield Text(self._names[0], "bold")
        yield Padding(self._table(widths), (0, 0, 0, 2))
        for uid, cells in self._rows:
            yield Text(uid, overflow="fold")
            row = self._table(widths, has_head=False)
            row.add_row(*cells)
            yield Padding(row, (0, 0, 0, 2))

    def _table(self, widths: Sequence[int], *, has_head: bool = True) -> Table:
        """The columns of `widths`, from the last one on; the last one takes what is left."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=has_head)
        names = self._names[-len(widths) :]
        for name, width in zip(names, widths, strict=True):
            is_number = name not in (self._names[0], self._names[1], self._names[-1])
            is_last = name == self._names[-1]
            table.add_column(
                name,
                justify="right" if is_number else "left",
                width=None if is_last else width,
                no_wrap=not is_last,
                overflow="fold",
            )
        return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _versions(row: Mapping[str, Any]) -> str:
    oldest, newest = row["oldest_version"], row["newest_version"]
    return "-" if oldest is None else f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}"


# -- one trajectory ----------------------------------------------------------------------------


class Opened(NamedTuple):
    """A trajectory to be shown."""

    rows: list[Row]
    """Its branches, as an export writes them, with lists for arrays."""
    tokens: Tokens | None
    """Tokenizer that gives the tokens' text; None: there is none."""
    trained: dict[str, Any] | None = None
    """Optimizer `step`, mean `advantage` and `weight` if it was trained and sampled, else None."""
    archived: dict[str, Any] | None = None
    """Its row as lists have it, if it has left the pool or was aborted, with `feedback` that came
    late."""


class Found(NamedTuple):
    """A trajectory, wherever it was found."""

    exported: ExportedTrajectory
    archived: dict[str, Any] | None = None
    """See `Opened.archived`."""
    trained: dict[str, Any] | None = None
    """See `Opened.trained`."""
    masks: Mapping[int, list[float]] = MappingProxyType({})
    """Weights of its trained tokens, by step."""


class Several(NamedTuple):
    """Trajectories that one uid leads to: those of a group, or whose uids begin with it."""

    items: list[dict[str, Any]]
    """Rows as lists of the archive have them."""
    may_be_more: bool = False
    """There may be more: as many uids begin so as are looked for."""


async def open_trajectory(uid: str, where: str | None) -> Opened | Several:
    """Open what a uid names: a trajectory, live, archived or trained; or a group.

    Args:
        uid: of a trajectory or a group, or the beginning of one.
        where: the run, or an exported file.

    Raises:
        ConfigError: it is not there.
    """
    if where is not None and Path(where).suffix in (".parquet", ".jsonl"):
        return _with_steps(Found(await asyncio.to_thread(_in_file, uid, Path(where))), None)
    async with open_run(where) as view:
        tokens = _tokenizer(view)
        if not view.is_alive:
            await archive_rest(view.folder, view.run)
        archive = ArchiveReader(archive_folder(view.folder))
        found, deleted = await _find(uid, view, archive), archive.was_deleted(uid)
        if found is None and (deleted is None or deleted.value != uid):
            rows = [*await begun(view.pool, uid), *await asyncio.to_thread(archive.find, uid)]
            items = {row["uid"]: row for row in rows}
            found = Several([*items.values()], len(items) >= FOUND) if items else None
        if isinstance(found, Several) and len(found.items) == 1:
            found = await _find(found.items[0]["uid"], view, archive)
        if found is None and deleted is not None:
            at = datetime.fromtimestamp(deleted.at).strftime("%Y-%m-%d %H:%M:%S")
            raise ConfigError(
                f"{deleted.kind} {deleted.value!r} was deleted at {at}; nothing of it is kept"
            )
        if found is None:
            channels = await view.pool.get_statistics()
            why = await why_closed(uid, view.pool, channels)
            if why is not None and view.files.trained(uid) is None:
                raise ConfigError(
                    f"of trajectory {uid!r} nothing is kept any more: {safe(why)}; what leaves is "
                    "archived with pool.archive.enabled, for pool.archive.keep_days and up to "
                    "max_gb"
                )
            found = await asyncio.to_thread(_in_sample, uid, view)
    return found if isinstance(found, Several) else _with_steps(found, tokens)


def _with_steps(found: Found, tokens: Tokens | None) -> Opened:
    exported = found.exported
    if not exported.trajectory.steps:
        live = {"state": exported.state, "reason": exported.reason, "left": "live"}
        why = fate(found.archived or live | {"drop_reason": None})
        raise ConfigError(
            f"trajectory {exported.trajectory.trajectory_uid!r} has no step: {safe(why)}"
        )
    opened = opened_of(exported, tokens, found.trained, found.masks)
    return opened._replace(archived=found.archived)


async def _find(uid: str, view: RunView, archive: ArchiveReader) -> Found | Several | None:
    """The trajectory or the group with this very uid; None: neither pool nor archive has one."""
    channels = await view.pool.get_statistics()
    located = await locate(uid, view.pool, channels, archive_folder(view.folder))
    if located is not None:
        if located.row is not None and view.files.trained(uid) is not None:
            return (await asyncio.to_thread(_in_sample, uid, view))._replace(archived=located.row)
        return Found(located.exported, located.row)
    rows = await asyncio.to_thread(archive.find, uid)
    group = [row for row in rows if row["prompt_uid"] == uid]
    group += await of_group(view.pool, uid)
    return Several(list({row["uid"]: row for row in group}.values())) if group else None


def opened_of(
    exported: ExportedTrajectory,
    tokens: Tokens | None,
    trained: dict[str, Any] | None = None,
    masks: Mapping[int, list[float]] = MappingProxyType({}),
) -> Opened:
    """A trajectory with steps, to be shown.

    Args:
        masks: weights of its trained tokens, by step.
    """
    rows = [dict(row) for row in to_rows(exported, 0, {})]
    for row in rows:
        row.update({k: v.tolist() for k, v in row.items() if hasattr(v, "tolist")})
        del row["provenance"], row["position"]
        for step in row["steps"] if trained is not None else ():
            start, end = step["response_start"], step["response_end"]
            mask = masks.get(step["step_index"], [0.0] * (end - start))
            both = zip(row["loss_mask"][start:end], mask, strict=True)
            row["loss_mask"][start:end] = [int(a and b > 0) for a, b in both]
    return Opened(rows, tokens, trained)


def _in_sample(uid: str, view: RunView) -> Found:
    """One that was trained and has left the pool: what the trainer keeps of some."""
    files = view.files

    def heads(step: int) -> list[dict[str, Any]]:
        about = files.about(step)
        return [] if about is None else about["trajectories"]

    if (found := files.trained(uid)) is None:
        kept = (
            f"{h['trajectory_uid']} of step {s}" for s in files.sampled()[::-1] for h in heads(s)
        )
        raise ConfigError(
            f"trajectory {uid!r} is not in the pool of {view.folder} (`stepwell groups --prompt "
            "UID` lists those of a group), nor in its archive (`stepwell data query ''` lists it), "
            "nor in its sample of what was trained: trainer.sample_groups groups of each optimizer "
            f"step, in {view.folder / FOLDER}"
            f"{next((f'; the newest there is {k}' for k in kept), '')}"
        )
    step, trained = found
    head = next((h for h in heads(step) if h["trajectory_uid"] == uid), {})
    about = {"step": step, "advantage": head.get("advantage"), "weight": head.get("weight")}
    masks = {
        s.step_index: list(columns.get("mask", [1.0] * len(s.response_ids)))
        for s, columns in zip(trained.trajectory.steps, trained.columns, strict=True)
        if columns
    }
    return Found(ExportedTrajectory(trajectory=trained.trajectory), None, about, masks)


def _in_file(uid: str, path: Path) -> ExportedTrajectory:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; name a run's folder or an exported file")
    for exported in read(path):
        if exported.trajectory.trajectory_uid == uid:
            return exported
    raise ConfigError(f"trajectory {uid!r} is not in {path}")


def _tokenizer(view: RunView) -> Tokens | None:
    try:
        return ChatTokenizer.load(view.tokenizer_path())
    except GatewayConfigError:  # the model was removed: ids are shown
        return None


def trajectory_screen(opened: Opened) -> RenderableType:
    rows, tokens, trained, archived = opened
    names = ("trajectory_uid", "prompt_uid", "channel", "state", "group_state", "reason", "reward")
    head, marks = all_safe({name: rows[0][name] for name in names}), rows[0]["marks"]
    archived = all_safe(archived)
    steps = _steps(rows)
    n_masked = sum(sum(row["loss_mask"]) for row in rows)
    is_trained = trained is not None
    state = "trained" if is_trained else head["state"]
    group_state = "trained" if is_trained else head["group_state"] or "no longer in the pool"
    lines: list[RenderableType] = [
        Text.assemble(
            (head["trajectory_uid"], "bold"),
            "  ",
            (state, STATES.get(state, "")),
            f"  reward {_number((archived or {}).get('reward', head['reward']))}",
            ("" if trained or not head["reason"] else f"  {head['reason']}", "red"),
        ),
        Text(
            f"group {head['prompt_uid']} ({group_state}) · "
            f"channel {head['channel']} · "
            f"{len(steps)} {'step' if len(steps) == 1 else 'steps'} · {len(rows)} "
            f"{'branch' if len(rows) == 1 else 'branches'} · {n_masked} tokens "
            f"{'trained' if is_trained else 'in the loss mask'}",
            "dim",
        ),
    ]
    if trained is not None:
        said = [f"trained at optimizer step {trained['step']}"]
        said += [f"{k} {v:+.3f}" for k, v in trained.items() if k != "step" and v is not None]
        lines.append(Text(" · ".join(said), "cyan"))
    if archived is not None:
        lines.append(Text(fate(archived), "red" if archived["drop_reason"] else "cyan"))
        for late in archived["feedback"]:
            told = f"reward {late['reward']:g} came too late: {late['why']}"
            lines.append(Text(told, "yellow"))
    if marks is not None:
        lines.append(Text(safe(f"marks {marks}"), "yellow"))
    if len(rows) > 1:
        lines += ["", *_tree(rows)]
    if tokens is None:
        what = "no tokenizer: messages are shown, and token ids where none were kept"
        lines.append(Text(what, "yellow"))
    for step in steps:
        lines += ["", _step_title(step)]
        both = _texts(step.prompt, tokens), _texts(step.response, tokens)
        if tokens is None and step.messages:
            *before, reply = map(_said, step.messages)
            both = iter("\n".join(before)), iter([reply])
        lines += _block(both[0], MASKED, ("dim",))
        lines += _block(
            both[1],
            TRAINED if step.trained else MASKED,
            SHADES if step.trained else ("dim",),
        )
    return Group(*lines)


class _StepView(NamedTuple):
    """Content that a step adds to the branch in which it is first."""

    step_index: int
    parent: int | None
    version: int
    finish_reason: str | None
    reward: float | None
    trained: bool
    n_prompt: int
    """Tokens of the whole prompt."""
    prompt: Sequence[int]
    """Tokens of the prompt that follow those of the step before."""
    response: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    """Messages of both, if they were kept."""


def _steps(rows: Sequence[Row]) -> list[_StepView]:
    """Each step once, by branch."""
    found: dict[int, _StepView] = {}
    for row in rows:
        ids, before = row["input_ids"], None
        for step in row["steps"]:
            start, end = step["response_start"], step["response_end"]
            if step["step_index"] not in found:
                found[step["step_index"]] = _StepView(
                    step_index=step["step_index"],
                    parent=before,
                    version=step["policy_version"],
                    finish_reason=step["finish_reason"],
                    reward=step["reward"],
                    trained=any(row["loss_mask"][start:end]),
                    n_prompt=start,
                    prompt=ids[step["prompt_start"] : start],
                    response=ids[start:end],
                    messages=_messages(loads(step["metadata"]).get("messages")),
                )
            before = step["step_index"]
    return list(found.values())


def _messages(kept: Any) -> Sequence[Mapping[str, Any]]:
    """The messages of a step; none of what an agent submitted in another form."""
    is_list = isinstance(kept, list) and all(isinstance(each, dict) for each in kept)
    return kept if is_list else ()


def _said(message: Mapping[str, Any]) -> str:
    """A message as a line or some: who says what, and calls which tools."""
    content, calls = message.get("content"), message.get("tool_calls")
    said = [str(message.get("role"))]
    said += [each if isinstance(each, str) else shown(each) for each in (content, calls) if each]
    return ": ".join(said)


def _step_title(step: _StepView) -> Rule:
    said = [f"step {step.step_index}", f"version {step.version}"]
    new = f" ({len(step.prompt)} new)" if step.parent is not None else ""
    said += [f"prompt {step.n_prompt}{new}", f"response {len(step.response)}"]
    said += [step.finish_reason or "unfinished"]
    if step.reward is not None:
        said.append(f"reward {step.reward:g}")
    return Rule(Text(" · ".join(said), "bold"), align="left", style="dim")


def _tree(rows: Sequence[Row]) -> Iterator[Text]:
    """A line per branch, which begins below the step that it branches off, and why."""
    drawn: dict[int, int] = {}
    for row in rows:
        path = [step["step_index"] for step in row["steps"]]
        new = [index for index in path if index not in drawn]
        shared = [index for index in path if index in drawn]
        at = drawn[shared[-1]] if shared else 0
        line = " " * at + ("└─ " if shared else "")
        for index in new:
            drawn[index] = len(line)
            line += f"{index} ─ "
        text = Text(f"  {line.removesuffix(' ─ ')}", no_wrap=True, overflow="ellipsis")
        causes = [_cause(step) for step in row["steps"] if step["step_index"] in new]
        yield text.append("".join(f"  {cause}" for cause in causes if cause), "yellow")


def _cause(step: Mapping[str, Any]) -> str | None:
    """Why it begins a branch, as the gateway said in its metadata."""
    cause = loads(step["metadata"]).get("branch")
    return None if cause is None else safe(str(cause))


def _texts(ids: Iterable[int], tokens: Tokens | None) -> Iterator[str]:
    """The text of each token; of several together where their bytes are one character."""
    held = b""
    for token_id in ids:
        if tokens is None:
            yield f"{token_id} "
            continue
        held += tokens.token_bytes(token_id)
        try:
            text = held.decode()
        except UnicodeDecodeError as e:
            if e.reason == "unexpected end of data" and len(held) - e.start < 4:
                continue
            text = held.decode(errors="replace")
        yield text
        held = b""
    if held:
        yield held.decode(errors="replace")


def _block(texts: Iterable[str], gutter: tuple[str, str], shades: Sequence[str]) -> list[Table]:
    """The tokens with a gutter before each line, so that they can be told without colours."""
    text = Text(overflow="fold")
    for i, token in enumerate(texts):
        lines = "\n".join(map(safe, token.split("\n")))
        text.append(lines, shades[i % len(shades)])
    if not text:
        return []
    block = Table.grid()
    block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for line in text.split("\n"):  # without the empty line behind a last line break
        block.add_row(Text(*gutter), line)
    return [block]


def token_lines(opened: Opened) -> Text:
    """A line per token of each branch: place, mask, id, log-prob, version, text."""
    rows, tokens, *_ = opened
    out = Text()
    for row in rows:
        if len(rows) > 1:
            out.append(f"branch {row['branch']}\n", "bold")
        columns = (row["input_ids"], row["loss_mask"], row["log_probs"], row["versions"])
        for i, (token_id, mask) in enumerate(zip(*columns[:2], strict=True)):
            sampled = row["versions"][i] >= 0
            known = sampled and row["log_probs"] is not None
            log_prob = f"{row['log_probs'][i]:9.4f}" if known else " " * 9
            version = f"v{row['versions'][i]}" if sampled else ""
            text = (
                ""
                if tokens is None
                else repr(tokens.token_bytes(token_id).decode(errors="replace"))
            )
            line = f"{i:>6} {'█' if mask else '·'} {token_id:>7} {log_prob} {version:>5}  {text}\n"
            out.append(line, "green" if mask else "dim")
    out.right_crop(1)
    return out
