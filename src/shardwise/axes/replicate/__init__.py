"""Data parallelism by copies: every rank holds the whole model (DDP; the outer axis of HSDP)."""
