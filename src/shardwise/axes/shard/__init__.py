"""Data parallelism by shards: ZeRO stages 1 to 3 by FSDP2 (the inner axis of HSDP)."""
