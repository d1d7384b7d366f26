from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.trainer.data.batches import BatchOptions, MicroBatch, plan_batches
from shardwise.trainer.data.collate import Batch, CollateOptions, Layout, collate, document_causal_mask
from shardwise.trainer.data.store import TokenizedSet, from_samples

A, B, C = [11, 12, 13], [21, 22, 23, 24], [31, 32]


@pytest.fixture
def tokenized() -> TokenizedSet:
    return from_samples([A, B, C], [[1, 1, 1], [0, 0, 1, 1], [1, 1]])


def options(layout: Layout = "padded", **more: Any) -> CollateOptions:
    return CollateOptions(pad_token_id=0, layout=layout, pad_to_multiple_of=more.pop("pad_to_multiple_of", 4), **more)


def test_padded(tokenized: TokenizedSet) -> None:
    batch = collate(tokenized, MicroBatch(rows=((0,), (1,))), options())
    assert batch.input_ids.tolist() == [[11, 12, 13, 0], B]
    assert batch.labels.tolist() == [[-100, 12, 13, -100], [-100, -100, 23, 24]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3]
    assert (batch.num_tokens, batch.num_supervised_tokens, batch.sample_ids) == (7, 4, (0, 1))
    assert batch.document_ids is None


def test_packed(tokenized: TokenizedSet) -> None:
    batch = collate(tokenized, MicroBatch(rows=((0, 1), (2,))), options("packed", row_length=8))
    assert batch.input_ids.tolist() == [[*A, *B, 0], [*C, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1], [0, 0] + [-1] * 6]
    assert batch.labels[0].tolist() == [-100, 12, 13, -100, -100, 23, 24, -100]
    assert batch.attention_mask is None


def test_flat(tokenized: TokenizedSet) -> None:
    batch = collate(tokenized, MicroBatch(rows=((0, 1), (2,))), options("flat"))
    assert batch.input_ids.tolist() == [[*A, *B, *C, 0, 0, 0]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 9, 12]
    assert batch.max_seqlen == 4


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_shifted_labels_never_cross_documents(tokenized: TokenizedSet, layout: Layout) -> None:
    rows = ((0,), (1,), (2,)) if layout == "padded" else ((0, 1), (2,))
    batch = collate(tokenized, MicroBatch(rows=rows), options(layout))
    targets = batch.labels[:, 1:]
    learned = targets != -100
    assert int(learned.sum()) == batch.num_supervised_tokens == 2 + 2 + 1
    # every learned token is of the same sample as the token that predicts it: tens digit, by construction
    assert torch.equal(batch.input_ids[:, :-1][learned] // 10, targets[learned] // 10)


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_an_empty_micro_batch_can_be_forwarded(tokenized: TokenizedSet, layout: Layout) -> None:
    fixed = {} if layout == "flat" else {"num_rows": 2}
    batch = collate(tokenized, MicroBatch(rows=()), options(layout, row_length=8, **fixed))
    assert batch.input_ids.shape == (1 if layout == "flat" else 2, 8)
    assert batch.is_empty
    assert batch.is_all_masked
    assert batch.num_tokens == 0
    assert batch.attention_mask is None or bool(batch.attention_mask.all())


def test_an_all_masked_batch_is_legal_and_flagged() -> None:
    batch = collate(from_samples([A], [[0, 0, 0]]), MicroBatch(rows=((0,),)), options())
    assert batch.is_all_masked
    assert not batch.is_empty


def test_documents_of_a_row_need_a_layout_that_keeps_them_apart(tokenized: TokenizedSet) -> None:
    with pytest.raises(ValueError, match="use packed or flat"):
        collate(tokenized, MicroBatch(rows=((0, 1),)), options())
    with pytest.raises(ValueError, match="a row of 7 tokens does not fit row_length 4"):
        collate(tokenized, MicroBatch(rows=((0, 1),)), options("packed", row_length=4))


def test_the_mask_is_causal_and_confined() -> None:
    mask = document_causal_mask(torch.tensor([[0, 0, 1, -1]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_to_moves_every_tensor(tokenized: TokenizedSet) -> None:
    batch = collate(tokenized, MicroBatch(rows=((0,),)), options("flat")).to("meta")
    assert {value.device.type for value in vars(batch).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert batch.sample_ids == (0,)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # pyright: ignore[reportPrivateUsage]  # its keyword is not in the signature
    return LlamaForCausalLM(config).eval()


def _losses(model: Any, batch: Batch, **attention: Any) -> torch.Tensor:
    """Summed loss of a batch as a trainer would compute it."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **attention).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 64), batch.labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


def _alone(model: Any, tokenized: TokenizedSet) -> torch.Tensor:
    """The loss of each document by itself, summed."""
    batches = [collate(tokenized, MicroBatch(rows=((i,),)), options(pad_to_multiple_of=1)) for i in range(3)]
    return torch.stack([_losses(model, batch) for batch in batches]).sum()


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_every_layout_gives_the_loss_of_the_documents_alone(
    model: Any, tokenized: TokenizedSet, layout: Layout
) -> None:
    """No contamination: packed with the mask equals one document at a time."""
    rows = ((0,), (1,), (2,)) if layout == "padded" else ((0, 2), (1,))
    batch = collate(tokenized, MicroBatch(rows=rows), options(layout))
    mask = batch.attention_mask if batch.document_ids is None else document_causal_mask(batch.document_ids)
    torch.testing.assert_close(_losses(model, batch, attention_mask=mask), _alone(model, tokenized))
    unmasked = _losses(model, batch)  # transformers finds restarting positions itself, if it gets no mask
    torch.testing.assert_close(unmasked, _alone(model, tokenized))


def test_the_additive_mask_suits_eager_attention(
    model: Any, tokenized: TokenizedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = collate(tokenized, MicroBatch(rows=((0, 2), (1,))), options("packed"))
    assert batch.document_ids is not None
    mask = document_causal_mask(batch.document_ids, torch.float32)
    for attention in ("sdpa", "eager"):
        monkeypatch.setattr(model.config, "_attn_implementation", attention)
        torch.testing.assert_close(_losses(model, batch, attention_mask=mask), _alone(model, tokenized))


def test_a_plan_collates_to_every_supervised_token() -> None:
    tokenized = from_samples([[5] * length for length in (3, 9, 4, 7, 2, 6, 8)])
    plan = plan_batches(
        tokenized, BatchOptions(global_batch=3, micro_batch=1, num_ranks=2, packing=True, max_length=12)
    )
    for step in range(plan.num_steps):
        batches = [
            collate(tokenized, micro, options("packed", row_length=12, num_rows=1))
            for rank in range(2)
            for micro in plan.for_rank(step, rank)
        ]
        assert {tuple(batch.input_ids.shape) for batch in batches} == {(1, 12)}
        assert sum(batch.num_supervised_tokens for batch in batches) == plan.num_supervised_tokens(step)
