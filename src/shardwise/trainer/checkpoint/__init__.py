"""Checkpoints that survive: safetensors files and a hashed JSON manifest, through DCP's planners, without pickles.

checkpointer = Checkpointer("runs/one", SaveOptions(save_total_limit=2))      # on every rank
found = checkpointer.newest_good()
if found.path is not None:
    restored = checkpointer.load(state, found.path, verified=found.manifest)
for ...:
    step()
    checkpointer.poll()                             # raises within one step if a save in the background has failed
    checkpointer.save(state, step, blocking=False)  # at save_steps
checkpointer.close()                                # waits for the last one
"""

from shardwise.trainer.checkpoint.checkpointer import Checkpointer, SaveOptions, SaveReport, load, save
from shardwise.trainer.checkpoint.folder import Found, newest_good
from shardwise.trainer.checkpoint.manifest import Manifest, read_manifest
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.state import AppState, Restored, base_identity, model_tensors
from shardwise.trainer.checkpoint.storage import (
    SafetensorsReader,
    SafetensorsWriter,
    ValueLoadPlanner,
    ValueSavePlanner,
)
from shardwise.trainer.checkpoint.verify import verify_folder

__all__ = [
    "AppState",
    "Checkpointer",
    "Found",
    "Manifest",
    "Ranks",
    "Restored",
    "SafetensorsReader",
    "SafetensorsWriter",
    "SaveOptions",
    "SaveReport",
    "ValueLoadPlanner",
    "ValueSavePlanner",
    "base_identity",
    "load",
    "model_tensors",
    "newest_good",
    "read_manifest",
    "save",
    "verify_folder",
]
