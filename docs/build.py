"""`python docs/build.py reference`: the reference pages, from the code.
`python docs/build.py site`: the pages as a site, in `build/site` (`make docs`).

The site shows the files of the repository where they lie, so that a link works on both: README, the
pages below `docs/` and the READMEs of examples and benchmarks, with whatever file they link to.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepwell.cli.main import command_parser
from stepwell.config.keys import Key, keys, told_default
from stepwell.datapool.inspect.metrics import POOL
from stepwell.gateway.access import UNDER, is_gemini
from stepwell.gateway.dialects.anthropic_messages import CountParams, MessagesParams
from stepwell.gateway.dialects.gemini import CountParams as GeminiCountParams
from stepwell.gateway.dialects.gemini import GenerateParams
from stepwell.gateway.dialects.openai_chat import ChatParams
from stepwell.gateway.dialects.openai_completions import CompletionsParams
from stepwell.gateway.dialects.openai_responses import ResponsesParams
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.endpoints import ENDPOINTS, SDK_BODIES
from stepwell.gateway.metrics import ENGINES, GATEWAY, POOL_UP
from stepwell.gateway.openapi import described
from stepwell.track.prometheus import TRAINER

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path("docs/reference")
BUILD = ROOT / "build"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "examples", "benchmarks")
"""Files and folders that hold the pages, below ROOT."""
PARAMS: dict[str, type[Params]] = {
    "chat/completions": ChatParams,
    "completions": CompletionsParams,
    "models/{model}:generateContent": GenerateParams,
    "models/{model}:streamGenerateContent": GenerateParams,
    "models/{model}:countTokens": GeminiCountParams,
    "messages": MessagesParams,
    "messages/count_tokens": CountParams,
    "responses": ResponsesParams,
}
"""The fields of LLM calls, by path below `/v1/` or `/v1beta/`."""


CONFIGURATION = """\
# Configuration reference

Made of the code by `make reference`; `stepwell config --keys PATTERN` shows the same. A `*` stands
for a name of yours. How a configuration is written: [configuration](../configuration.md)."""
HTTP = """\
# HTTP reference

Made of the code by `make reference`; a running gateway has it at `/openapi.json`, with the bodies
of LLM calls as the vendors' SDKs type them. `{base_url}`, which is
`http://host:port/{trajectory_uid}/{prompt_uid}`, stands for a trajectory; without it the
call's key, headers or messages do. How an agent uses it: [agents](../agents.md)."""


COMMAND_LINE = """\
# Command line reference

Made of the code by `make reference`; `stepwell COMMAND --help` shows the same, `stepwell --version`
the version. Exit codes: 0 done; 1 it failed; 2 the command line or the configuration is wrong, or
names what is not there, in a line that says how to mend it; 130 interrupted. How to use it:
[runs](../runs.md)."""
PROMETHEUS = """\
# Prometheus reference

Made of the code by `make reference`. The gateway, its engines and the pool are at the gateway's
`/metrics`; with keys it takes an admin key. Each replica tells of its own calls and of the one
pool. The trainer is at a port of its own, `logging.prometheus_port`, below the same host:

```yaml
scrape_configs:
  - job_name: stepwell
    authorization: { credentials_file: runs/NAME/gateway_key } # if the gateway has keys
    static_configs: [{ targets: ["127.0.0.1:8100", "127.0.0.1:8101"] }]
```

SGLang's own metrics are at its own `/metrics` (`engine.extra_args=[--enable-metrics]`)."""


# -- reference -----------------------------------------------------------------------------------


def reference() -> dict[Path, str]:
    """The pages that are made of the code, by their paths."""
    return {
        REFERENCE / "configuration.md": configuration(),
        REFERENCE / "http.md": http(),
        REFERENCE / "prometheus.md": prometheus(),
        REFERENCE / "command-line.md": command_line(),
    }


def configuration() -> str:
    """Every key of the configuration, a table for each part of each section."""
    lines = [CONFIGURATION]
    tables: dict[str, list[Key]] = {}
    for key in keys():
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    for section, found in tables.items():
        level = "##" if "." not in section else "###"
        lines += [
            "",
            f"{level} {section}",
            "",
            "| key | type | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for key in found:
            kinds = f" (kind {', '.join(key.kinds)})" if key.kinds else ""
            cells = (
                f"`{key.name.rpartition('.')[2]}`",
                key.type + kinds,
                told_default(key),
                key.meaning,
            )
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Every command with its arguments."""
    lines = [COMMAND_LINE]
    for name, about, command in _commands(command_parser(), "stepwell"):
        usage = re.sub(r"\s+", " ", command.format_usage().removeprefix("usage: ")).strip()
        lines += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}.", "", f"    {usage}", ""]
        lines += ["| argument | |", "| --- | --- |"]
        for action in command._actions:
            if action.dest != "help":
                value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
                if action.choices:
                    value = ", ".join(map(str, action.choices))
                shown = " ".join(filter(None, (", ".join(action.option_strings), str(value))))
                lines.append(f"| `{_cell(shown)}` | {_cell(action.help or '')} |")
    return "\n".join(lines) + "\n"


def _commands(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Each command that does something, its name and what it does."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice, command in action.choices.items():
                inner = list(_commands(command, f"{name} {choice}"))
                about = command.description or ""
                yield from inner or [(f"{name} {choice}", about, command)]


def prometheus() -> str:
    """Every metric family that Prometheus may read, a table for each part."""
    lines = [PROMETHEUS]
    for title, table in (
        ("Gateway", GATEWAY),
        ("Engines", ENGINES),
        ("Pool", (POOL_UP, *POOL)),
        ("Trainer", TRAINER),
    ):
        lines += ["", f"## {title}", "", "| metric | type | labels | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for family in table:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            cells = (f"`{family.exposed}`", family.kind, labels, family.help)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def http() -> str:
    """Every route of the gateway with the fields of its body."""
    document = described(ENDPOINTS, SDK_BODIES)
    schemas = document["components"]["schemas"]
    lines = [HTTP]
    paths = document["paths"]
    for path in sorted(paths, key=lambda path: path.removeprefix(UNDER)):
        below = path.removeprefix(UNDER)
        if path != below and f"/v1{below}" in paths:
            continue  # told with the other
        if is_gemini(path) and not path.startswith("/v1beta/"):
            continue  # told with the other
        both = f"{UNDER}{path.removeprefix('/v1')}" in paths
        shown = path.replace(UNDER, "{base_url}/v1")
        where = f"`{shown}`, `{{base_url}}{path}`" if both else f"`{shown}`"
        for method, operation in paths[path].items():
            lines += ["", f"## {method.upper()} {shown}", ""]
            below_v1 = ", and the same below `/v1`" * is_gemini(path)
            lines += [f"{where}{below_v1}.", ""] if both else []
            name = path.removeprefix("/v1/").removeprefix("/v1beta/")
            params = PARAMS.get(name) if method == "post" else None
            lines += (
                _call(params) if params else [_sentence(operation), *_fields(operation, schemas)]
            )
    return "\n".join(lines) + "\n"


def _call(params: type[Params]) -> Iterator[str]:
    """Yield the table of fields that an LLM call may have, in its dialect."""
    properties = dict(_flat(params.model_json_schema()))
    neutral = {name: about["const"] for name, about in properties.items() if "const" in about}
    yield from ("| field | type |", "| --- | --- |")
    for name, about in properties.items():
        if name not in neutral:
            yield f"| `{name}` | {_cell(_type(about) + _bounds(about))} |"
    if neutral:
        values = ", ".join(f"`{name}` {json.dumps(value)}" for name, value in neutral.items())
        yield from ("", f"Taken at the value that asks for nothing, refused at others: {values}.")
    if params.ignored:
        yield from (
            "",
            f"Taken, and without effect: {', '.join(f'`{n}`' for n in sorted(params.ignored))}.",
        )
    yield from ("", "Any other field is refused by name.")


def _flat(
    schema: dict[str, Any], definitions: dict[str, Any] | None = None, within: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields by their paths; those of an object that takes no others follow it."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    for name, about in schema["properties"].items():
        yield f"{within}{name}", about
        kind = definitions.get(about.get("$ref", "").rpartition("/")[2], {})
        if kind.get("additionalProperties") is False:
            yield from _flat(kind, definitions, f"{within}{name}.")


MACHINE = 2**31
"""A bound from here on is the machine's: nobody needs to be told."""


def _bounds(schema: dict[str, Any]) -> str:
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    )
    options = [schema, *schema.get("anyOf", ())]
    told = [(sign, o[name]) for o in options for name, sign in signs if name in o]
    found = [f"{sign} {limit:g}" for sign, limit in told if abs(limit) < MACHINE]
    return f", {', '.join(found)}" if found else ""


def _sentence(operation: dict[str, Any]) -> str:
    text = operation.get("description") or operation.get("summary") or ""
    return " ".join(text.split("\n\n")[0].split())


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    for variant in schema.get("anyOf", ()):
        schema = schemas.get(variant.get("$ref", "").rpartition("/")[2], schema)
    properties = schema.get("properties", {})
    if not properties:
        return
    required = schema.get("required", ())
    yield from ("", "| field | type | |", "| --- | --- | --- |")
    for name, about in properties.items():
        known = " ".join(about.get("description", "").split("\n\n")[0].split())
        needed = "required. " if name in required else ""
        cells = (f"`{name}`", _type(about), f"{needed}{known}".strip())
        yield f"| {' | '.join(map(_cell, cells))} |"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "object"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, options)))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


# -- the site ------------------------------------------------------------------------------------


def stage(folder: Path) -> None:
    """The pages, and the files that they link to, where they lie in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    found = [ROOT / name for name in PAGES]
    pages = [p for f in found for p in ([f] if f.is_file() else sorted(f.rglob("*.md")))]
    for page in pages:
        linked = re.findall(r"\]\(([^)\s#]+)", page.read_text())
        files = [page.parent / target for target in linked if "://" not in target]
        for file in (page, *(f for f in files if f.is_file())):
            copy = folder / file.resolve().relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def main() -> None:
    match sys.argv[1:]:
        case ["reference"]:
            for path, text in reference().items():
                (ROOT / path).parent.mkdir(exist_ok=True)
                (ROOT / path).write_text(text)
        case ["site"]:
            stage(BUILD / "pages")
            shutil.copyfile(ROOT / "docs" / "zensical.toml", BUILD / "zensical.toml")
            shutil.copyfile(ROOT / "docs" / "site.css", BUILD / "pages" / "docs" / "site.css")
            tool = Path(sys.executable).with_name("zensical")
            subprocess.run((tool, "build", "--clean", "--strict"), cwd=BUILD, check=True)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
