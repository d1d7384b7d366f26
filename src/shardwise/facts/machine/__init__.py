"""A machine read from inside, without root and without torch. See `read.read_machine`."""

from shardwise.facts.machine.read import read_machine
from shardwise.facts.machine.record import Machine, PathType, Unreadable

__all__ = ["Machine", "PathType", "Unreadable", "read_machine"]
