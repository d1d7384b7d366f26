"""Copies and collectives on the real cards, each in child processes with a time limit.

[Note: order of the experiments]
A collective over a broken P2P path does not fail, it hangs, and the hang may outlive the process: the card stays busy
until it is reset. So the order is: host copies, peer copies, then collectives through host memory, then as set, then
without switches; P2P between cards that NCCL keeps apart is forced last, and only with `risky`. The parent imports no
torch and holds no CUDA context; it kills a child's whole process group when its time is up.

`plan.py` says what is run, `run.py` runs it and gathers, `processes.py` starts and ends children; `child.py` is their
door, `copies.py` and `collectives.py` what they do. The same child code runs on CPU tensors over gloo, which is how it
is tested without cards.
"""

from shardwise.doctor.experiments.run import run_experiments

__all__ = ["run_experiments"]
