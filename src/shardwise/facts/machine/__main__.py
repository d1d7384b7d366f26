"""Answers one question about the driver as JSON on stdout; see [Note: driver in a child]."""

from __future__ import annotations

import sys

from shardwise.facts.machine.child import answer

if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))
