"""NCCL's switches: where they are set, which of them are in force, and what they rule.

[Note: which value is in force]
NCCL reads its environment once, at the first communicator. Conf files only fill in what the environment leaves open:
first $NCCL_CONF_FILE, or ~/.nccl.conf where it is not set, then /etc/nccl.conf. So a rank's own environment wins over
conf files; a rank asked for by its process id wins over an environment file, and both over this shell's. A log wins
over all of them for what it prints, because it says what NCCL took.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml

from shardwise.doctor.nccl_log.records import NcclLog
from shardwise.errors import UsageError, nearest_names
from shardwise.facts.machine.record import Machine, Unreadable

_ASSIGNMENT = re.compile(
    r"""(?<![\w$])(?P<name>[A-Z][A-Z0-9_]{4,})["']?\s*(?:=|:\s)\s*(?P<value>"[^"]*"|'[^']*'|[^\s,;&|]*)"""
)
_SPACED = re.compile(r"^\s*(?:ENV|setenv)\s+(?P<name>[A-Z][A-Z0-9_]{4,})\s+(?P<value>\S+)\s*$")
_YAML_NAME = re.compile(r"""^\s*-?\s*["']?name["']?\s*:\s*["']?(?P<name>[A-Z][A-Z0-9_]{4,})["']?\s*,?\s*$""")
_YAML_VALUE = re.compile(r"""^\s*["']?value["']?\s*:\s*(?P<value>"[^"]*"|'[^']*'|\S+)""")
_YAML_INLINE = re.compile(
    r"""\{\s*["']?name["']?\s*:\s*["']?(?P<name>[A-Z][A-Z0-9_]{4,})["']?\s*,\s*["']?value["']?\s*:\s*"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s,}]+)"""
)
_UNSET = re.compile(r"^\s*(?:unset|unsetenv)\s+(?P<names>[A-Z0-9_ ]+)$")
_NOT_NCCL = ("TORCH_", "RCCL_")
_PREFIX = re.compile(r"^(?:NCCL|NCLL|NCC|CCL|NNCL|NCL|NCCCL)_?")
_MISSPELT_CUTOFF = 0.88
_MAX_ENV_FILE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One variable as one place sets it."""

    name: str
    value: str
    source: str
    """Where: this environment, process 123, a file with its line, the log of a host."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What is known of one of NCCL's variables."""

    name: str
    scope: str
    slows: tuple[str, ...] = ()
    effect: str = ""

    def takes_bandwidth(self, value: str) -> bool:
        """Whether this value is one that slows something down, where the variable rules anything."""
        if "*" in self.slows:
            return value != ""
        return any(_same_number(value, bad) for bad in self.slows)


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Every setting found, and those in force."""

    settings: tuple[Setting, ...] = ()
    """All of them, most telling source first."""
    in_force: Mapping[str, Setting]
    """By name, the one that NCCL would take."""
    unreadable: tuple[tuple[str, Unreadable], ...] = ()
    """Sources that could not be read."""

    def value(self, name: str) -> str:
        """The value in force; empty if the variable is not set."""
        setting = self.in_force.get(name)
        return "" if setting is None else setting.value

    def is_on(self, name: str) -> bool:
        """Whether a yes-or-no variable is 1."""
        return _same_number(self.value(name), "1")


def _same_number(value: str, other: str) -> bool:
    try:
        return int(value, 0) == int(other, 0)
    except ValueError:
        return value == other


@cache
def variables() -> Mapping[str, Variable]:
    """Every variable that NCCL 2.4 to 2.30 is known to read."""
    text = resources.files("shardwise.doctor").joinpath("nccl_variables.yaml").read_text("utf-8")
    data = cast("dict[str, Any]", yaml.safe_load(text))
    found = {
        name: Variable(name=name, scope=entry["scope"], slows=tuple(entry["slows"]), effect=entry["effect"])
        for name, entry in data["suspects"].items()
    }
    for scope, names in data["known"].items():
        found.update({name: Variable(name=name, scope=scope) for name in names})
    return found


def is_nccl_like(name: str) -> bool:
    """Whether a name is NCCL's, or looks like a slip of one."""
    if name.startswith(_NOT_NCCL):
        return False
    return name.startswith("NCCL_") or name in variables() or bool(misspelt(name))


def misspelt(name: str) -> str:
    """The variable that was probably meant; empty for a known name and for one that resembles none."""
    if name in variables() or name.startswith(_NOT_NCCL) or not (_PREFIX.match(name) or "P2P" in name):
        return ""
    best = nearest_names(name, list(variables()), count=1)
    if not best:
        return ""
    ratio = difflib.SequenceMatcher(None, name, best[0]).ratio()
    return best[0] if ratio >= _MISSPELT_CUTOFF else ""


def gather_switches(
    machine: Machine, environment: Mapping[str, str], files: Iterable[Path], log: NcclLog | None
) -> Switches:
    """Collects settings from every place that was given.

    Args:
        machine: Its processes and conf files.
        environment: Of the shell that asks.
        files: Container env files, scripts or YAML files to be read as a rank's environment.
        log: What NCCL said it took.

    Raises:
        UsageError: If an environment file cannot be read.
    """
    layers: list[list[Setting]] = []
    problems: list[tuple[str, Unreadable]] = []
    if log is not None:
        layers.append(
            [Setting(name=s.name, value=s.value, source=f"log of {s.host or 'an unnamed host'}") for s in log.switches]
        )
    for process in machine.processes:
        source = f"process {process.pid}"
        if isinstance(process.environment, Unreadable):
            problems.append((source, process.environment))
        else:
            layers.append(_of_environment(dict(process.environment), source))
    layers.extend(read_environment_file(path) for path in files)
    if not machine.processes:
        layers.append(_of_environment(environment, "this environment"))
    for conf in machine.conf_files:
        if isinstance(conf.settings, Unreadable):
            problems.append((conf.path, conf.settings))
        else:
            layers.append([Setting(name=n, value=v, source=conf.path) for n, v in conf.settings if is_nccl_like(n)])
    settings = [setting for layer in layers for setting in layer]
    in_force: dict[str, Setting] = {}
    for layer in layers:
        # Within one file the last assignment wins; between places the first place does.
        for name, setting in {setting.name: setting for setting in layer}.items():
            in_force.setdefault(name, setting)
    return Switches(settings=tuple(settings), in_force=in_force, unreadable=tuple(problems))


def _of_environment(environment: Mapping[str, str], source: str) -> list[Setting]:
    return [
        Setting(name=name, value=value, source=source)
        for name, value in sorted(environment.items())
        if is_nccl_like(name)
    ]


def read_environment_file(path: Path) -> list[Setting]:
    """Settings in a container env file, shell or batch script, Dockerfile, or YAML environment.

    Values that a shell would compute (`$X`, backquotes) are kept as written.

    Raises:
        UsageError: If the file cannot be read, or is no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_ENV_FILE_BYTES)  # no more: it may be a device, which never ends
    except OSError as error:
        raise UsageError(f"The environment file {str(path)!r} cannot be read: {error.strerror}. Give an env file, a "
                         "script or a YAML file.") from error  # fmt: skip
    if b"\0" in data[:4096]:
        raise UsageError(f"The environment file {str(path)!r} is binary. Give an env file, a script or a YAML file; "
                         "for a running process use its process id.")  # fmt: skip
    return list(_parse_environment(data.decode("utf-8", "replace"), path.name))


def _parse_environment(text: str, name: str) -> Iterator[Setting]:
    found: dict[str, Setting] = {}
    pending = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") and not line.lstrip().startswith(("#SBATCH", "#PBS", "#BSUB")):
            continue
        if match := _UNSET.match(line):
            for gone in match["names"].split():
                found.pop(gone, None)
            continue
        if pending and (match := _YAML_VALUE.match(line)):
            _keep(found, pending, match["value"], f"{name}:{number}")
        named = _YAML_NAME.match(line)
        pending = named["name"] if named else ""
        inline = list(_YAML_INLINE.finditer(line))
        spaced = _SPACED.match(line)
        matches = inline or ([spaced] if spaced else [*_ASSIGNMENT.finditer(line)])
        for match in matches:
            _keep(found, match["name"], match["value"], f"{name}:{number}")
    yield from found.values()


def _keep(found: dict[str, Setting], name: str, value: str, source: str) -> None:
    if is_nccl_like(name):
        found.pop(name, None)
        found[name] = Setting(name=name, value=value.strip().strip("\"'"), source=source)
