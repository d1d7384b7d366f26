"""What a step costs in bytes, messages and seconds.

    memory    stored bytes; every storage of one step
    wire      every collective of one step
    times     seconds of steps, and of one step's parts
    meter     which step is looked at how, and the rows that come out

Looking makes a step slower, so each kind of look has a step of its own that no time is taken from:

    step 0         warm-up; optimizer states are made
    step 1         memory and messages are watched
    step 2         profiled
    from step 3    times
"""

from shardwise.trainer.meter.meter import Meter, MeterOptions, StepTokens
from shardwise.trainer.meter.times import StepClock

__all__ = ["Meter", "MeterOptions", "StepClock", "StepTokens"]
