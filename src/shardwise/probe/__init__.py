"""Measures the cards and the wire between them, and writes what it found as a Cluster.

`measure` is the door. Importing this package imports no torch; the ranks do, in their own processes.
"""

from shardwise.probe.launch import measure, probe
from shardwise.probe.options import ProbeOptions

__all__ = ["ProbeOptions", "measure", "probe"]
