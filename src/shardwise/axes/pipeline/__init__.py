"""Pipeline parallelism: blocks in stages, micro-batches in flight."""
