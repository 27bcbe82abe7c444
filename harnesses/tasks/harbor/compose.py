"""The services of a task, read from its ``docker-compose.yaml``.

The agent's container is the service ``main``. The others run beside it and share its loopback
(:mod:`bridle.harnesses.sandboxes.container.services`), so that a session reaches its proxy and its
own services and nothing else. Fields that would open a way out, and fields whose meaning would be
lost, are refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bridle.extras import install_command
from bridle.harnesses.tasks.task import TaskError

MAIN: Final = "main"
FILES: Final = ("docker-compose.yaml", "docker-compose.yml")
_VARIABLE: Final = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_TOP: Final = frozenset({"services", "volumes", "networks", "version", "name"})
_TAKEN: Final = frozenset(
    {
        *("image", "build", "command", "entrypoint", "environment", "healthcheck", "depends_on"),
        *("user", "working_dir", "tmpfs", "init", "stop_signal", "read_only", "shm_size"),
        *("volumes", "networks"),
    }
)
_IGNORED: Final = frozenset(
    {
        *("ports", "expose", "container_name", "hostname", "labels", "logging", "restart"),
        *("stdin_open", "tty", "pull_policy", "stop_grace_period", "platform"),
    }
)
"""Fields without a meaning in a sandbox: nothing is published, and nothing outlives a session."""
_OF_MAIN: Final = frozenset(
    {"image", "build", "command", "environment", "depends_on", "networks", "volumes", *_IGNORED}
)
_IDLE: Final = re.compile(r"sleep |tail -f /dev/null")
"""Commands that only keep a container; a session's container has its own."""
_HARBORS_OWN: Final = "${HOST_"
"""The beginning of the mounts in ``main`` by which Harbor collects logs."""


@dataclass(frozen=True, slots=True)
class Compose:
    """The services of a task besides ``main``, and what the file says of ``main``."""

    image: str | None = None
    """The image of ``main``, if it is not built."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment of ``main``."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The definitions of the others, in the form of a compose file without variables."""
    volumes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """The names by which services find each other."""


def read_compose(
    folder: Path, text: bytes, resolve: Callable[[Mapping[str, str]], Mapping[str, str]]
) -> Compose:
    """Return the services of the compose file ``text`` in the task's ``environment`` folder.

    ``resolve`` replaces variables, as those of ``task.toml``. Raise :class:`TaskError`.
    """
    reader = _Reader(folder, resolve)
    whole = reader.parsed(text)
    reader.require("the file", whole, _TOP)
    services = dict(reader.table("services", whole.get("services")))
    own = reader.table(MAIN, services.pop(MAIN, None) or {})
    reader.require(MAIN, own, _OF_MAIN)
    volumes = reader.table("volumes", whole.get("volumes") or {})
    if options := [name for name, given in volumes.items() if given]:
        raise TaskError(f"{folder}: the volume {options[0]} has options, which are not read")
    joined = {name: reader.networks(one) for name, one in {MAIN: own, **services}.items()}
    if len({frozenset(each) for each in joined.values()}) > 1:
        raise TaskError(
            f"{folder}: its services are on several networks, and one loopback does not keep them "
            "apart; `harbor run` runs it"
        )
    aliases = {alias for each in joined.values() for names in each.values() for alias in names}
    return Compose(
        image=reader.image_of_main(own),
        environment=reader.environment(own.get("environment")),
        services={name: reader.service(name, one, volumes) for name, one in services.items()},
        volumes=tuple(volumes),
        hosts=tuple(sorted({MAIN, *services, *aliases})),
    )


class _Reader:
    """Reads one file."""

    def __init__(
        self, folder: Path, resolve: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        self._folder = folder
        self._resolve = resolve

    def parsed(self, text: bytes) -> dict[str, Any]:
        try:
            yaml = import_module("yaml")
        except ModuleNotFoundError as error:
            raise TaskError(
                f"{self._folder}: to read a compose file, {install_command('compose')}"
            ) from error
        try:
            return self.table("the file", yaml.safe_load(text))
        except (yaml.YAMLError, RecursionError) as error:
            raise TaskError(f"{self._folder}: its compose file cannot be read: {error}") from error

    def require(self, name: str, table: Mapping[str, Any], known: frozenset[str]) -> None:
        """Raise :class:`TaskError` for a field that a sandbox does not give."""
        for given in table:
            if given not in known and not str(given).startswith("x-"):
                raise TaskError(
                    f"{self._folder}: {name} of its services has {given!r}, which no sandbox "
                    "gives; `harbor run` runs it"
                )

    def table(self, name: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise TaskError(f"{self._folder}: {name} is no table")
        return given

    def service(self, name: str, given: Any, volumes: Mapping[str, Any]) -> dict[str, Any]:
        table = self.table(name, given)
        self.require(f"service {name}", table, _TAKEN | _IGNORED)
        plain = ("build", "environment", "volumes", "depends_on", "networks")
        made = {
            field: self._filled(value)
            for field, value in table.items()
            if field in _TAKEN and field not in plain
        }
        if "build" in table:
            made["build"] = str(self._build(name, table["build"]))
            made.pop("image", None)
        elif "image" not in made:
            raise TaskError(f"{self._folder}: service {name} has no image")
        made["environment"] = self.environment(table.get("environment"))
        made["volumes"] = [self._mount(name, one, volumes) for one in table.get("volumes") or ()]
        if needed := self._needs(table.get("depends_on") or {}):
            made["depends_on"] = needed
        return made

    def image_of_main(self, table: dict[str, Any]) -> str | None:
        if "build" in table:
            context = self._build(MAIN, table["build"])
            if context != self._folder.resolve():
                raise TaskError(f"{self._folder}: main is built of {context}, not of this folder")
        command = table.get("command") or ""
        words = command if isinstance(command, str) else " ".join(map(str, command))
        if words and not _IDLE.search(words):
            raise TaskError(f"{self._folder}: main runs {words!r}, and only its agent is run there")
        for mount in table.get("volumes") or ():
            if not str(mount).startswith(_HARBORS_OWN):
                raise TaskError(f"{self._folder}: main mounts {mount}, which a sandbox does not")
        image = table.get("image")
        return None if "build" in table or image is None or "$" in image else str(image)

    def environment(self, given: Any) -> dict[str, str]:
        """Return variables by their names; one without a value is read as one of this machine."""
        pairs: Any = given.items() if isinstance(given, dict) else ()
        if isinstance(given, list):
            split = (str(entry).partition("=") for entry in given)
            pairs = [(name, value if sign else None) for name, sign, value in split]
        return {
            str(name): self._text(f"${{{name}}}" if value is None else _worded(value))
            for name, value in pairs
        }

    def networks(self, table: Any) -> dict[str, tuple[str, ...]]:
        """Return the aliases of a service in each of its networks."""
        given = (table or {}).get("networks") or ["default"]
        named = given if isinstance(given, dict) else dict.fromkeys(given)
        return {name: tuple((one or {}).get("aliases") or ()) for name, one in named.items()}

    def _build(self, name: str, given: Any) -> Path:
        table = {"context": given} if isinstance(given, str) else self.table("build", given)
        self.require(f"the build of {name}", table, frozenset({"context", "dockerfile"}))
        if table.get("dockerfile", "Dockerfile") != "Dockerfile":
            raise TaskError(f"{self._folder}: {name} is built of {table['dockerfile']!r}")
        return self._inside(name, str(table.get("context", ".")))

    def _mount(self, name: str, given: Any, volumes: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mount in the long form: a volume of the task, or files of it, read-only."""
        if isinstance(given, str):
            source, _, rest = self._text(given).rpartition(":")
            if rest in ("ro", "rw", "z", "Z"):
                source, _, rest = source.rpartition(":")
            given = {"source": source, "target": rest}
        table = self.table(f"a volume of {name}", given)
        self.require(
            f"a volume of {name}", table, frozenset({"type", "source", "target", "read_only"})
        )
        source, target = str(table.get("source") or ""), str(table.get("target"))
        if not source:
            return {"type": "volume", "target": target}
        if source in volumes:
            return {"type": "volume", "source": source, "target": target}
        path = str(self._inside(name, source))
        return {"type": "bind", "source": path, "target": target, "read_only": True}

    def _inside(self, name: str, path: str) -> Path:
        found = (self._folder / path).resolve()
        if not found.is_relative_to(self._folder.resolve()) or not found.exists():
            raise TaskError(f"{self._folder}: {name} names {path}, which is no part of the task")
        return found

    def _needs(self, given: Any) -> dict[str, Any]:
        named = given if isinstance(given, dict) else dict.fromkeys(given)
        started = {"condition": "service_started"}
        return {name: one or started for name, one in named.items() if name != MAIN}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._filled(inner) for inner in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        def resolved(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            wanted = match[1] or match[3]
            default = "" if match[2] is None else f":-{match[2]}"
            return self._resolve({wanted: f"${{{wanted}{default}}}"})[wanted]

        return _VARIABLE.sub(resolved, text)


def _worded(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
