"""NVML's answers as plain data, and as cards and pairs.

`ask_nvml` calls pynvml (package nvidia-ml-py, optional, loaded here only) and keeps what it says as dictionaries, so
that a recording can hold them. A call that fails becomes an `Unreadable` with NVML's own word for it. A call that ends
the process is survived by asking in a child: see `child.read_nvml`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from shardwise.facts.machine.record import GpuCard, NvLink, P2pStatus, PathType, Reading, Unreadable

T = TypeVar("T")
_NUM_LINKS = 18
_FIELD_SPEED, _FIELD_TX, _FIELD_RX = 90, 138, 139
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, ..._THROUGHPUT_DATA_TX, ..._THROUGHPUT_DATA_RX (KiB)."""
_FIELD_LINK_SPEED = 164
"""NVML_FI_DEV_NVLINK_GET_SPEED, of one link (the scope), MB/s; newer drivers answer this one only."""
_ALL_LINKS = 0xFFFFFFFF
_LINK_ERRORS = {"replay": 0, "recovery": 1, "crc_flit": 2}
_SWITCH = 2
_NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVML_NVLINK_VERSION_*: codes for 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0, not generations."""
_NOT_SUPPORTED = ("NotSupported", "FunctionNotFound")
_FABRIC_STATES = {0: None, 1: "not_started", 2: "in_progress", 3: "completed"}
_SLOWDOWNS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal (software)", 0x40: "thermal (hardware)",
              0x80: "power brake"}  # fmt: skip
_ANCESTORS = {
    0: PathType.SELF,
    10: PathType.PIX,
    20: PathType.PXB,
    30: PathType.PHB,
    40: PathType.NODE,
    50: PathType.SYS,
}


def ask_nvml(module: Any = None) -> Reading[dict[str, Any]]:
    """Asks the driver about every card and every pair.

    Args:
        module: pynvml, or something that answers like it; imported if None.

    Returns:
        `{"driver": str, "gpus": [...], "pairs": [...]}`, or why NVML cannot be asked.
    """

    def ask(nvml: Any) -> Reading[dict[str, Any]]:
        count = int(nvml.nvmlDeviceGetCount())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return {
            "driver": _ask(nvml.nvmlSystemGetDriverVersion),
            "gpus": [_ask_card(nvml, handle) for handle in handles],
            "pairs": [_ask_pair(nvml, handles, a, b) for a in range(count) for b in range(a + 1, count)],
        }

    return _with_nvml(module, ask)


def _reason(error: Exception) -> str:
    kind = type(error).__name__.removeprefix("NVMLError_")
    return f"{kind}: {error}" if kind != type(error).__name__ else str(error) or kind


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer as text or number, or an `Unreadable`. NVML raises one class per error, all below Exception."""
    try:
        answer = call(*arguments)
    except Exception as error:
        return Unreadable(why=f"NVML {getattr(call, '__name__', 'call')}: {_reason(error)}", command="nvidia-smi -q")
    return answer.decode() if isinstance(answer, bytes) else answer


def _ask_card(module: Any, handle: Any) -> dict[str, Any]:
    pci = _ask(module.nvmlDeviceGetPciInfo, handle)
    memory = _ask(module.nvmlDeviceGetMemoryInfo, handle)
    bar1 = _ask(module.nvmlDeviceGetBAR1MemoryInfo, handle)
    reasons = getattr(module, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or module.nvmlDeviceGetCurrentClocksThrottleReasons
    processes = _ask(module.nvmlDeviceGetComputeRunningProcesses, handle)
    capability = _ask(module.nvmlDeviceGetCudaComputeCapability, handle)
    return {
        "address": pci if isinstance(pci, Unreadable) else _address(pci.busId),
        "name": _ask(module.nvmlDeviceGetName, handle),
        "uuid": _ask(module.nvmlDeviceGetUUID, handle),
        "compute_capability": capability if isinstance(capability, Unreadable) else list(capability),
        "memory_bytes": memory if isinstance(memory, Unreadable) else int(memory.total),
        "bar1_bytes": bar1 if isinstance(bar1, Unreadable) else int(bar1.bar1Total),
        "pcie_gen": _ask(module.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_gen_max": _ask(module.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_gen_card": _ask(module.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle),
        "pcie_width": _ask(module.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_width_max": _ask(module.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "pcie_replays": _ask(module.nvmlDeviceGetPcieReplayCounter, handle),
        "nvlinks": _ask_links(module, handle),
        "nvlink_traffic_bytes": _ask_traffic(module, handle),
        "fabric": _ask_fabric(module, handle),
        "slowdowns": _ask(reasons, handle),
        "processes": processes if isinstance(processes, Unreadable) else [int(found.pid) for found in processes],
    }


def _ask_links(module: Any, handle: Any) -> Any:
    """Every link of the card; an empty list where NVML says that the card has none."""
    links: list[dict[str, Any]] = []
    common = _field(module, handle, _FIELD_SPEED)
    for index in range(_NUM_LINKS):
        state = _ask(module.nvmlDeviceGetNvLinkState, handle, index)
        if isinstance(state, Unreadable):
            absent = any(word in state.why for word in (*_NOT_SUPPORTED, "InvalidArgument"))
            if absent or links:
                break
            return state
        remote = _ask(module.nvmlDeviceGetNvLinkRemotePciInfo, handle, index)
        kind = _ask(module.nvmlDeviceGetNvLinkRemoteDeviceType, handle, index)
        speed = _field(module, handle, _FIELD_LINK_SPEED, index) if isinstance(common, Unreadable) else common
        errors = {name: _ask(module.nvmlDeviceGetNvLinkErrorCounter, handle, index, code)
                  for name, code in _LINK_ERRORS.items()}  # fmt: skip
        links.append({
            "active": bool(state),
            "remote": remote if isinstance(remote, Unreadable) else _address(remote.busId),
            "remote_is_switch": kind if isinstance(kind, Unreadable) else int(kind) == _SWITCH,
            "version": _ask(module.nvmlDeviceGetNvLinkVersion, handle, index),
            "speed_bytes_per_s": speed if isinstance(speed, Unreadable) else speed * 1_000_000.0,
            "errors": {name: value for name, value in errors.items() if isinstance(value, int)},
        })  # fmt: skip
    return links


def _field(module: Any, handle: Any, field_id: int, scope: int | None = None) -> Any:
    wanted = field_id if scope is None else (field_id, scope)
    values = _ask(module.nvmlDeviceGetFieldValues, handle, [wanted])
    if isinstance(values, Unreadable):
        return values
    if values[0].nvmlReturn != 0:
        return Unreadable(why=f"NVML field {field_id}: code {values[0].nvmlReturn}", command="nvidia-smi nvlink -s")
    # A union: the narrow counters are unsigned int, the wide ones unsigned long long; both read right as the wide one.
    return int(values[0].value.ullVal)


def _ask_traffic(module: Any, handle: Any) -> Any:
    parts = [_field(module, handle, field_id, _ALL_LINKS) for field_id in (_FIELD_TX, _FIELD_RX)]
    bad = next((part for part in parts if isinstance(part, Unreadable)), None)
    return bad if bad is not None else sum(parts) * 1024


def _ask_fabric(module: Any, handle: Any) -> Any:
    struct = getattr(module, "c_nvmlGpuFabricInfoV_t", None) or getattr(module, "c_nvmlGpuFabricInfo_v2_t", None)
    if struct is None or not hasattr(module, "nvmlDeviceGetGpuFabricInfoV"):
        return Unreadable(why="NVML fabric: this pynvml is too old", command="nvidia-smi -q | grep -A3 Fabric")
    info = struct()
    # pynvml hands this argument to the library as it is: the struct itself instead of its address ends the process.
    address = ctypes.byref(info) if isinstance(info, ctypes.Structure) else info
    answer = _ask(module.nvmlDeviceGetGpuFabricInfoV, handle, address)
    if isinstance(answer, Unreadable):
        return {"state": 0, "status": 0} if any(word in answer.why for word in _NOT_SUPPORTED) else answer
    return {"state": int(info.state), "status": int(info.status)}


def _ask_pair(module: Any, handles: list[Any], a: int, b: int) -> dict[str, Any]:
    ab, ba = (handles[a], handles[b]), (handles[b], handles[a])
    return {
        "a": a,
        "b": b,
        "ancestor": _ask(module.nvmlDeviceGetTopologyCommonAncestor, *ab),
        "read": [_ask(module.nvmlDeviceGetP2PStatus, *pair, 0) for pair in (ab, ba)],
        "write": [_ask(module.nvmlDeviceGetP2PStatus, *pair, 1) for pair in (ab, ba)],
        "nvlink": _ask(module.nvmlDeviceGetP2PStatus, *ab, 2),
    }


def _address(bus_id: Any) -> str:
    """`0000:41:00.0` from NVML's `00000000:41:00.0`."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).strip().lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}" if rest else text


def nvml_card(index: int, data: Mapping[str, Any]) -> GpuCard:
    """A card from `ask_nvml`'s answer."""

    def get(name: str) -> Any:
        value = data.get(name)
        return Unreadable(why=f"NVML: {name} was not asked", command="nvidia-smi -q") if value is None else value

    fabric, slowdowns, capability, links = get("fabric"), get("slowdowns"), get("compute_capability"), get("nvlinks")
    processes = get("processes")
    return GpuCard(
        index=index,
        address=str(data["address"]),
        name=str(data["name"]),
        uuid=get("uuid"),
        compute_capability=capability if isinstance(capability, Unreadable) else (capability[0], capability[1]),
        memory_bytes=get("memory_bytes"),
        bar1_bytes=get("bar1_bytes"),
        pcie_gen=get("pcie_gen"),
        pcie_gen_max=get("pcie_gen_max"),
        pcie_gen_card=get("pcie_gen_card"),
        pcie_width=get("pcie_width"),
        pcie_width_max=get("pcie_width_max"),
        pcie_replays=get("pcie_replays"),
        nvlinks=links if isinstance(links, Unreadable) else tuple(_link(i, link) for i, link in enumerate(links)),
        nvlink_traffic_bytes=get("nvlink_traffic_bytes"),
        fabric_state=fabric if isinstance(fabric, Unreadable) else _FABRIC_STATES.get(fabric["state"], "unknown"),
        fabric_status=fabric if isinstance(fabric, Unreadable) else fabric["status"] if fabric["state"] else None,
        slowdown_reasons=slowdowns if isinstance(slowdowns, Unreadable) else slowdown_names(int(slowdowns)),
        processes=processes if isinstance(processes, Unreadable) else tuple(processes),
    )


def slowdown_names(mask: int) -> tuple[str, ...]:
    """The reasons in NVML's bit mask that hold clocks down for the hardware's sake."""
    return tuple(name for bit, name in _SLOWDOWNS.items() if mask & bit)


def _link(index: int, data: Mapping[str, Any]) -> NvLink:
    return NvLink(
        index=index,
        active=bool(data["active"]),
        remote=data["remote"],
        remote_is_switch=data["remote_is_switch"],
        generation=_generation(data["version"]),
        speed_bytes_per_s=data["speed_bytes_per_s"],
        errors=cast("dict[str, int]", data.get("errors", {})),
    )


def _generation(code: Any) -> Reading[int]:
    if isinstance(code, Unreadable):
        return code
    return _NVLINK_GENERATIONS.get(int(code), Unreadable(why=f"NVML: unknown NVLink version {code}"))


def ancestor_path(code: Any) -> Reading[PathType]:
    """NVML's topology level as a path type."""
    if isinstance(code, Unreadable):
        return code
    path = _ANCESTORS.get(int(code))
    return (
        Unreadable(why=f"NVML: unknown topology level {code}", command="nvidia-smi topo -m") if path is None else path
    )


def both_ways(statuses: Any) -> Reading[P2pStatus]:
    """The worse of two directions' answers; OK only if both are."""
    answers = cast("list[Any]", statuses)
    bad = next((answer for answer in answers if isinstance(answer, Unreadable)), None)
    if bad is not None:
        return bad
    numbers = [int(answer) if 0 <= int(answer) <= P2pStatus.UNKNOWN else int(P2pStatus.UNKNOWN) for answer in answers]
    return P2pStatus(max(numbers))


@dataclass(frozen=True, kw_only=True)
class LinkSample:
    """The link and the clocks of one card at one moment."""

    generation: int
    width: int
    slowdowns: tuple[str, ...]


def read_nvlink_traffic(module: Any = None) -> Reading[tuple[int, ...]]:
    """NVLink bytes moved by each card since the driver was loaded; for a difference over a measurement."""

    def ask(nvml: Any) -> Reading[tuple[int, ...]]:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        counts = [_ask_traffic(nvml, handle) for handle in handles]
        bad = next((count for count in counts if isinstance(count, Unreadable)), None)
        return bad if bad is not None else tuple(counts)

    return _with_nvml(module, ask)


def sample_link(index: int, module: Any = None) -> Reading[LinkSample]:
    """Generation and width of a card's PCIe link, and what holds its clocks down, right now."""

    def ask(nvml: Any) -> Reading[LinkSample]:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = _ask(reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return LinkSample(
            generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            width=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            slowdowns=() if isinstance(mask, Unreadable) else slowdown_names(int(mask)),
        )

    return _with_nvml(module, ask)


def _with_nvml(module: Any, ask: Callable[[Any], Reading[T]]) -> Reading[T]:
    """Opens NVML for one question; whatever goes wrong becomes an `Unreadable`."""
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except ImportError:
            return Unreadable(why="NVML: the package nvidia-ml-py is not installed", command="pip install nvidia-ml-py")
    try:
        module.nvmlInit()
    except Exception as error:
        return Unreadable(why=f"NVML: {_reason(error)}", command="nvidia-smi")
    try:
        return ask(module)
    except Exception as error:
        return Unreadable(why=f"NVML: {_reason(error)}", command="nvidia-smi")
    finally:
        module.nvmlShutdown()
