"""Lines whose meaning is known, at any level, and calls that came back with an error."""

from __future__ import annotations

import re
from typing import cast

from shardwise.doctor.nccl_log.collector import Collector, Origin, WarningKey
from shardwise.doctor.nccl_log.records import LogNotice, LogResult, LogWarning, NoticeKind, Result

_NOTICES: tuple[tuple[NoticeKind, re.Pattern[str]], ...] = tuple(
    (cast("NoticeKind", kind), re.compile(pattern))
    for kind, pattern in (
        ("shm_full", r"failed to extend (?P<file>/dev/shm/\S+) to (?P<bytes>\d+) bytes|"
                     r"posix_fallocate failed : No space left|/dev/shm.*No space left on device"),
        ("verbs_missing", r"Failed to open libibverbs\.so"),
        ("verbs_open_failed", r"(?:Call to )?ibv_open_device failed|ibv_get_device_list failed|No verbs"),
        ("memlock", r"ibv_(?:reg|create)\w+ failed.*Cannot allocate memory|ibv_reg_mr\w* failed with error Cannot"),
        ("p2p_refused_nvlink", r"P2P is disabled between NVLINK connected GPUs (?P<a>\d+) and (?P<b>\d+)"),
        ("p2p_refused_by_driver", r"P2P is disabled between connected GPUs (?P<a>\d+) and (?P<b>\d+)"),
        ("p2p_refused_by_cuda", r"Could not enable P2P between dev (?P<a>\d+)\(=\w+\) and dev (?P<b>\d+)"),
        ("legacy_ipc_unsupported", r"Legacy IPC not supported"),
        ("cumem_host_fallback", r"cuMem host allocations do not appear to be working"),
        ("gdr_disabled_for_hca", r"GPU Direct RDMA Disabled for HCA (?P<index>\d+)(?: '(?P<name>[^']*)')?"),
        ("gdr_disabled", r"GPU Direct RDMA Disabled for (?P<pair>GPU.*?)(?:\(?distance (?P<distance>\d+) > )"),
        ("gdr_enabled", r"GPU Direct RDMA Enabled for "),
        ("dmabuf_available", r"DMA-BUF is available on GPU device (?P<device>-?\d+)"),
        ("ib_completion_timeout", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>12)\b"),
        ("ib_completion_protection", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>4)\b"),
        ("ib_completion_error", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>\d+)"),
        ("ib_qp_timeout", r"ibv_modify_qp failed with (?:error )?(?P<error>.*?)(?:,|$)"),
        ("ib_setup_failed", r"Call to (?P<call>ibv_(?:create|alloc|reg|modify|open)\w*) failed"),
        ("ib_async_event", r"NET/IB ?: (?:(?P<device>[^\s:]+):\d+ )?(?:Got async (?:error )?event|async fatal event)"
                           r"(?: on \w+ \(\w+\))?\s*:?\s*(?P<event>.*)"),
        ("fabric_not_ready", r"system not yet initialized|system driver mismatch|fabric state"),
        ("no_route", r"No route to host|(?:Network|Host) is unreachable|Cannot assign requested address"),
        ("connection_refused", r"[Cc]onnection refused"),
        ("no_socket_interface", r"no socket interface found|No interface found"),
        ("connection_timeout", r"(?:[Cc]onnect\w*|[Ss]ocket\w*|polling|recv).*(?:timed out|Connection timed out)"),
        ("connection_closed", r"[Cc]onnection closed by remote peer|[Cc]onnection reset by peer|Broken pipe|"
                              r"Software caused connection abort|Net : Connection closed"),
        ("stray_connection", r"socketFinalize\w+: wrong (?:magic|type)"),
        ("iommu_not_passthrough", r'Missing "?iommu=pt"?'),
        ("no_ib_device", r"NET/IB : No device found"),
        ("net_plugin_missing", r"No plugin found|Could not find: ?libnccl-net"),
        ("affinity", r"Setting affinity for GPU (?P<device>\d+) to (?P<mask>[0-9a-fA-F,\-]+)"),
        ("switch_ignored", r"ignoring (?P<name>NCCL_\w+)=(?P<value>\S*)"),
        ("out_of_memory", r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA \w*alloc"),
        ("cuda_failure", r"Cuda failure (?:'|(?P<code>\d+) ')(?P<text>[^']*)"),
        ("knock_on", r"Failed to execute operation \w+ from rank|Error encountered progressing operation|"
                     r"Proxy Call to rank \d+ failed|Socket recv failed while polling|Async operation failed|"
                     r"communicator encountered a fatal error|Call to ibv_get_async_event failed"),
    )
)  # fmt: skip
"""In this order: the first that matches tells the meaning."""
_HINT = re.compile(
    r"/dev/shm|posix_fallocate|ibv|P2P is dis|Could not|Legacy IPC|cuMem host|GPU Direct|DMA-BUF|Got completion|"
    r"Missing|No (?:route|plugin|device|verbs|interface)|onnect|system |fabric state|timed out|affinity for GPU|"
    r"Cuda failure|CUDA|async|Async|no socket|Net :|unreachable|requested address|Broken pipe|wrong |ignoring NCCL|"
    r"Failed to exec|Error enc|Proxy Call|polling|fatal error"
)
_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_RESULTS: tuple[Result, ...] = ("cuda", "system", "internal", "argument", "usage", "remote")


def keep_warning(collector: Collector, text: str, origin: Origin, *, known: bool) -> WarningKey | None:
    """Keeps a warning; an empty one is only a line break in front of the next."""
    if not text.strip():
        return None
    found = LogWarning(
        host=origin.host, origin=origin.source, message=text, calls=1, first_line=collector.num_lines, known=known
    )
    return collector.keep_warning(found, _DIGITS.sub("#", text))


def find_notice(collector: Collector, text: str, origin: Origin) -> bool:
    """Keeps the notice that a line is, if it is one; returns whether it is."""
    if not _HINT.search(text):
        return False
    for kind, pattern in _NOTICES:
        match = pattern.search(text)
        if match is None:
            continue
        if kind in ("cuda_failure", "out_of_memory") and ("nvls" in origin.source or "NVLS" in text):
            kind = "nvls_failure"
        values = tuple((name, value) for name, value in match.groupdict().items() if value is not None)
        collector.keep_notice(LogNotice(kind=kind, host=origin.host, text=text, values=values))
        return True
    return False


def keep_result(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the place at which a call came back with an error."""
    result = _RESULTS[int(match["code"]) - 1]
    collector.keep_result(LogResult(host=origin.host, result=result, where=match["where"]))
