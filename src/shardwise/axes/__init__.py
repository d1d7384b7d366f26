"""The ways to split a model and its data: replicate, shard, tensor, pipeline.

Each axis has a `cost.py` (legal, stores, sends: arithmetic) and an `apply.py` (does exactly that to a torch module).
`fully_shard.py` is the mechanism that replicate and shard share.
"""
