"""RunFile: what `shardwise train` is told, in the spelling of transformers and TRL.

Only the words are theirs, so that a file moves over with little change. None means that the planner decides. Every key
has an effect; `tests/contracts` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.vocabulary.job import Attention, TuningWish
from shardwise.vocabulary.limits import Amount, Count, Delay, LoraRank, NotNegative, Positive, Seed, Share
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Offload, ZeroStage

OptimizerKey = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_bf16_states", "adamw_8bit", "paged_adamw_8bit", "lamb", "sgd"
]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Tracker = Literal["none", "tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """One fine-tune. Flags of `shardwise train` spelled the same override it."""

    # -- model
    model_name_or_path: str
    """Catalogue name, local folder or hub id."""
    model_revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only if you write it here."""
    random_init: bool = False
    """Start from random weights of this shape (benchmarks)."""
    attn_implementation: Attention = "sdpa"

    # -- data
    dataset_name: str | None = None
    """A file (JSONL, JSON, CSV, Parquet, Arrow) or a hub id; `random:N` makes N sequences of random tokens."""
    dataset_split: str = "train"
    """Split of a hub id."""
    streaming: bool = False
    """Read the training set while training, for one too large to tokenize beforehand; needs max_steps."""
    eval_dataset_name: str | None = None
    """Held-out file or hub id."""
    eval_dataset_split: str = "test"
    column_map: dict[str, str] = field(default_factory=dict[str, str])
    """Names of your columns to known ones, such as {question: prompt}."""
    chat_template_path: str | None = None
    """A jinja file that replaces the tokenizer's template."""
    max_length: Count = 1024
    """Tokens; longer sequences are cut, counted and reported."""
    packing: bool = False
    assistant_only_loss: bool = True
    """`messages`: learn the assistant's tokens only."""
    completion_only_loss: bool = True
    """`prompt`/`completion`: learn the completion only."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read or used, and count them; otherwise they are an error."""

    # -- how much at once
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    global_batch_size: Count | None = None
    """Sequences of one optimizer step over all cards; give this, or the two above."""
    per_device_eval_batch_size: Count = 4

    # -- how long and how fast
    num_train_epochs: Positive = 1.0
    max_steps: Count | None = None
    """Optimizer steps; wins over num_train_epochs."""
    learning_rate: Amount | None = None
    """None: 2e-5 for full, 2e-4 for LoRA and QLoRA."""
    learning_rate_base_batch: Count | None = None
    """The batch (sequences) that learning_rate was found for; it is scaled to this run's: by the factor itself for SGD
    and LAMB, by its root for Adam, and a larger batch warms up."""
    lr_scheduler_type: Scheduler = "cosine"
    warmup_steps: NotNegative = 0
    warmup_ratio: Share = 0.0
    """Share of all steps; used where warmup_steps is 0."""
    optim: OptimizerKey = "adamw_torch_fused"
    weight_decay: Amount = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Amount = 1.0
    """Clip the true global norm to this; 0 turns clipping off."""
    seed: Seed = 42
    hang_timeout: Delay = 600.0
    """Seconds without progress of any rank after which the run ends, naming the rank and the collective; 0: never."""
    max_restarts: NotNegative = 0
    """After a rank is lost, start all of them again up to so often and go on from the newest good checkpoint."""
    shutdown_timeout: Delay = 600.0
    """Seconds that the ranks may take to save after SIGTERM or Ctrl-C; then they are killed."""

    # -- what is trained
    tuning: TuningWish | None = None
    """full, lora, qlora or any; None: from use_peft and load_in_4bit."""
    use_peft: bool = False
    load_in_4bit: bool = False
    lora_r: LoraRank = 16
    lora_alpha: Count = 32
    lora_dropout: Share = 0.0
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    use_dora: bool = False
    """Adapters that train the length of each row of a weight apart from its direction."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(r) instead of alpha / r."""
    merge_adapters: bool = False
    """At the end, export the whole model with the adapters merged into it, beside the adapters."""

    # -- how it is split
    zero_stage: ZeroStage | None = None
    gradient_checkpointing: bool | Checkpointing | None = None
    """true means full."""
    bf16: bool = True
    """bf16 compute with fp32 master weights; false: fp32."""
    bf16_pure: bool = False
    """bf16 weights without fp32 masters."""
    fp8: bool = False
    """As bf16, with the blocks' matrix products in fp8 (cards from compute capability 8.9 on)."""
    offload: Offload = "none"
    """What waits in host memory: optimizer (masters and moments), or parameters as well."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients cross the wire."""
    torch_compile: bool | None = None
    """Compile each block; null: on CUDA cards from Ampere on."""
    loss: LossKind | None = None

    # -- what is written
    output_dir: str = "runs/latest"
    resume_from_checkpoint: bool | str = False
    """true: the newest good one in output_dir; or a folder."""
    logging_steps: Count = 1
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: Count | None = None
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    save_steps: Count = 500
    save_total_limit: Count | None = 2
    save_final: bool = True
    """Export a Hugging Face folder at the end."""
    report_to: tuple[Tracker, ...] = ("none",)
    run_name: str | None = None
    sample_prompt: str | None = None
    """Answer this before and after training, greedily, and keep both."""
    sample_max_new_tokens: Count = 48
