"""What torch's elastic launcher tells a process about restarts."""

from __future__ import annotations

import re
from collections.abc import Mapping


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the ranks have been started again after one was lost; 0 without such a launcher."""
    text = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
