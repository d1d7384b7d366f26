"""No token of a packed row sees another document: proven in fp64, kind of attention by kind of attention."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.data.collate import Batch, CollateOptions, Layout, collate
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.step import model_inputs

LENGTHS = (5, 9, 1, 7, 3)
VARLEN = "varlen_of_the_test"


def documents(changed: int | None = None) -> TokenizedSet:
    """Five documents; one of them may have other tokens."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 60, (length,), generator=draw).tolist() for length in LENGTHS]
    if changed is not None:
        rows[changed] = [61 - token for token in rows[changed]]
    return from_samples(rows)


@pytest.fixture(scope="module")
def model() -> Any:
    """fp64 but for the norms, which transformers computes in fp32 whatever it is given."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    interface: Any = AttentionInterface
    interface.register(VARLEN, varlen_attention)
    return LlamaForCausalLM(config).double().eval()


def varlen_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """What a variable-length kernel computes from bounds, as flash attention is handed them: [1, heads, T, D]."""
    del mask
    bounds = settings["cu_seq_lens_q"].tolist()
    repeats = module.num_key_value_groups
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end].repeat_interleave(repeats, 1),
            value[:, :, start:end].repeat_interleave(repeats, 1),
            is_causal=True,
            scale=settings["scaling"],
        )
        for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def logits(model: Any, batch: Batch, attention: str) -> torch.Tensor:
    """By the engine's own inputs: [B, T, V]."""
    kind = VARLEN if attention == "flash" else attention
    model.set_attn_implementation(kind)
    with torch.no_grad():
        return cast(torch.Tensor, model(**model_inputs(batch, attention), use_cache=False).logits)


def packed(tokenized: TokenizedSet, layout: Layout) -> Batch:
    """Two rows of several documents, padding behind the second; or all of them in one."""
    options = CollateOptions(pad_token_id=0, layout=layout, row_length=None if layout == "flat" else 24)
    return collate(tokenized, MicroBatch(rows=((0, 1, 2), (3, 4))), options)


def of_document(batch: Batch, values: torch.Tensor, sample: int) -> torch.Tensor:
    """The part of one document: [length, V]."""
    before = 0
    for row, samples in enumerate(((0, 1, 2), (3, 4))):
        place = before if batch.input_ids.shape[0] == 1 else 0
        for one in samples:
            if one == sample:
                return values[row if batch.input_ids.shape[0] > 1 else 0, place : place + LENGTHS[one]]
            place += LENGTHS[one]
        before = place
    raise AssertionError


KINDS: list[tuple[str, Layout]] = [("sdpa", "packed"), ("eager", "packed"), ("sdpa", "flat"), ("flash", "flat")]


@pytest.mark.parametrize(("attention", "layout"), KINDS)
def test_other_documents_change_nothing(model: Any, attention: str, layout: Layout) -> None:
    """Other tokens in one document: its own logits change, those of all others stay as they were."""
    before = packed(documents(), layout)
    base = logits(model, before, attention)
    for changed in range(len(LENGTHS)):
        batch = packed(documents(changed), layout)
        found = logits(model, batch, attention)
        for sample in range(len(LENGTHS)):
            difference = (of_document(batch, found, sample) - of_document(before, base, sample)).abs().max().item()
            assert (difference > 1e-3) if sample == changed else (difference < 1e-12), (changed, sample, difference)


@pytest.mark.parametrize(("attention", "layout"), KINDS)
def test_a_document_in_a_row_is_a_document_alone(model: Any, attention: str, layout: Layout) -> None:
    """Positions start anew: the logits are those of the document by itself."""
    tokenized = documents()
    batch = packed(tokenized, layout)
    found = logits(model, batch, attention)
    for sample, length in enumerate(LENGTHS):
        alone = collate(tokenized, MicroBatch(rows=((sample,),)), CollateOptions(pad_token_id=0, pad_to_multiple_of=1))
        assert of_document(batch, batch.position_ids[..., None], sample).flatten().tolist() == list(range(length))
        difference = (of_document(batch, found, sample) - logits(model, alone, "sdpa")[0]).abs().max().item()
        assert difference < 1e-6  # the norms' fp32


def test_the_proof_sees_contamination(model: Any) -> None:
    """Without document bounds the same test fails, so it looks at something."""
    before, changed = packed(documents(), "packed"), packed(documents(0), "packed")
    model.set_attn_implementation("sdpa")
    positions = torch.arange(24).expand(2, -1)
    with torch.no_grad():
        values = [model(input_ids=one.input_ids, position_ids=positions).logits for one in (before, changed)]
    difference = (of_document(changed, values[1], 1) - of_document(before, values[0], 1)).abs().max().item()
    assert difference > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_by_document_ids() -> None:
    """The same document numbers confine flex attention: fp64, against each document by itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    make_mask, attend = cast(Any, create_block_mask), cast(Any, flex_attention)
    batch = packed(documents(), "packed")
    ids = batch.document_ids
    assert ids is not None
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, 24, 8, dtype=torch.float64)

    def same(row: Any, _: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[row, q] == ids[row, k])

    found = attend(query, key, value, block_mask=make_mask(same, 2, None, 24, 24, device="cpu"))
    for row in range(2):
        for number in ids[row].unique().tolist():
            kept = ids[row] == number
            alone = F.scaled_dot_product_attention(
                query[row, :, kept], key[row, :, kept], value[row, :, kept], is_causal=True
            )
            torch.testing.assert_close(found[row, :, kept], alone, atol=1e-12, rtol=0)
