"""Every line of configuration in README, docs and examples can be loaded as it stands there."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from stepwell.config.keys import keys
from stepwell.config.load import load_config
from stepwell.config.migration import known_as
from stepwell.config.run import RunConfig
from stepwell.trainer.config import episodes_of
from stepwell.trainer.tools import ToolBox

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md"}
    | {p for folder in ("docs", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.md")}
    - {ROOT / "docs" / "migration.md"}  # names of others; tests/stepwell/test_migration.py
)
COMMAND = re.compile(r"stepwell (?:train|gateway|config)\b(.*)")
OVERRIDE = re.compile(r"[a-z_]+(\.\w+)+=\S+")
PLACEHOLDER = re.compile(r"…|[A-Z]+|\{.*….*\}")
"""Placeholder in the docs for a value that the reader fills in."""
PLUGIN = tomllib.loads((ROOT / "examples/plugin/pyproject.toml").read_text())["project"]
REGISTERED = {
    name: path for group in PLUGIN["entry-points"].values() for name, path in group.items()
}
"""Names that the example's package registers when it is installed."""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Fenced and indented code, with its language."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    for line in re.findall(r"^    (?! *[-|]).*$", text, re.M):
        yield "", line


def inline(text: str) -> Iterator[str]:
    """Code within the text, over the end of a line too."""
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text))


def lines_of(document: Path) -> Iterator[tuple[str, list[str]]]:
    """The configuration that each command or list of overrides of a document loads."""
    text = document.read_text()
    for language, body in blocks(text):
        for line in body.replace("\\\n", " ").splitlines():
            code = re.split(r"\s{3,}", line.strip())[0]  # the rest says what the line does
            if found := COMMAND.search(code):
                yield parsed(found[1])
            elif language != "python" and OVERRIDE.match(code):
                yield parsed(code)
    for span in inline(text):
        if found := COMMAND.search(span):
            yield parsed(found[1])
        elif OVERRIDE.match(span.strip("'\"")):
            yield parsed(span)


def parsed(command: str) -> tuple[str, list[str]]:
    words = shlex.split(command, comments=True)
    config = "quickstart"
    overrides = []
    for i, word in enumerate(words):
        if i and words[i - 1] == "--config" and (ROOT / "configs" / f"{word}.yaml").is_file():
            config = word
        elif OVERRIDE.fullmatch(word):
            overrides.append(word)
    return config, overrides


def filled_in(override: str) -> str | None:
    """The override with a value in place of a placeholder; None if it needs none to be valid."""
    key, _, value = override.partition("=")
    value = REGISTERED.get(value, value)
    if not PLACEHOLDER.fullmatch(value):
        return f"{key}={value}"
    types = [k.type for k in keys() if fnmatchcase(key, k.name)]
    assert types, f"{key} is no key"
    return f"{key}=x" if any("text" in t or "path" in t for t in types) else None


CASES = [
    pytest.param(config, overrides, id=f"{document.relative_to(ROOT)}: {' '.join(overrides)}"[:90])
    for document in DOCUMENTS
    for config, overrides in lines_of(document)
    if overrides or config != "quickstart"
]


@pytest.mark.parametrize(("config", "overrides"), CASES)
def test_a_documented_line_loads(
    config: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples/plugin")  # as `pip install` does
    monkeypatch.setenv("STEPWELL_ADMIN_KEY", "k" * 20)
    ours = [o for o in overrides if o.partition(".")[0] in RunConfig.model_fields]
    assert not [o for o in overrides if o not in ours and not known_as(o.partition("=")[0])]
    load_config(config, list(filter(None, map(filled_in, ours))), here=False)


def test_there_are_lines_to_load() -> None:
    assert len(CASES) > 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_yaml_loads(document: Path, tmp_path: Path) -> None:
    for language, body in blocks(document.read_text()):
        values = yaml.safe_load(body) if language in ("yaml", "yml") else None
        if isinstance(values, dict) and set(values) <= {*RunConfig.model_fields, "extends"}:
            path = tmp_path / "documented.yaml"
            if "extends" not in values:
                values["extends"] = "quickstart"
            rollout, data = values.get("rollout") or {}, values.get("data")
            has_episodes = episodes_of(data) is not None
            if has_episodes:
                values["data"] = {"val": None, **data}
            if has_episodes or {"harness", "environment"} & {*rollout}:
                # in place of the quickstart's agent
                own = {"agent": None, "timeout_s": 3600.0, "group_deadline_s": 86_400.0}
                values["rollout"] = own | rollout
            path.write_text(yaml.safe_dump(values))
            load_config(str(path), here=False)


def test_the_documented_files_of_tools_are_read_as_they_stand_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/design/tools.md").read_text()
    ours, of_verl = [body for language, body in blocks(text) if language == "yaml"]
    (tmp_path / "tools.yaml").write_text(ours)
    assert ToolBox.from_yaml(tmp_path / "tools.yaml").names == ["search"]
    (tool,) = yaml.safe_load(of_verl)["tools"]
    assert tool.keys() == {"class_name", "config", "tool_schema"}
