"""Reads NCCL logs: `records.py` says what is kept, `shapes.py` which line holds it, `read.py` how a file is read."""

from shardwise.doctor.nccl_log.read import parse_nccl_log, read_nccl_log

__all__ = ["parse_nccl_log", "read_nccl_log"]
