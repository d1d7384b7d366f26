"""Names of optimizers in a run file, and the settings that follow from them."""

from __future__ import annotations

from shardwise.levers.optimizer.apply import OptimizerSettings
from shardwise.vocabulary.job import OptimizerName
from shardwise.vocabulary.run import OptimizerKey, RunFile

_NAMES: dict[OptimizerKey, OptimizerName] = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw_bf16_states": "adamw_bf16_states",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lamb": "lamb",
    "sgd": "sgd",
}


def optimizer_settings(run: RunFile, learning_rate: float) -> OptimizerSettings:
    """What a run file says about the optimizer; the schedule gives the rate."""
    return OptimizerSettings(
        name=_NAMES[run.optim],
        learning_rate=learning_rate,
        weight_decay=run.weight_decay,
        betas=(run.adam_beta1, run.adam_beta2),
        epsilon=run.adam_epsilon,
        fused=run.optim != "adamw_torch",
    )
