"""Attention without masks: equal to masks, document by document, and taken only by models that prove it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.trainer import attention
from shardwise.trainer.data.batches import BatchOptions, MicroBatch
from shardwise.trainer.data.collate import collate, document_causal_mask
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.feeder import BatchForm, collate_options
from shardwise.trainer.step import model_inputs

LENGTHS = (5, 13, 1, 6)
TOTAL = sum(LENGTHS)


def small_model(model_type: str, **keys: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in attention.TWIN.items() if not key.startswith(("sliding", "attention_chunk"))}
    config = AutoConfig.for_model(model_type, **{**sizes, **keys})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def rows(heads: int = 4, groups: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    shapes = ((TOTAL, heads, 8), (TOTAL, groups, 8), (TOTAL, groups, 8))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def bounds() -> Tensor:
    """Two empty documents at the end."""
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist(), TOTAL, TOTAL], dtype=torch.int32)


@pytest.mark.parametrize("reach", [-1, 0, 3, 100])
def test_documents_equal_the_mask(reach: int) -> None:
    """Values and gradients of the whole row under the mask that says the same."""
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    mask = document_causal_mask(ids)
    if reach >= 0:
        mask = mask & attention.band(TOTAL, TOTAL, reach + 1, mask.device)
    q, k, v = rows()
    turned = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*turned, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    found = attention.attend_by_document([q, k, v], bounds(), 16, 0.3, reach)
    assert torch.allclose(found, expected, rtol=1e-12)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * weight).sum(), (q, k, v))
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_kernel_is_asked_for_causal_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of torch's kernel, whichever this version has, with a stand-in that notes them."""
    from torch.nn.attention import varlen

    asked: dict[str, Any] = {}

    def stand_in(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        asked.update(max_q=max_q, max_k=max_k, scale=scale, window_size=window_size, grouped=enable_gqa)
        assert torch.equal(cu_seq_q, cu_seq_k)
        return attention.attend_by_document([query, key, value], cu_seq_q, max_q, scale, window_size[0])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    kernel = attention.variable_length_kernel()
    assert kernel is not None
    found = kernel(rows(), bounds(), 16, 0.5, 3)
    assert torch.equal(found, attention.attend_by_document(rows(), bounds(), 16, 0.5, 3))
    assert asked == {"max_q": 16, "max_k": 16, "scale": 0.5, "window_size": (3, 0), "grouped": True}


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 7}),
        ("gemma3_text", {"sliding_window": 7}),
    ],
)
def test_packed_rows_equal_documents_alone(model_type: str, keys: dict[str, Any]) -> None:
    """Through collate and model: losses of a flat row are those of its documents, with padding behind them."""
    model = small_model(model_type, **keys).eval()
    assert attention.adopt(model)
    assert attention.takes_bounds(model, torch.device("cpu"), torch.float32)
    samples = [[(3 + 7 * i + j) % 60 + 3 for j in range(length)] for i, length in enumerate(LENGTHS)]
    data = from_samples(samples)
    cut = BatchOptions(global_batch=2, micro_batch=2, num_ranks=1, packing=True, max_length=20)
    options = collate_options(BatchForm(layout="flat", is_static=True), cut, 0)
    batch = collate(data, MicroBatch(rows=((0, 1), (2, 3))), options)
    assert batch.input_ids.shape == (1, 40)
    assert batch.cu_seqlens is not None
    assert len(batch.cu_seqlens) == 16
    with torch.no_grad():
        together = model(**model_inputs(batch, "sdpa"), use_cache=False).logits[0, :TOTAL]
        alone = [model(input_ids=torch.tensor([sample]), use_cache=False).logits[0] for sample in samples]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_no_mask_and_no_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' mask code, which reads values on the card, is not reached."""
    from transformers import masking_utils

    model = small_model("llama")
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    with pytest.raises(TypeError, match="NoneType"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert attention.adopt(model)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(
    ("model_type", "keys", "proof"),
    [
        ("stablelm", {}, attention.Proof(rows=True)),  # its blocks do not hand bounds on
        ("llama4_text", {"attention_chunk_size": 64}, attention.Proof()),  # chunks are in its masks alone
    ],
)
def test_models_that_do_not_prove_it_keep_their_own(
    model_type: str, keys: dict[str, Any], proof: attention.Proof
) -> None:
    model = small_model(model_type, **keys)
    assert attention.adopt(model) == proof.rows
    assert ("the host waits" in attention.attention_in_words(model, "padded")) != proof.rows
    assert not attention.takes_bounds(model, torch.device("cpu"), torch.float32)


def test_unknown_wishes_of_a_block_are_refused() -> None:
    one = torch.ones(1, 1, 2, 8)
    with pytest.raises(ConfigError, match="softcap"):
        attention.attend(torch.nn.Module(), one, one, one, None, softcap=50.0)
