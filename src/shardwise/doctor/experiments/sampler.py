"""Samples a card while something runs on it."""

from __future__ import annotations

import threading

from shardwise.facts.machine.nvml import sample_link
from shardwise.facts.machine.record import Unreadable

_SAMPLE_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class Sampler:
    """Samples link and clocks of one card while something runs on it."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._stop = threading.Event()
        self.links: list[tuple[int, int, int]] = []
        self.slowdowns: set[tuple[int, str]] = set()

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_GRACE_SECONDS)

    def _loop(self) -> None:
        while not self._stop.is_set():
            sample = sample_link(self._gpu)
            if isinstance(sample, Unreadable):
                return
            self.links.append((self._gpu, sample.generation, sample.width))
            self.slowdowns.update((self._gpu, reason) for reason in sample.slowdowns)
            self._stop.wait(_SAMPLE_SECONDS)
