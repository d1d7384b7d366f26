"""Ctrl-C saves: the terminal signals the ranks, their launcher passes it on, and that is one wish, not two."""

import signal

import pytest

from shardwise.trainer import signals
from shardwise.trainer.signals import Signals


def test_the_launchers_echo_is_the_same_wish() -> None:
    noted = Signals()
    noted.install()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert noted.stop == signal.SIGINT
    finally:
        noted.restore()


def test_a_later_second_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", 0.0)
    noted = Signals()
    noted.install()
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        noted.restore()
