"""Pages of the site that are made from the code, and links that lead out of ``docs/``.

A MkDocs hook. The README is the first page; commands, settings, the Python face and the control API
are read from what is installed, so that the reference cannot differ from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import bridle as face
from bridle.cli import program
from bridle.proxy.control.api import control_api
from bridle.proxy.settings import ProxyConfig
from bridle.run.config import RunConfig
from bridle.run.feed import feed
from bridle.run.settings import field_docs, settings_of

ROOT = Path(__file__).parents[2]
SOURCE = "https://github.com/bridle-rl/bridle/blob/main/"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s]+)(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": _from_root((ROOT / "README.md").read_text(encoding="utf-8")),
        **{
            f"{name.lower()}.md": _from_root((ROOT / f"{name}.md").read_text(encoding="utf-8"))
            for name in ("CHANGELOG", "CONTRIBUTING")
        },
        "examples.md": examples_page(),
        "reference/commands.md": commands_page(),
        "reference/settings.md": settings_page(),
        "reference/python.md": python_page(),
        "reference/control-api.md": control_api_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files outside ``docs/`` to the repository."""
    own = Path(page.file.src_uri).parent

    def led(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        if not target.startswith("../"):
            return found[1]
        path = (ROOT / "docs" / own / target).resolve()
        if path.is_relative_to(ROOT / "docs") or not path.exists():
            return found[1]  # MkDocs judges it
        if path == ROOT / "README.md":
            return f"{'../' * len(own.parts)}index.md{hash_}{anchor}"
        return f"{SOURCE}{path.relative_to(ROOT)}{hash_}{anchor}"

    return _LINK.sub(led, markdown)


def _from_root(markdown: str) -> str:
    """Return a page of the repository's root as one of the site."""

    def led(found: re.Match[str]) -> str:
        if found[1].startswith("docs/"):
            return found[1].removeprefix("docs/")
        name = found[1].partition("#")[0]
        if name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return name.lower()
        return SOURCE + found[1] if (ROOT / name).exists() else found[1]

    return _LINK.sub(led, markdown)


def commands_page() -> str:
    """Every command with its arguments and options."""
    parts = ["# Commands\n\nAs `bridle COMMAND --help` prints them.\n"]
    for name in program.COMMANDS:
        parts += _command(f"bridle {name}", program.loaded(name))
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = [_parameter(each) for each in command.params if not each.hidden]
    if rows:
        yield "| | | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    for below, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {below}", inner)


def _parameter(parameter: Any) -> str:
    options = parameter.opts + parameter.secondary_opts
    argument = parameter.param_type_name == "argument"
    shown = parameter.name.upper() if argument else ", ".join(options)
    default = parameter.default
    if getattr(parameter, "show_default", None) and isinstance(parameter.show_default, str):
        default = parameter.show_default
    known = default not in (None, False, (), []) and not callable(default)
    text = "required" if parameter.required else f"`{_cell(default)}`" if known else ""
    return f"| `{shown}` | {_cell(getattr(parameter, 'help', '') or '')} | {text} |"


def settings_page() -> str:
    """Every setting of a run and of a proxy, by its table in the TOML file."""
    heading = (
        "# Settings\n\nOne TOML file (`--config FILE`), or `--set table.name=value`, of "
        "`bridle train` and `bridle proxy`.\n"
        "[Training](../training.md) and [deploying](../deploy.md) explain them.\n"
    )
    parts = [heading]
    for title, kind in (("run", RunConfig), ("proxy", ProxyConfig)):
        # A table's class may have other defaults than the configuration that it is part of.
        defaults = {one.name: _default(one.default) for one in settings_of(kind)}
        parts += _settings(kind, "", title, defaults)
    return "\n".join(parts)


def _settings(kind: Any, path: str, title: str, defaults: Mapping[str, str]) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=False)
    words = field_docs(kind)
    rows, inner = [], []
    for one in dataclasses.fields(kind):
        name = f"{path}.{one.name}" if path else one.name
        if dataclasses.is_dataclass(hints[one.name]):
            inner.append((hints[one.name], name))
            continue
        rows.append(f"| `{one.name}` | {_cell(words.get(one.name, ''))} | {defaults[name]} |")
    if rows:
        yield f"## {path or title}\n\n{_first(kind)}\n\n| | | default |\n|---|---|---|"
        yield "\n".join(rows) + "\n"
    for nested, name in inner:
        yield from _settings(nested, name, title, defaults)


def _default(value: Any) -> str:
    return "required" if value is dataclasses.MISSING else f"`{_cell(json.dumps(value))}`"


def examples_page() -> str:
    """Return the page of the examples that ``bridle examples`` copies, with their first words."""
    parts = ["# Examples\n\n`bridle examples NAME` copies one into this folder.\n"]
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        _, first, *_ = readme.read_text(encoding="utf-8").split("\n\n")
        folder = readme.parent.relative_to(ROOT)
        parts.append(f"## {readme.parent.name}\n\n{first}\n\n[Files and steps]({SOURCE}{folder})\n")
    return "\n".join(parts)


def python_page() -> str:
    """Return the page of the names that ``import bridle`` gives."""
    parts = ["# Python\n\n`import bridle` gives these names; each is imported at its first use.\n"]
    for name in face.__all__:
        value = getattr(face, name)
        home = getattr(value, "__module__", "")
        parts.append(f"## {name}\n\n`{home}.{name}`\n\n{_signature(name, value)}")
        parts.append(_sphinx_free(inspect.getdoc(value) or "") + "\n")
        if inspect.isclass(value):
            parts += _members(value)
    return "\n".join(parts)


def _members(kind: type) -> Iterator[str]:
    """Yield the fields of a class that have a docstring, and then its public methods."""
    if dataclasses.is_dataclass(kind):
        docs = field_docs(kind)
        rows = [
            f"| `{field.name}` | {_cell(_sphinx_free(docs.get(field.name, '')))} |"
            for field in dataclasses.fields(kind)
        ]
        yield "| field | |\n|---|---|\n" + "\n".join(rows) + "\n"
    for name in vars(kind):
        if not name.startswith("_") and inspect.isroutine(getattr(kind, name)):
            doc = _sphinx_free(inspect.getdoc(getattr(kind, name)) or "")
            yield f"{_signature(name, getattr(kind, name))}{doc}\n"


class _Written(str):
    """An annotation as the source writes it, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(name: str, value: Any) -> str:
    """Return a signature as a block of code, or "" for a value that nobody calls."""
    if getattr(value, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown = [
        one.replace(annotation=_written(one.annotation), default=_default_of(one.default))
        for one in found.parameters.values()
    ]
    text = found.replace(parameters=shown, return_annotation=_written(found.return_annotation))
    awaited = "async " if inspect.iscoroutinefunction(value) else ""
    return f"```python\n{awaited}{name}{text}\n```\n"


def _default_of(value: Any) -> Any:
    """Return a parameter's default with a ``repr`` that a reader can use."""
    if isinstance(value, Enum):
        return _Written(f"{type(value).__name__}.{value.name}")
    made_here = callable(value) and value is not inspect.Parameter.empty
    return _Written("...") if made_here else value


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def control_api_page() -> str:
    """Return the routes under ``/bridle/v1``, from the OpenAPI that the proxy serves."""
    schema = control_api(_no_services, [feed()]).openapi()
    parts = [
        "# Control API\n\nUnder the proxy's address, as `/openapi.json` there describes it. "
        "Routes need the admin key; those of one session also take its verifier key.\n"
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(
                f"## {method.upper()} {path}\n\n{_sphinx_free(route.get('description', ''))}\n"
            )
            parts += _body(route, schema)
    return "\n".join(parts)


def _body(route: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        f"| `{each['name']}` | {each['in']} | {_cell(each.get('description', ''))} |"
        for each in route.get("parameters", ())
    ]
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    for reference in _references(content.get("schema", {})):
        fields = schema["components"]["schemas"][reference].get("properties", {})
        rows += [
            f"| `{name}` | body | {_cell(field.get('description', ''))} |"
            for name, field in fields.items()
        ]
    if rows:
        yield "| | in | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for each in schema.get("anyOf", ()):
        yield from _references(each)


def _no_services() -> Any:
    raise RuntimeError("the reference serves nothing")


def _first(kind: Any) -> str:
    return _sphinx_free((inspect.getdoc(kind) or "").split("\n\n")[0])


def _sphinx_free(text: str) -> str:
    """Return a docstring as Markdown: roles and double backquotes become plain code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _cell(value: object) -> str:
    """Return a value inside a table's cell."""
    text = " ".join(_sphinx_free(str(value)).split())
    return text.replace("|", "\\|").replace("<", "&lt;")


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that a typed line names, and its own words. Raise ``KeyError``."""
    command, rest = program.loaded(words[0]), words[1:]
    while rest and rest[0] in (inner := getattr(command, "commands", {})):
        command, rest = inner[rest[0]], rest[1:]
    return command, rest
