from __future__ import annotations

import os
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.errors import DoesNotFitError, PlanMismatchError, ShardwiseError


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command for tests."""

    fail: str | None = None
    """With what."""


def run(options: Options) -> int:
    failures: dict[str | None, BaseException] = {
        "usual": ShardwiseError("disk /data has 3 GB free; the checkpoint needs 9 GB. Free 6 GB."),
        "fit": DoesNotFitError("70 GB a card; 24 GB are usable. Take 4 cards."),
        "plan": PlanMismatchError("a", "b"),
        "ours": ZeroDivisionError("division by zero"),
        "interrupt": KeyboardInterrupt(),
    }
    if options.fail in failures:
        raise failures[options.fail]
    sys.stdout.write("data\n")
    return 0


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_up_command")
    module.Options, module.run = Options, run  # type: ignore[attr-defined]  # a module made by hand
    monkeypatch.setitem(sys.modules, "made_up_command", module)
    monkeypatch.setitem(cli.COMMANDS, "made-up", cli.Command(module="made_up_command", summary="for tests"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["made-up", "--fail", "usual"],
            1,
            "shardwise: disk /data has 3 GB free; the checkpoint needs 9 GB. Free 6 GB.\n",
        ),
        (["made-up", "--fail", "fit"], 3, "shardwise: 70 GB a card; 24 GB are usable. Take 4 cards.\n"),
        (["made-up", "--fail", "plan"], 4, "shardwise: 2 problems:\n  - a\n  - b\n"),
        (["made-up", "--fail", "interrupt"], 130, "shardwise: interrupted\n"),
        (["made-up", "--fial", "fit"], 2, "shardwise: unknown flag --fial; did you mean --fail?\n"),
        (["made-up", "--fail"], 2, "shardwise: --fail needs a value: TEXT\n"),
        (["plam"], 2, "shardwise: Unknown command 'plam'. Did you mean 'plan'? See: shardwise --help\n"),
        (["--verison"], 2, "shardwise: Unknown command '--verison'. See: shardwise --help\n"),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", message)


def test_our_own_mistakes_come_with_a_traceback_and_where_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["made-up", "--fail", "ours"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "ZeroDivisionError: division by zero" in err
    assert "a mistake in shardwise, not in what you did" in err
    assert "shardwise made-up --fail ours" in err


def test_data_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["made-up"]) == 0
    assert capsys.readouterr() == ("data\n", "")


def test_help_of_all_and_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(name in page and command.summary in page for name, command in cli.COMMANDS.items())
    for words in (["made-up", "--help"], ["help", "made-up"], ["made-up", "-h"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.startswith("usage: shardwise made-up [flags]\n\nA command for tests.")


def test_nothing_said_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import shardwise

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("> /dev/full", 1, "shardwise: No space left on device; free some space, or write elsewhere\n"),
    ],
)
def test_a_closed_or_full_stdout(redirection: str, code: int, words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m shardwise wire --bytes 1GB --link ndr {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=_environ(), check=False)
    assert (done.returncode, done.stderr) == (code, words)


def test_a_full_stderr_keeps_the_exit_code() -> None:
    command = f"{shlex.quote(sys.executable)} -m shardwise wire --bytes x --link ndr 2> /dev/full"
    done = subprocess.run(["bash", "-c", command], env=_environ(), check=False)
    assert done.returncode == 2


def test_letters_that_the_terminal_has_not_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "na\\u00efve"}\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "data", "show", str(path)],
        capture_output=True, text=True, env=_environ(PYTHONIOENCODING="ascii"), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "na\\xefve" in done.stdout


def _environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src"), **more}
