"""What the documentation shows is what the tool prints: blocks of README.md and docs/ that start with a command.

A fenced block of the language `console` whose first line is `$ shardwise plan ...` (or `wire`) holds that command's
output. `scripts/pages` writes all of them anew, and docs/plan.svg with them; `test_pages.py` compares. The planner
needs no card and no clock, so nothing is left out of the comparison.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

from shardwise.cli.main import main

ROOT = Path(__file__).parents[2]
WIDTH = "110"
PICTURE = ("docs/plan.svg", "plan qwen2.5-7b --gpus 2xrtx-5090")
_BLOCK = re.compile(r"(^```console\n\$ (shardwise (?:plan|wire) [^\n]*)\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def page_files() -> list[Path]:
    """The files that may show output."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """The commands whose output a page shows."""
    return [match[2] for match in _BLOCK.finditer(text)]


def written_anew(text: str) -> str:
    """The page with every block as the tool prints it now."""
    return _BLOCK.sub(lambda match: f"{match[1]}{output(match[2])}{match[4]}", text)


def output(command: str) -> str:
    """What a command prints into a pipe of WIDTH columns; `| head -n N` cuts it."""
    line, _, cut = command.partition(" | head -n ")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    calm = {"COLUMNS": WIDTH, "NO_COLOR": "1", "FORCE_COLOR": "0"}
    with mock.patch.dict(os.environ, calm), contextlib.redirect_stdout(printed):
        main(shlex.split(line)[1:])
        printed.flush()
    text = printed.buffer.getvalue().decode()  # type: ignore[union-attr]  # a BytesIO has it
    lines = text.splitlines(keepends=True)
    return "".join(lines[: int(cut)] if cut else lines)


def picture() -> str:
    """The README's picture."""
    with tempfile.TemporaryDirectory() as folder:
        plan, svg = Path(folder) / "plan.yaml", Path(folder) / "plan.svg"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main([*shlex.split(PICTURE[1]), "--out", str(plan)])
            main(["report", "--plan", str(plan), "--svg", str(svg)])
        return svg.read_text(encoding="utf-8")


def write_all() -> None:
    """Write every page anew and name what changed."""
    for path in page_files():
        text = path.read_text(encoding="utf-8")
        anew = written_anew(text)
        if anew != text:
            path.write_text(anew, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    path = ROOT / PICTURE[0]
    drawn = picture()
    if drawn != path.read_text(encoding="utf-8"):
        path.write_text(drawn, encoding="utf-8")
        sys.stdout.write(f"wrote {PICTURE[0]}\n")


if __name__ == "__main__":
    write_all()
