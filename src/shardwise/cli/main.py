"""`shardwise COMMAND ...`: finds the command, runs it, and turns errors into one clear message and an exit code.

Exit codes: 0 done, 1 failed, 2 asked for something that cannot be read, 3 nothing fits, 4 differs from the plan,
130 interrupted. Data goes to stdout, words about the run go to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import shardwise
from shardwise.errors import ShardwiseError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, not yet imported."""

    module: str
    """Has `Options` (a dataclass, see options.py) and `run(options) -> int`."""
    summary: str


COMMANDS: dict[str, Command] = {
    "demo": Command(module="shardwise.cli.demo", summary="the main job from end to end on this machine"),
    "probe": Command(module="shardwise.cli.probe", summary="measure the cards and the wire between them"),
    "plan": Command(module="shardwise.cli.plan", summary="memory and time of every way to split a fine-tune"),
    "wire": Command(module="shardwise.cli.wire", summary="time of a message on a link, and what hides it"),
    "preflight": Command(module="shardwise.cli.preflight", summary="rehearse a run on the real cards: go or no-go"),
    "train": Command(module="shardwise.cli.train", summary="run a plan on this machine's cards, and verify it"),
    "report": Command(module="shardwise.cli.report", summary="draw a run folder or a plan as one page"),
    "data": Command(module="shardwise.cli.data", summary="what the model will see of a data set"),
    "doctor": Command(module="shardwise.cli.doctor", summary="find out why the wire is slow"),
}
"""Only what works is listed. Importing this table imports no command."""

INTERRUPTED = 130
BROKEN_PIPE = 141
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""The machine's faults, not ours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `shardwise`; those of this process if None.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _make_streams_usable()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ShardwiseError as error:
        _say(f"shardwise: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("shardwise: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `shardwise plan ... | head`: the reader has seen enough
        _write_nowhere()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            _report_our_fault(words)
            return 1
        where = f" ({error.filename})" if error.filename else ""
        _say(f"shardwise: {error.strerror}{where}; free some space, or write elsewhere")
        _write_nowhere()
        return 1
    except Exception:
        _report_our_fault(words)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        if len(words) > 1 and words[0] == "help":
            return _dispatch([words[1], "--help"])
        _write(overview())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        _write(f"shardwise {shardwise.__version__}\n")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS, "See: shardwise --help")
    module = importlib.import_module(COMMANDS[name].module)
    before_words = rest[: rest.index("--")] if "--" in rest else rest
    if "--help" in before_words or "-h" in before_words:
        from shardwise.cli.help import command_help
        from shardwise.report.style import Style

        _write(command_help(name, module.Options, Style.of(sys.stdout).width))
        return 0
    from shardwise.cli.options import parse

    run = cast("Callable[[Any], int]", module.run)
    return run(parse(module.Options, rest))


def overview() -> str:
    """What `shardwise --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: shardwise COMMAND [--help] ...",
        "",
        "Measures the cards and the wire, plans how to split a fine-tune, runs it,",
        "and lays prediction beside measurement.",
        "",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "Try: shardwise plan qwen2.5-7b --gpus 2xrtx-5090",
    ]
    return "\n".join(lines) + "\n"


def _write(text: str) -> None:
    sys.stdout.write(text)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind stderr must not change the exit code
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _make_streams_usable() -> None:
    """A closed stream (`>&-`) swallows what is written; a stream of few letters escapes those it has not."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _write_nowhere() -> None:
    """What is left in stdout's buffer goes nowhere, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_our_fault(words: list[str]) -> None:
    import platform
    import shlex
    import traceback

    traceback.print_exc()
    _say(
        "\nshardwise: this is a mistake in shardwise, not in what you did. Please report it to the project's issue "
        f"tracker with the lines above and these:\n  shardwise {shardwise.__version__}, Python "
        f"{platform.python_version()}, {platform.platform()}\n  shardwise {shlex.join(words)}"
    )


if __name__ == "__main__":
    sys.exit(main())
