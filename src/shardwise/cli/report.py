"""`shardwise report`: a run folder as one page, or a plan as a picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.options import POSITIONAL
from shardwise.errors import UsageError

if TYPE_CHECKING:
    from shardwise.report.folder import RunFolder
    from shardwise.vocabulary.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw what a run left behind as one page, without script, that opens anywhere: report.html in its folder.

    Parts that are missing (a run that was interrupted, a plan that was never run) are named on the page.

    Examples:
      shardwise report runs/latest
      shardwise report runs/latest --text
      shardwise report --plan plan.yaml --svg plan.svg
    """

    folder: str | None = field(default=None, metadata=POSITIONAL)
    """The output_dir of a run."""
    plan: str | None = None
    """A plan file, instead of a folder."""
    out: str | None = None
    """Write the page here instead of FOLDER/report.html."""
    svg: str | None = None
    """Write the plan as one picture to this file, instead of the page."""
    text: bool = False
    """Print the plan and the ledger to the terminal instead of writing a page."""


def run(options: Options) -> int:
    """Write or print, and return 0."""
    if (options.folder is None) == (options.plan is None):
        raise UsageError("name either the folder of a run or a plan with --plan: shardwise report runs/latest")
    found = _read(options)
    if options.svg is not None:
        from shardwise.report.picture import plan_picture

        _write(Path(options.svg), plan_picture(_plan(found)) + "\n")
    if options.text:
        sys.stdout.write(_pages(found))
    elif options.svg is None or options.out is not None:
        from shardwise.report.html import report_page

        _write(_page_path(options), report_page(found))
    return 0


def _read(options: Options) -> RunFolder:
    from shardwise.report.folder import RunFolder, read_folder
    from shardwise.vocabulary import codec
    from shardwise.vocabulary.plan import Plan

    if options.folder is not None:
        return read_folder(Path(options.folder))
    path = Path(options.plan or "")
    return RunFolder(path=path, plan=codec.read_noun(Plan, path))


def _plan(found: RunFolder) -> Plan:
    if found.plan is None:
        raise UsageError(f"{found.path} holds no plan.yaml that could be drawn; " + "; ".join(found.notes))
    return found.plan


def _page_path(options: Options) -> Path:
    if options.out is not None:
        return Path(options.out)
    if options.folder is not None:
        return Path(options.folder) / "report.html"
    raise UsageError("a plan has no folder for its page; say --out FILE.html, --svg FILE.svg or --text")


def _pages(found: RunFolder) -> str:
    from shardwise.report.style import Style
    from shardwise.report.text import ledger_page, plan_page

    style = Style.of(sys.stdout)
    pages = [plan_page(found.plan, style)] if found.plan is not None else []
    pages += [ledger_page(found.ledger, style)] if found.ledger is not None else []
    return "\n".join([*pages, "".join(f"{style.plain(note)}\n" for note in found.notes)])


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}); choose another file") from error
    sys.stderr.write(f"wrote {path}\n")
