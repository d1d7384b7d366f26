"""ModelShape: the shape of a decoder, in Hugging Face's spelling, so that reading config.json is the identity.

[Note: parameter groups]
A decoder is `num_hidden_layers` equal blocks and a root: the embedding, the final norm and the head. Blocks are what
sharding gathers one at a time and what checkpointing recomputes; the root is gathered once and held. Every count below
is exact, so that it can be compared to the last parameter with the module that transformers builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Site = Literal["attention", "mlp", "router"]


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One matrix multiplication inside a block: `[*, in_features] -> [*, out_features]`."""

    name: str
    """The last part of the module's name, such as `q_proj`; what LoRA targets by name."""
    in_features: int
    out_features: int
    bias: bool = False
    site: Site = "attention"
    copies: int = 1
    """How many such matrices a block holds (experts)."""
    active_copies: int = 1
    """How many of them one token passes through."""

    @property
    def matrix_parameters(self) -> int:
        """Elements of one matrix, without bias."""
        return self.in_features * self.out_features

    @property
    def num_parameters(self) -> int:
        """All elements, biases and copies included."""
        return self.copies * (self.matrix_parameters + (self.out_features if self.bias else 0))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense or mixture-of-experts decoder for causal language modeling."""

    name: str
    """The catalogue name, hub id or folder that it was read from."""
    model_type: str
    """As in config.json: llama, qwen2, qwen3, mistral, gemma, gemma2, gemma3_text, qwen3_moe, mixtral."""
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward layer; of one expert in a mixture."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the q, k and v projections (Qwen2: True)."""
    attention_output_bias: bool = False
    """Bias on the o projection (Llama with attention_bias: True; Qwen2: False)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm over each head of q and k (Qwen3, Gemma 3)."""
    norms_per_block: int = 2
    """Norms over hidden_size in a block: 2, or 4 where outputs are normed too (Gemma 2 and 3)."""
    hidden_act: str = "silu"
    sliding_window: int | None = None
    """Tokens that a windowed layer attends to; None if every layer sees all."""
    num_windowed_layers: int = 0
    """How many layers use the window."""
    max_position_embeddings: int = 32768
    num_experts: int = 0
    """Experts a block; 0 for a dense model."""
    num_experts_per_tok: int = 0
    dense_layers: int = 0
    """Leading blocks without experts in a mixture."""
    stored_as: str = ""
    """How the files pack the weights (config.json's quantization_config), such as `gptq, 4 bits`; empty if not at all.
    Counts are of elements, packed or not."""

    @property
    def is_mixture(self) -> bool:
        """True for a mixture of experts."""
        return self.num_experts > 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together, a * d in the formulas."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together, g * d in the formulas."""
        return self.num_key_value_heads * self.head_dim

    @cached_property
    def linears(self) -> tuple[LinearShape, ...]:
        """The matrices of one block, in the order of the forward pass."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.key_value_size
        qkv_bias, mlp_bias = self.attention_bias, self.mlp_bias
        copies, active = (self.num_experts, self.num_experts_per_tok) if self.is_mixture else (1, 1)
        attention = (
            LinearShape(name="q_proj", in_features=h, out_features=q, bias=qkv_bias),
            LinearShape(name="k_proj", in_features=h, out_features=kv, bias=qkv_bias),
            LinearShape(name="v_proj", in_features=h, out_features=kv, bias=qkv_bias),
            LinearShape(name="o_proj", in_features=q, out_features=h, bias=self.attention_output_bias),
        )
        router = (
            (LinearShape(name="gate", in_features=h, out_features=self.num_experts, site="router"),)
            if self.is_mixture
            else ()
        )
        mlp = tuple(
            LinearShape(
                name=name, in_features=i, out_features=o, bias=mlp_bias, site="mlp", copies=copies, active_copies=active
            )
            for name, i, o in (("gate_proj", h, f), ("up_proj", h, f), ("down_proj", f, h))
        )
        return attention + router + mlp

    @property
    def norm_parameters_per_block(self) -> int:
        """Elements of the norms of one block."""
        return self.norms_per_block * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @cached_property
    def block_parameters(self) -> int:
        """Elements of one block."""
        return sum(linear.num_parameters for linear in self.linears) + self.norm_parameters_per_block

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Elements that the head adds: 0 if it is tied to the embedding."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Embedding, head and final norm: everything that is not in a block."""
        return self.embedding_parameters + self.head_parameters + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All elements, counted once where tied."""
        return self.num_hidden_layers * self.block_parameters + self.root_parameters

    @cached_property
    def active_block_parameters(self) -> int:
        """Matrix elements of a block that one token is multiplied with."""
        return sum(linear.active_copies * linear.matrix_parameters for linear in self.linears)

    @property
    def num_active_parameters(self) -> int:
        """Elements that take part in one token's forward pass (equal to num_parameters for a dense model)."""
        idle = sum(
            (linear.copies - linear.active_copies) * (linear.num_parameters // linear.copies) for linear in self.linears
        )
        return self.num_parameters - self.num_hidden_layers * idle

    @property
    def matmul_parameters(self) -> int:
        """Matrix elements that one token is multiplied with, head included (N in 6N FLOPs)."""
        return self.num_hidden_layers * self.active_block_parameters + self.vocab_size * self.hidden_size
