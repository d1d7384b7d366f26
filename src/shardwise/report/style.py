"""What the stream that we write to can show: columns, colors, characters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from shardwise.vocabulary.memory import Category

PIPED_WIDTH = 120
"""Columns when nobody says how many: a pipe or a log file has no edge."""
CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip
CATEGORY_COLORS = {
    Category.PARAMETER: "blue",
    Category.GRADIENT: "cyan",
    Category.OPTIMIZER: "magenta",
    Category.ACTIVATION: "yellow",
    Category.TEMPORARY: "green",
    Category.RUNTIME: "dim",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How to write: the default suits a pipe."""

    width: int = PIPED_WIDTH
    color: bool = False
    unicode: bool = True

    @staticmethod
    def of(stream: IO[str], environ: Mapping[str, str] | None = None) -> Style:
        """What a stream can show, by NO_COLOR, FORCE_COLOR, COLUMNS and TERM.

        FORCE_COLOR wins over NO_COLOR, as in most tools that know both.
        """
        env = os.environ if environ is None else environ
        tty = stream.isatty()
        forced = env.get("FORCE_COLOR", "") not in ("", "0")
        color = forced or (tty and not env.get("NO_COLOR") and env.get("TERM") != "dumb")
        columns = env.get("COLUMNS", "")
        if columns.isdigit() and int(columns) > 0:
            width = int(columns)
        else:
            width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if tty else PIPED_WIDTH
        encoding = (getattr(stream, "encoding", None) or "ascii").casefold().replace("-", "")
        return Style(width=width, color=color, unicode=encoding.startswith("utf"))

    def paint(self, text: str, *names: str) -> str:
        """The text in colors, if there are any."""
        if not self.color or not names or not text:
            return text
        return f"\033[{';'.join(CODES[name] for name in names)}m{text}\033[0m"

    def plain(self, text: str) -> str:
        """The text in the characters that the stream has, control characters made visible."""
        clean = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
        if self.unicode:
            return clean
        for rich, poor in (("–", "-"), ("·", "-"), ("×", "x"), ("→", "->"), ("▸", ">"), ("−", "-"), ("…", "...")):
            clean = clean.replace(rich, poor)
        return clean.encode("ascii", "replace").decode("ascii")
