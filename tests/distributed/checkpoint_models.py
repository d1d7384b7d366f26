"""Tiny models in every layout, and a fingerprint of all that a run holds."""

import copy
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from shardwise.trainer.checkpoint import AppState

VOCAB = 91  # odd, so that shards are uneven


def make_model(kind: str = "llama", *, tied: bool = True, dropout: float = 0.0, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "attention_dropout": dropout,
        "attn_implementation": "eager",
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def lay_out(model: Any, layout: str) -> tuple[Any, dict[str, int]]:
    """Shard a model as the engine would; returns it with the degrees of the mesh."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return model, {}
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model), {"dp_replicate": size}
    if layout == "fsdp":
        mesh, degrees = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",)), {"dp_shard": size}
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        degrees = {"dp_replicate": 2, "dp_shard": size // 2}
    else:
        assert layout == "tp+fsdp"
        whole = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
        mesh, degrees = whole["dp_shard"], {"dp_shard": size // 2, "tp": 2}
        _tensor_parallel(model, whole["tp"])
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for block in base.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, degrees


def _tensor_parallel(model: Any, mesh: Any) -> None:
    for block in model.model.layers:
        plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


class Sampler:
    """Counts the samples that it has given, the same on every rank."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": (3, 1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["order"] == (3, 1, 2)
        self.position = state_dict["position"]


class Decay:
    """A schedule whose state does not depend on how the optimizer's groups are cut, as LambdaLR's does."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float) -> None:
        self.optimizer, self.peak, self.steps = optimizer, peak, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak / (1 + self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"peak": self.peak, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.peak, self.steps = state_dict["peak"], state_dict["steps"]


class Run:
    """A model that trains on random tokens."""

    def __init__(self, layout: str, *, seed: int = 0, dropout: float = 0.0, tied: bool = True) -> None:
        self.model, degrees = lay_out(make_model(tied=tied, dropout=dropout, seed=seed), layout)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if layout == "tp+fsdp":  # one optimizer step cannot mix meshes
            groups = [
                {"params": [p for p in group["params"] if p.device_mesh.ndim == ndim], **_without_params(group)}
                for group in groups
                for ndim in (1, 2)
            ]
            groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        self.scheduler = Decay(self.optimizer, 1e-2)
        self.sampler = Sampler()
        self.state = AppState(
            model=self.model,
            optimizers=[self.optimizer],
            extra={"scheduler": self.scheduler, "sampler": self.sampler},
            counters={"tokens": 1234},
            mesh=degrees,
            strategy={"layout": layout},
        )

    def step(self) -> float:
        """One optimizer step on tokens that depend on the sampler's position alone."""
        generator = torch.Generator().manual_seed(1000 + self.sampler.position)
        tokens = torch.randint(0, VOCAB, (4, 10), generator=generator)
        self.sampler.position += 1
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def fingerprint(self) -> dict[str, str]:
        """A hash of every whole weight and optimizer state by plain name, and of the learning rates."""
        from shardwise.trainer.checkpoint.state import gather_state

        found: dict[str, str] = {}
        for name, value in sorted(gather_state(self.state, 0).items()):
            if name.startswith("rng."):
                continue
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor):
                raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"
            else:
                found[name] = repr(copy.deepcopy(value))
        return found


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


__all__ = ["Run", "Sampler", "Shard", "lay_out", "make_model"]
