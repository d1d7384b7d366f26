"""Edges: who talks to whom, and over what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from shardwise.doctor.nccl_log.collector import Collector, Origin
from shardwise.doctor.nccl_log.records import Direction, LogEdge, Transport

# The patterns end where their grammar ends, so that text glued behind them is harmless.
_P2P = re.compile(r"P2P/(?P<method>direct pointer|IPC|CUMEM|MNNVL|[A-Za-z_]+)(?P<flags>(?:/read|/CE)*)")
_INDIRECT = re.compile(r"P2P/indirect/(?P<through>\d+)\[(?P<id>[^\]]*)\](?P<flags>(?:/read|/CE)*)")
_SHM = re.compile(r"SHM(?:/(?P<method>(?:direct|CE)(?:/(?:direct|CE))?|[A-Za-z]+))?|(?P<old>direct shared memory)")
_NET = re.compile(
    r"(?P<transport>NET|COLLNET)/(?P<plugin>[^/]+?)/(?P<device>-?\d+)(?:\((?P<proxy>\d+)\))?"
    r"(?P<flags>(?:/GDRDMA(?:\([A-Za-z0-9]+\))?|/Shared)*)"
)


def keep_edge(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps an edge whose transport is known; one that is cut off in the middle says nothing."""
    parsed = _via(match["via"])
    if parsed is None:
        return
    transport, via, parts = parsed
    names = match.groupdict()
    through, proxy, device = parts.get("through"), parts.get("proxy"), parts.get("device")
    collector.keep("edges", LogEdge(
        channel=int(match["channel"]),
        connection=int(match["connection"]) if match["connection"] else None,
        source_rank=int(match["a"]),
        source_id=names.get("a_id") or "",
        target_rank=int(names.get("b") or match["a"]),
        target_id=names.get("b_id") or "",
        transport=transport,
        method=parts.get("method") or ("indirect" if through else ""),
        device=int(device) if device else None,
        proxy_rank=int(proxy) if proxy else None,
        direction=cast("Direction | None", names.get("direction")),
        flags=tuple(flag for flag in (parts.get("flags") or "").split("/") if flag),
        through_rank=int(through) if through else None,
        host=origin.host,
        via=via,
    ))  # fmt: skip


def _via(text: str) -> tuple[Transport, str, Mapping[str, str | None]] | None:
    """(transport, the text that belongs to it, its parts); None for a transport that is unknown or cut off."""
    if match := _INDIRECT.match(text) or _P2P.match(text):
        return "P2P", match[0], match.groupdict()
    if match := _SHM.match(text):
        return "SHM", match[0], {"method": match["method"] or match["old"]}
    if match := _NET.match(text):
        parts = match.groupdict()
        return cast("Transport", parts["transport"]), match[0], {**parts, "method": parts["plugin"]}
    return None
