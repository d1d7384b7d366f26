"""The only place where GB, GiB and milliseconds exist.

Inside the program bytes are `int` and times are `float` seconds. Decimal units (GB = 1e9 bytes) are for data sheets,
bandwidths and headline figures; binary units (GiB = 2**30 bytes) are for memory as drivers and torch report it.
"""

from __future__ import annotations

import math
import re

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
TERA = 10**12
MOST_BYTES = 2**60
MILLISECOND, MICROSECOND = 1e-3, 1e-6
HOUR = 3600.0

_SIZE_UNITS = {
    "": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "k": KB, "m": MB, "g": GB, "t": TB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes from text such as `700MB`, `1.5 GiB` or `4096`.

    Raises:
        ValueError: If the text is not a non-negative size in a known unit, or beyond the limit.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].casefold() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 700MB, 1.5GiB or 4096")
    size = float(match[1]) * _SIZE_UNITS[match[2].casefold()]
    if size > MOST_BYTES:
        raise ValueError(f"{text[:40]!r} is more than the limit of {MOST_BYTES:,} bytes (1 EiB)")
    return round(size)


def format_gb(num_bytes: float, places: int = 1) -> str:
    """Decimal gigabytes, such as `15.2 GB`."""
    return f"{num_bytes / GB:,.{places}f} GB"


def format_bytes(num_bytes: float) -> str:
    """A size in the decimal unit that suits it, such as `3.08 GB` or `612.5 MB`."""
    for unit, name in ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.4g} {name}"
    return f"{num_bytes:,.0f} B"


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it, such as `3.42 ms`, `1.25 s`, `4 min 03 s` or `2 h 05 min`."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    for unit, name in ((MICROSECOND, "us"), (MILLISECOND, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if round(seconds) < 2 * HOUR:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_count(count: float) -> str:
    """A number of parameters or tokens, such as `7.62B`, `135M` or `4,096`."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:,.0f}"


def format_bandwidth(bytes_per_second: float) -> str:
    """A one-way rate, such as `450 GB/s` or `1.25 GB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_number(value: float, digits: int = 4) -> str:
    """A number to so many digits, never with an exponent, such as `1,129`, `30.46` or `0.0123`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_flops(count: float) -> str:
    """A number of floating point operations, such as `29.1 GFLOPs`."""
    for unit, name in ((10**15, "PFLOPs"), (10**12, "TFLOPs"), (10**9, "GFLOPs"), (10**6, "MFLOPs")):
        if abs(count) >= unit:
            return f"{format_number(count / unit, 3)} {name}"
    return f"{count:,.0f} FLOPs"


def format_rate(tokens_per_s: float) -> str:
    """Tokens a second to three digits, such as `34,100`, `5.25` or `0.0123`."""
    if tokens_per_s <= 0:
        return "0"
    digits = 2 - math.floor(math.log10(tokens_per_s))
    return f"{round(tokens_per_s, digits):,.{max(0, digits)}f}"


def format_percent(fraction: float, places: int = 0) -> str:
    """A share, such as `12 %`."""
    return f"{100 * fraction:.{places}f} %"


_NUMBER_AND_UNIT = re.compile(r"(?<=[\d)]) (?=(?:%|[KMGT]?B(?:/s)?|[um]?s|min|h)\b|%)")
GLUE = "\N{NO-BREAK SPACE}"


def glued(text: str) -> str:
    """The text with no-break spaces between numbers and their units, so that a line does not end between them."""
    return _NUMBER_AND_UNIT.sub(GLUE, text)


def some(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun, such as `1 group` or `3 groups`; `nouns` where an s does not do."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
