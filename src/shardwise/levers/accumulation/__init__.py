"""Several micro-batches for one optimizer step."""
