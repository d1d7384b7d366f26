"""The two doors to a machine: files below a root directory, and answers of calls that no file holds.

`read_machine` never opens anything else, so a recorded tree (the files it read, and `answers.json` beside them) can be
read again elsewhere: by a test, or by whoever gets the recording with a bug report.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import json
import os
import resource
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shardwise.facts.machine.record import Reading, Unreadable

ANSWERS_FILE = "answers.json"
_PACKAGES = ("torch", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "accelerate", "deepspeed")
_SIOCGIFADDR = 0x8915
_KERNEL_LOG_WORDS = ("AER", "Xid", "IO_PAGE_FAULT", "DMAR", "AMD-Vi", "mlx5", "NVRM", "pcieport")
_MAX_KERNEL_LINES = 2_000
_MAX_COPIED_BYTES = 1 << 20
"""Of one file in a recording; what is larger is a library."""


class Tree:
    """Files below a root; every method answers with a value or an `Unreadable`.

    Args:
        root: `/` for this machine, else the directory of a recording.
        copy_to: Directory into which everything that is read is copied, to make a recording.
    """

    def __init__(self, root: Path, copy_to: Path | None = None) -> None:
        self.root = root
        self._copy_to = copy_to

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str, command: str = "") -> Reading[str]:
        """The stripped text of a file."""
        data = self.data(path, command)
        return data if isinstance(data, Unreadable) else data.decode("utf-8", "replace").strip()

    def data(self, path: str, command: str = "") -> Reading[bytes]:
        """The bytes of a file."""
        try:
            data = self._at(path).read_bytes()
        except OSError as error:
            return _unreadable(path, error, command or f"sudo cat {path}")
        if self._copy_to is not None and len(data) <= _MAX_COPIED_BYTES:
            copy = self._copy_to / path.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        return data

    def names(self, path: str, command: str = "") -> Reading[tuple[str, ...]]:
        """The sorted names in a directory."""
        try:
            names = tuple(sorted(os.listdir(self._at(path))))
        except OSError as error:
            return _unreadable(path, error, command or f"sudo ls {path}")
        if self._copy_to is not None:
            self._copy_names(self._copy_to / path.lstrip("/"), path, names)
        return names

    def _copy_names(self, folder: Path, path: str, names: tuple[str, ...]) -> None:
        """Empty files and folders of the same names; of folders full of libraries only NCCL's."""
        folder.mkdir(parents=True, exist_ok=True)
        kernel = path.startswith(("/sys", "/proc", "/dev"))
        for name in names:
            copy, source = folder / name, self._at(path) / name
            if (kernel or "nccl" in name) and not copy.exists() and not copy.is_symlink():
                copy.mkdir() if source.is_dir() else copy.touch()

    def exists(self, path: str) -> bool:
        """Whether the path exists and may be looked at."""
        try:
            found = self._at(path).exists()
        except OSError:
            return False
        if found and self._copy_to is not None and not self._at(path).is_symlink():  # `link` copies those
            copy = self._copy_to / path.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                copy.mkdir() if self._at(path).is_dir() else copy.touch()
        return found

    def link(self, path: str) -> Reading[str]:
        """Where a symbolic link ends, as a path below the root."""
        source = self._at(path)
        try:
            if not source.exists():
                raise FileNotFoundError(2, "No such file or directory")
            target = Path(os.path.realpath(source))
        except OSError as error:
            return _unreadable(path, error, f"readlink -f {path}")
        root = Path(os.path.realpath(self.root))
        inside = "/" + str(target.relative_to(root)) if target.is_relative_to(root) else str(target)
        if self._copy_to is not None:
            copy = self._copy_to / path.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            end = self._copy_to / inside.lstrip("/")
            end.mkdir(parents=True, exist_ok=True)
            if not copy.is_symlink() and not copy.exists():
                copy.symlink_to(os.path.relpath(end, copy.parent))
        return inside

    def size(self, path: str) -> int:
        """The size of a file; 0 if it cannot be looked at."""
        try:
            return self._at(path).stat().st_size
        except OSError:
            return 0


def _unreadable(path: str, error: OSError, command: str) -> Unreadable:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    why = f"{path}: {'is not there' if missing else error.strerror or error}"
    return Unreadable(why=why, command="" if missing else command)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the kernel, the driver and the package index answer to calls."""

    hostname: str = ""
    user_is_root: bool = False
    home: str = ""
    shm_size_bytes: Reading[int]
    shm_free_bytes: Reading[int]
    memlock_bytes: int | None = None
    open_files: int | None = None
    stack_bytes: int | None = None
    affinity: Reading[frozenset[int]]
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Of network interfaces, in the kernel's order."""
    verbs_library: Reading[bool]
    refused_devices: tuple[str, ...] = ()
    """Device nodes that may not be opened."""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    kernel_log: Reading[tuple[str, ...]]
    nvml: Reading[dict[str, Any]]
    """NVML's answers as plain data; see `nvml.ask_nvml`."""


def live_answers(nvml: Reading[dict[str, Any]]) -> Answers:
    """Asks this machine. Takes no CUDA context and writes nothing."""
    size, free = _shm_space()
    return Answers(
        hostname=socket.gethostname(),
        user_is_root=os.geteuid() == 0,
        home=os.path.expanduser("~"),
        shm_size_bytes=size,
        shm_free_bytes=free,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        stack_bytes=_limit(resource.RLIMIT_STACK),
        affinity=frozenset(os.sched_getaffinity(0)),
        addresses=_addresses(),
        verbs_library=_loads("libibverbs.so.1"),
        refused_devices=_refused_devices(),
        packages=_packages(),
        environment=dict(os.environ),
        kernel_log=_kernel_log(),
        nvml=nvml,
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _shm_space() -> tuple[Reading[int], Reading[int]]:
    try:
        answer = os.statvfs("/dev/shm")
    except OSError as error:
        problem = Unreadable(why=f"/dev/shm: {error.strerror}", command="df /dev/shm")
        return problem, problem
    return answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize


def _addresses() -> dict[str, tuple[str, ...]]:
    """IPv4 by ioctl, IPv6 from /proc: the two that NCCL considers."""
    found: dict[str, tuple[str, ...]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                found[name] = ()
            else:
                found[name] = (socket.inet_ntoa(answer[20:24]),)
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        address, *_, name = line.split()
        text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        found[name] = (*found.get(name, ()), text)
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _refused_devices() -> tuple[str, ...]:
    folder = Path("/dev/infiniband")
    nodes = sorted(folder.glob("uverbs*")) if folder.is_dir() else []
    return tuple(str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK))


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _kernel_log() -> Reading[tuple[str, ...]]:
    """The lines that matter; needs `kernel.dmesg_restrict=0` or root."""
    lines: list[str] = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return Unreadable(why=f"/dev/kmsg: {error.strerror}", command="sudo dmesg | grep -E 'AER|Xid|IO_PAGE_FAULT'")
    try:
        while len(lines) < _MAX_KERNEL_LINES:
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the ring overtook us; the next read continues after the gap
                continue
            if not record:
                break
            text = record.decode("utf-8", "replace").partition(";")[2].strip()
            if any(word in text for word in _KERNEL_LOG_WORDS):
                lines.append(text)
    except OSError as error:
        return Unreadable(why=f"/dev/kmsg: {error.strerror}", command="sudo dmesg | grep -E 'AER|Xid|IO_PAGE_FAULT'")
    finally:
        os.close(handle)
    return tuple(lines)


def read_answers(path: Path) -> Answers:
    """Reads the answers of a recording.

    Raises:
        ValueError: If the file is no recording.
    """
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a recording of a machine")
    values = cast("dict[str, Any]", data)
    known: dict[str, Any] = {name: from_plain(value) for name, value in values.items()}
    for name in ("affinity",):
        if isinstance(known.get(name), list):
            known[name] = frozenset(known[name])
    for name in ("refused_devices", "kernel_log"):
        if isinstance(known.get(name), list):
            known[name] = tuple(known[name])
    known["addresses"] = {name: tuple(found) for name, found in known.get("addresses", {}).items()}
    return Answers(**known)


def write_answers(answers: Answers, path: Path) -> None:
    """Writes a recording's answers. The environment is cut down to what NCCL and launchers read."""
    plain = {name: to_plain(getattr(answers, name)) for name in answers.__dataclass_fields__}
    kept = ("NCCL_", "TORCH_NCCL_", "SLURM_", "OMPI_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"}
    plain["environment"] = {
        name: value for name, value in answers.environment.items() if name.startswith(kept) or name in names
    }
    path.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")


def to_plain(value: Any) -> Any:
    """Plain data for JSON; an `Unreadable` becomes a table that `from_plain` knows."""
    if isinstance(value, Unreadable):
        return {"unreadable": value.why, "command": value.command}
    if isinstance(value, frozenset | tuple | list):
        items = cast("frozenset[Any] | tuple[Any, ...] | list[Any]", value)
        return sorted(items) if isinstance(items, frozenset) else [to_plain(item) for item in items]
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in cast("Mapping[str, Any]", value).items()}
    return value


def from_plain(value: Any) -> Any:
    """The way back from `to_plain`; sets and tuples stay lists."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        if "unreadable" in table:
            return Unreadable(why=str(table["unreadable"]), command=str(table.get("command", "")))
        return {name: from_plain(item) for name, item in table.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in cast("list[Any]", value)]
    return value
