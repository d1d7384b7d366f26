"""What must hold, and is silently wrong elsewhere. Each check is cheap, runs in every run, and names what it found.

| file         | when                      | what                                                                      |
|--------------|---------------------------|---------------------------------------------------------------------------|
| wrapping.py  | the model is split        | sharded, replicated, ignored as planned, class by class; the stored dtype |
"""

from shardwise.trainer.sentinels.buffers import check_buffers
from shardwise.trainer.sentinels.gradients import check_gradients
from shardwise.trainer.sentinels.ties import check_ties
from shardwise.trainer.sentinels.wrapping import verify_wrapping, wrapped_classes

__all__ = ["check_buffers", "check_gradients", "check_ties", "verify_wrapping", "wrapped_classes"]
