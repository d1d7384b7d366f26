"""What shrinks the bill without a new axis: accumulation, checkpointing, adapters, optimizer, loss, precision.

Each lever has a `cost.py` (legal, stores: arithmetic) and, where it changes a torch module, an `apply.py`.
"""
