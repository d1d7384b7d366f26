"""Held-out loss and a sample answer: forward only, on the model as it is split, with all ranks taking part."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.axes.fully_shard_apply import fsdp_modules
from shardwise.levers.precision.apply import compute_dtype
from shardwise.trainer.data.collate import Batch
from shardwise.trainer.feeder import DataSource
from shardwise.trainer.step import Stepper, summed_loss
from shardwise.vocabulary.strategy import Strategy

KEEP_GATHERED_BYTES = 4 * 2**30
"""A model up to this size stays gathered while it answers: one gathering instead of one for every token."""


@contextlib.contextmanager
def forward_only(model: nn.Module) -> Generator[None]:
    """Evaluation mode without gradients.

    Afterwards everything gathered is given back: `fully_shard` frees what a forward has gathered in the backward that
    follows, and here none does.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module in fsdp_modules(model):
            module.reshard()


def held_out_loss(stepper: Stepper, source: DataSource) -> float:
    """Mean loss over all supervised tokens of a held-out set, whatever the batches and the number of ranks."""
    mesh = stepper.mesh
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    num_tokens = 0
    with forward_only(stepper.model):
        for step in range(source.plan.num_steps):
            num_tokens += source.plan.num_supervised_tokens(step)
            total += losses_of(stepper, source.batches(step))
    local = total.cpu()
    dist.all_reduce(local, group=mesh.control)
    return local.item() / max(num_tokens, 1) / mesh.loss_copies


def losses_of(stepper: Stepper, batches: Sequence[Batch]) -> Tensor:
    """Loss summed over the supervised tokens of micro-batches, forward only; 0 on stages that do not know it: []."""
    device = stepper.mesh.device
    if stepper.pipeline is not None:
        return stepper.pipeline.forward([batch.to(device) for batch in batches]).double()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        total += summed_loss(stepper.model, batch.to(device), stepper.attention).double()
    return total


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Answers a prompt greedily, through the model's usual forward: every rank computes the same answer."""

    model: nn.Module
    tokenizer: Any
    strategy: Strategy
    device: torch.device
    max_new_tokens: int

    def answer(self, prompt: str) -> str:
        """What the model says to a prompt, as a chat if the tokenizer has a template."""
        prompt_ids = _prompt_ids(self.tokenizer, prompt).to(self.device)
        stop = _stop_ids(self.model, self.tokenizer)
        with forward_only(self.model), _kept_gathered(self.model, self.strategy):
            if self.strategy.tp > 1 and self.strategy.sequence_parallel:
                new_ids = _greedy_padded(self.model, prompt_ids, self.max_new_tokens, stop, self.strategy.tp)
            else:
                new_ids = _greedy(self.model, prompt_ids, self.max_new_tokens, stop)
        return self.tokenizer.decode(new_ids, skip_special_tokens=True).strip()


def _prompt_ids(tokenizer: Any, prompt: str) -> Tensor:
    """Token ids as the chat template wants them, if there is one: [1, T]."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {token for token in (*several, tokenizer.eos_token_id) if isinstance(token, int)}


def _greedy(model: nn.Module, prompt_ids: Tensor, max_new_tokens: int, stop: set[int]) -> list[int]:
    """The likeliest token after another; keys and values of earlier tokens are kept: [1, T] -> ids."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache: Any = None
    inputs, new_ids = prompt_ids, list[int]()
    for _ in range(max_new_tokens):
        output: Any = model(input_ids=inputs, use_cache=True, **{name: cache})
        cache = getattr(output, name)
        token = int(output.logits[0, -1].argmax())
        if token in stop:
            break
        new_ids.append(token)
        inputs = torch.tensor([[token]], device=prompt_ids.device)
    return new_ids


def _greedy_padded(model: nn.Module, ids: Tensor, max_new_tokens: int, stop: set[int], multiple: int) -> list[int]:
    """The same where rows must divide by a number, as under sequence parallel: all tokens again for each new one."""
    num_prompt = ids.shape[1]
    for _ in range(max_new_tokens):
        padded = F.pad(ids, (0, -ids.shape[1] % multiple))  # nothing looks at what lies behind
        output: Any = model(input_ids=padded, use_cache=False)
        token = int(output.logits[0, ids.shape[1] - 1].argmax())
        if token in stop:
            break
        ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
    return ids[0, num_prompt:].tolist()


@contextlib.contextmanager
def _kept_gathered(model: nn.Module, strategy: Strategy) -> Generator[None]:
    """Blocks stay gathered from one token to the next, if they would be freed and the model is small enough."""
    size = sum(parameter.numel() for parameter in model.parameters()) * compute_dtype(strategy).itemsize
    if strategy.zero_stage in (1, 2) or strategy.offload == "optimizer" or size > KEEP_GATHERED_BYTES:
        yield
        return
    blocks = fsdp_modules(model)[1:]  # the root comes first, and stays gathered of itself
    for module in blocks:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in blocks:
            module.set_reshard_after_forward(True, recurse=False)
