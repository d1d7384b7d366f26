"""What must hold, and is silently wrong elsewhere. Each check is cheap, runs in every run, and names what it found.

| file             | looks at                                                                     | when             |
|------------------|------------------------------------------------------------------------------|------------------|
| world.py         | ranks, machines, cards, versions, clocks                                     | before all       |
| wrapping.py      | sharded, replicated, ignored as planned, module by module; the stored dtype  | model built      |
| buffers.py       | buffers hold what the CPU computed                                           | built, step 1    |
| ties.py          | tied weights are one                                                         | built, both ends |
| gradients.py     | every trained parameter gets a gradient that is not zero, no frozen one does | first steps      |
| samples.py       | the planned samples, each once, over all ranks; the effective batch          | every step       |
| finite.py        | loss and norm; tokens to learn from                                          | every step       |
| movement.py      | the share of weights that an update leaves as they were                      | every 200 steps  |
| drift.py         | what several ranks hold is equal to the last bit                             | every 200 steps  |
| adapters.py      | no adapter is still zero                                                     | last step        |
| hang.py          | signs of life of every rank, and that some rank comes further                | all the time     |
| out_of_memory.py | which category grew, at which instant, and what fits                         | when it happens  |

watch.py calls them in the order in which the loop meets them. The loss of the plain model is in trainer/reference.py.
"""

from shardwise.trainer.sentinels.buffers import check_buffers
from shardwise.trainer.sentinels.gradients import check_gradients
from shardwise.trainer.sentinels.ties import check_ties
from shardwise.trainer.sentinels.wrapping import verify_wrapping, wrapped_classes

__all__ = ["check_buffers", "check_gradients", "check_ties", "verify_wrapping", "wrapped_classes"]
