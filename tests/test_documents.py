"""README and docs point to things that are there: pages, sections, and what checks each claim."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import stepwell
from benchmarks.__main__ import BENCHES
from stepwell.config.keys import all_keys
from stepwell.config.migration import rows, tables
from stepwell.datapool import selection
from stepwell.datapool.core import channel, limits, readiness, records
from stepwell.datapool.remote import lease_keeper
from stepwell.datapool.selection import built_in
from stepwell.datapool.store import salvage
from stepwell.gateway.endpoints import ENDPOINTS
from stepwell.gateway.pool_access import POOL_FAILURE
from stepwell.gateway.slime_buffer import buffer
from stepwell.trainer import reclaim, sampling
from stepwell.trainer.rollout import worker
from tests.chaos.__main__ import FAULTS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md"}
    | {p for folder in ("docs", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.md")}
)


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """File and section of each link within the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            file, _, section = target.partition("#")
            yield (document.parent / file if file else document), section


def sections(document: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_section(document: Path) -> None:
    for file, section in links(document):
        assert file.exists(), f"{document.name} links to {file}"
        if section:
            assert section in sections(file), f"{document.name} links to {file}#{section}"


def checks() -> list[str]:
    """Paths and commands that the table of claims names as checks."""
    text = (ROOT / "docs/claims.md").read_text()
    table = re.search(r"^\| claim \| checked by \|\n(.*?)^$", text, re.M | re.S)
    assert table is not None
    return re.findall(r"`([^`]+)`", "\n".join(row.split("|")[2] for row in table[1].splitlines()))


def test_what_checks_each_claim_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for check in checks():
        match check.split():
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", makefile, re.M), check
            case ["python", "-m", "benchmarks", name, *_]:
                assert name in BENCHES, check
            case ["python", "-m", "tests.chaos", name, *_]:
                assert name in FAULTS, check
            case ["python", "-m", module, *_]:
                assert list(ROOT.glob(f"{module.replace('.', '/')}*")), check
            case [path]:
                assert (ROOT / path).exists(), check
            case _:
                pytest.fail(f"{check}: nothing that is known here")


CLAIMED = {
    "gateway": ("requests_by_rllm_at_64_of_one_process", "requests_by_rllm_at_64"),
    "pool": ("process_by_bare_both_one_at_a_time",),
}
"""Figures that are told as "n ×", by bench."""


def test_claims_of_speed_are_the_figures_of_the_last_recorded_run() -> None:
    recorded, runs = [], []
    for bench, names in CLAIMED.items():
        run = json.loads((ROOT / f"benchmarks/recorded/{bench}.json").read_bytes())
        told = {name: check["value"] for name, check in run["checks"].items()} | run["figures"]
        recorded += [f"{told[name]:.2f}" for name in names]
        runs.append(f"{bench}, {run['commit']}, {run['date']}")
    rows = {
        "README.md": r"^\| \*\*Fast\*\* .*",
        "benchmarks/README.md": r"^\| (?:gateway, |pool, |\| \d).*",
    }
    for page, row in rows.items():
        told = "\n".join(re.findall(row, (ROOT / page).read_text(), re.M))
        assert re.findall(r"([\d.]+) ×", told) == recorded, page
    for run in runs:
        assert run in told, "benchmarks/README.md names the recorded runs"


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = {file.resolve() for file, _ in links(ROOT / "docs" / "README.md")}
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "README.md"}
    assert pages <= listed


def test_every_reason_of_a_drop_or_an_abort_is_explained() -> None:
    """Reasons that pool, trainer and gateway give groups and trajectories."""
    dropped = {
        *(readiness.DEADLINE, readiness.IDLE, readiness.RETENTION, readiness.TOO_FEW_ROLLOUTS),
        *(limits.MAX_QUEUE_SIZE, limits.MAX_BYTES, records.DELETED, salvage.REASON),
        *(selection.STALE, selection.DOUBTFUL, selection.UNSCORED),
        *(name for name in built_in.FILTERS if name != "scored"),
        *(reclaim.LOST_POLICY, reclaim.AFTER_CHECKPOINT, reclaim.PRODUCER_GONE, reclaim.TRAINED),
        *(lease_keeper.USED, sampling.SURPLUS, worker.INFRASTRUCTURE),
        *(buffer.SKIPPED, buffer.GROUP_SIZE, buffer.UNSCORED, buffer.INVALID, buffer.PICTURES),
    }
    aborted = {
        *(channel.NO_STEPS, channel.GROUP_CLOSED, channel.GROUP_DROPPED, channel.GROUP_SERVED),
        *(worker.TIMEOUT, POOL_FAILURE),
    }
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for reasons, title in ((dropped, "a group dropped"), (aborted, "a trajectory aborted")):
        table = page.split(f"## Why was {title}\n")[1].split("\n## ")[0]
        told = re.findall(r"^\| (.*?) \|", table, re.M)
        assert reasons <= set(re.findall(r"`([^`]+)`", "\n".join(told))), title


# -- code in the pages ----------------------------------------------------------------------------

LANGUAGES = {
    "python": "compiled here, its imports are made; README's and examples' own run in their tests",
    "yaml": "loaded by tests/stepwell/test_documented_configuration.py",
    "js": "docs/agents.md's are run by make test-newcomer, with the packages from npm",
    "bash": "the lines that name stepwell are read there, too; others are the reader's shell",
    "sql": "docs/archive.md's are run by tests/stepwell/test_archive_page.py",
    "": "output, a picture, or lines that test reads",
}
"""Check of a block of code, by its language."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_of_python_compiles_and_its_imports_are_there(document: Path) -> None:
    for language, body in BLOCK.findall(document.read_text()):
        assert language in LANGUAGES
        if language == "python":
            tree = ast.parse(body)
            compile(tree, str(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            for node in ast.walk(tree):
                match node:
                    case ast.Import(names=names):
                        for name in names:
                            importlib.import_module(name.name)
                    case ast.ImportFrom(module=str(module), names=names):
                        found = importlib.import_module(module)
                        assert all(hasattr(found, name.name) for name in names), module
                    case ast.Attribute(value=ast.Name(id="stepwell"), attr=attr):
                        assert hasattr(stepwell, attr), attr


def test_the_reference_pages_are_those_that_the_code_makes() -> None:
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    for path, text in build["reference"]().items():
        assert (ROOT / path).read_text() == text, "make reference"


def test_the_pages_are_staged_from_a_checkout_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "checkout").symlink_to(ROOT)
    build = runpy.run_path(str(tmp_path / "checkout/docs/build.py"))
    build["stage"](tmp_path / "pages")
    assert (tmp_path / "pages/docs/scale.md").read_text() == (ROOT / "docs/scale.md").read_text()


# -- what stands for another framework's ----------------------------------------------------------

MIGRATION = [
    tuple(cells)
    for _, head, cells in tables((ROOT / "docs/migration.md").read_text())
    if head[1:] == ["here", "held by"]
]
"""Rows of the tables that say what stands here for what a document of another framework names."""
KEYS = all_keys()
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join({key.split('.')[0] for key in KEYS})})(?:\.\w+)+")
METHODS = "GET|POST|DELETE"
FROM_OTHERS = {row.name for row in rows()}
"""Options of other frameworks."""
REASON = re.compile(r"not (?:ours|needed)\b.{20,}")
"""The sentence that a row without a test has."""


def code() -> str:
    """All code of the rooms and of the shell."""
    rooms = ("backends", "datapool", "gateway", "stepwell", "trainer", "examples")
    return "\n".join(p.read_text() for room in rooms for p in (ROOT / room).rglob("*.py"))


def endpoints() -> set[str]:
    """Paths that a gateway serves, without what stands for a trajectory's address."""
    return {each.path.removeprefix("/{trajectory_uid}/{prompt_uid}") for each in ENDPOINTS}


def test_every_row_has_tests_that_exist_or_the_reason_why_there_is_none() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for row in MIGRATION:
        if REASON.match(row[2]):
            continue
        tests = re.findall("`([^`]+)`", row[2])
        assert tests, f"{row}: name a test, or say why there is none: 'not ours: …'"
        for test in tests:
            if target := re.fullmatch(r"make ([\w-]+)", test):
                assert re.search(rf"^{target[1]}:", makefile, re.M), row
            else:
                assert re.fullmatch(r"tests/[\w/]+\.py", test), row
                assert (ROOT / test).exists(), row


def test_no_row_is_half_done() -> None:
    assert len(MIGRATION) > 60
    assert not [row for row in MIGRATION if "partly" in " ".join(row)]


def importable(name: str) -> bool:
    """Return true if `package.module:attr`, or the same with dots alone, can be imported."""
    parts = name.replace(":", ".").split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for attr in parts[n:]:
            if not hasattr(found, attr):
                return False
            found = getattr(found, attr)
        return True
    return False


def is_key(name: str) -> bool:
    """Return true if it is a key, a section, or a name within a mapping of the user's."""
    return any(
        fnmatchcase(name, key) or key.startswith(f"{name}.") or name.startswith(f"{key}.")
        for key in KEYS
    )


def unknown(span: str) -> list[str]:
    """Keys and names of ours in a piece of code that do not exist."""
    names = re.findall(r"\bstepwell(?:\.\w+)+(?::\w+)?", span)
    keys = KEY.findall(span)
    return [n for n in names if not importable(n)] + [k for k in keys if not is_key(k)]


def test_every_name_of_ours_in_a_row_exists() -> None:
    words = set(re.findall(r"\w+", code()))
    served = endpoints()
    metrics = (ROOT / "docs/metrics.md").read_text()
    missing = []
    for _, here, _ in MIGRATION:
        for span in re.findall("`([^`]+)`", here):
            missing += unknown(span)
            if path := re.fullmatch(rf"(?:(?:{METHODS}) )?(?:{{base_url}})?(/[\w/{{}}.*-]+)", span):
                missing += [path[1]] * (path[1] not in served)
            if re.fullmatch(r"[a-z_]+(?:/[\w@…{}]+)+", span):  # a figure, as the page spells it
                missing += [span] * (span.partition("…")[0] not in metrics)
            if word := re.fullmatch(r"(?:\w+\.)*([A-Za-z_]\w*)(?:\(.*\))?", span):
                missing += [span] * (word[1] not in words)
    assert not missing


NOT_KEYS = {"rollout.prompt_length", "data.custom_cls", "algorithm.loss.options.margin"}
"""verl's, and a plug-in's own, which pages name beside ours."""
FILES = re.compile(r"[\w.*/-]+\.(?:py|md|json|jsonl|yaml|lock|log|acked|damaged|parquet|png)\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_key_in_a_line_of_prose_exists(document: Path) -> None:
    missing = []
    for span in re.findall("`([^`\n]+)`", BLOCK.sub("", document.read_text())):
        if not span.startswith("actor_rollout_ref."):  # verl's
            missing += [key for key in KEY.findall(FILES.sub("", span)) if not is_key(key)]
    assert set(missing) <= NOT_KEYS | FROM_OTHERS


def test_every_key_in_the_note_of_an_option_exists() -> None:
    spans = [span for row in rows() for span in re.findall("`([^`]+)`", row.note)]
    assert not [name for span in spans for name in unknown(span)]


# -- one step -------------------------------------------------------------------------------------

ONE_STEP = ROOT / "docs/design/one-step.md"


def defined(path: Path) -> set[str]:
    """Names that a module defines: functions, constants, classes, and of those their methods and
    fields."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found |= {f"{node.name}.{name}", name}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found |= {f"{node.name}.{name}", name}
    return found


def rows_of(page: Path) -> Iterator[tuple[Path, list[str]]]:
    """File and names of each row of the page's tables."""
    for row in re.findall(r"^\| .*`[\w/]+\.py` \|.*$", page.read_text(), re.M):
        file, *_ = re.findall(r"`([\w/]+\.py)`", row)
        cells = row.strip("| ").split(" | ")
        cell = cells[0] if cells[0].startswith("`") else cells[-1]
        yield ROOT / file, re.findall(r"`([\w.]+)`", cell)


def test_one_step_walks_through_at_most_nineteen_files_and_four_shapes() -> None:
    rows = [*rows_of(ONE_STEP)]
    shapes = [names for _, names in rows[:4]]
    walked = [path for path, _ in rows[4:]]
    assert len(shapes) == 4
    assert len(walked) == len(set(walked)) == 19
    assert {path for path, _ in rows[:4]} <= set(walked)


@pytest.mark.parametrize("page", ["docs/design/one-step.md", "docs/architecture.md"])
def test_every_file_that_a_walk_through_names_exists(page: str) -> None:
    for file in re.findall(r"`(\w+/[\w/]+\.py|[\w/]+/)`", (ROOT / page).read_text()):
        assert (ROOT / file).exists(), file


def test_every_name_of_one_step_exists() -> None:
    text = ONE_STEP.read_text()
    for path, names in rows_of(ONE_STEP):
        assert names, path
        assert set(names) <= defined(path), path
    files = {ROOT / file for file in re.findall(r"`([\w/]+\.py)`", text)}
    files |= set((ROOT / "gateway/dialects").glob("*.py")) | {
        ROOT / "gateway/errors.py",
        ROOT / "datapool/errors.py",
    }
    known = set().union(*map(defined, files))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    words = {"unstored", "prox_log_probs"}  # a state and a column: no definitions
    for name in set(re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", prose)) - words:
        assert name in known, name
