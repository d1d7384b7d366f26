"""Finds out why the wire is slow; see `diagnose.diagnose`."""
