"""A micro-batch as torch tensors.

    padded   [rows, T]     one document a row, padding on the right, attention_mask
    packed   [rows, T]     several documents a row, document_ids, padding on the right as a document of its own
    flat     [1, T]        all rows one after the other, document_ids and cu_seqlens: no padding but the last few tokens

Padding at the end of a packed or flat row has document id -1 and positions that start at 0, so every kind of
attention treats it as one more document: nothing attends to it from outside, and no row of a mask is empty.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.data.store import TokenizedSet

IGNORE_INDEX = -100
"""The label that the loss skips; torch's default `ignore_index`."""
PADDING_DOCUMENT = -1
"""The document id of padding."""

LOSS_ROWS_MULTIPLE = 128
"""Tokens with logits are rounded up to it, as matrix kernels cut them."""

Layout = Literal["padded", "packed", "flat"]


@dataclass(frozen=True, kw_only=True)
class CollateOptions:
    """The form of the tensors."""

    pad_token_id: int
    """Fills the padding; any valid token id will do, since nothing looks at it."""
    layout: Layout = "padded"
    """`padded`, `packed` or `flat`; a micro-batch with several documents a row cannot be `padded`."""
    pad_to_multiple_of: int = 8
    """T is rounded up to it: 8 for tensor cores, the tensor-parallel degree for sequence parallelism."""
    row_length: int | None = None
    """T, if it must always be the same (static shapes for compile); otherwise the longest row decides."""
    pad_documents: bool = False
    """`flat` only: empty documents at the end and a rounded max_seqlen, so that both take few values, for compile."""
    num_rows: int | None = None
    """B, if it must always be the same: missing rows are filled with padding. Not for `flat`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch, ready for the model."""

    input_ids: Tensor
    """Token ids. [B, T] int64"""
    labels: Tensor
    """Not shifted, -100 where nothing is learned ([Note: labels]). [B, T] int64"""
    position_ids: Tensor
    """Position in the own document, from 0. [B, T] int64"""
    attention_mask: Tensor | None = None
    """`padded` only: 1 for data, 0 for padding. Causal attention gives the same without it. [B, T] int64"""
    document_ids: Tensor | None = None
    """`packed` and `flat` only: number of the document in its row, from 0; -1 for padding. [B, T] int32"""
    cu_seqlens: Tensor | None = None
    """`flat` only: where each document starts, and T; padding is the last document. [documents + 1] int32"""
    loss_rows: Tensor | None = None
    """Which of the B * T tokens get logits: those that have something to learn, and others up to a multiple of
    LOSS_ROWS_MULTIPLE; None: all of them. The number is known on the host. [N] int64"""
    max_seqlen: int = 0
    """Tokens of the longest document, padding as a document included."""
    sample_ids: tuple[int, ...] = ()
    """The samples inside, in order: to find one that two ranks have."""
    num_tokens: int = 0
    """Tokens that are data."""
    num_supervised_tokens: int = 0
    """Tokens that are predicted and learned, after the shift; 0 is legal and gives a loss of 0."""

    @property
    def is_empty(self) -> bool:
        """True if there is no sample inside: forward it for the collectives' sake, and multiply its loss by 0."""
        return not self.sample_ids

    @property
    def is_all_masked(self) -> bool:
        """True if nothing in it is learned: a mean over its labels would be 0 / 0."""
        return self.num_supervised_tokens == 0

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch on a device."""
        moved = {
            one.name: value.to(device, non_blocking=non_blocking)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), Tensor)
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, so that `to` can copy in the background."""
        moved = {
            one.name: value.pin_memory() for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)
        }
        return replace(self, **moved)


def collate(tokenized: TokenizedSet, micro: MicroBatch, options: CollateOptions) -> Batch:
    """Builds the tensors of one micro-batch; an empty one becomes padding that may be forwarded.

    Args:
        tokenized: The data set.
        micro: The samples.
        options: The form.

    Raises:
        ValueError: Several documents in a row of the `padded` layout, or a row longer than `row_length`.
    """
    rows = list(micro.rows)
    if options.layout == "padded" and any(len(row) > 1 for row in rows):
        raise ValueError("several documents share a row: the padded layout cannot keep them apart; use packed or flat")
    if options.layout == "flat":
        rows = [micro.sample_ids]
    num_rows = max(1, len(rows), 0 if options.layout == "flat" else options.num_rows or 0)
    documents = [[tokenized.sample(sample) for sample in row] for row in rows]
    row_tokens = [sum(len(ids) for ids, _ in row) for row in documents]
    arrays = _Arrays.filled(num_rows, _row_length(max([1, *row_tokens]), options), options.pad_token_id)
    for index, row in enumerate(documents):
        arrays.write(index, row)
    cu_seqlens = arrays.cu_seqlens() if options.layout == "flat" else None
    max_seqlen = int(arrays.position_ids.max()) + 1
    if cu_seqlens is not None and options.pad_documents:
        empty = _next_power_of_two(len(cu_seqlens), least=16) - len(cu_seqlens)
        cu_seqlens = np.append(cu_seqlens, np.full(empty, cu_seqlens[-1], dtype=np.int32))
        max_seqlen = _next_power_of_two(max_seqlen, least=128)
    return Batch(
        input_ids=torch.from_numpy(arrays.input_ids),
        labels=torch.from_numpy(arrays.labels),
        position_ids=torch.from_numpy(arrays.position_ids),
        attention_mask=torch.from_numpy(arrays.attention_mask()) if options.layout == "padded" else None,
        document_ids=None if options.layout == "padded" else torch.from_numpy(arrays.document_ids),
        cu_seqlens=None if cu_seqlens is None else torch.from_numpy(cu_seqlens),
        loss_rows=arrays.loss_rows(),
        max_seqlen=max_seqlen,
        sample_ids=micro.sample_ids,
        num_tokens=sum(row_tokens),
        num_supervised_tokens=int((arrays.labels != IGNORE_INDEX).sum()),
    )


def document_causal_mask(document_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The exact mask for scaled_dot_product_attention: causal, and never across documents.

    The fallback where no variable-length attention exists: it takes T x T entries a row.

    Args:
        document_ids: Number of the document of each token. [B, T]
        dtype: None for a bool mask, which only scaled_dot_product_attention understands. A floating dtype gives the
            mask to be added to the scores, which transformers' `eager` attention needs: it would add True as 1, and
            let every token see every other, without an error.

    Returns:
        True, or 0, where a query (third dim) may look at a key (fourth dim); False, or the least number of `dtype`,
        elsewhere. [B, 1, T, T]
    """
    same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # [B, 1, T, T]
    num_tokens = document_ids.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=document_ids.device).tril()  # [T, T]
    allowed = same_document & causal
    if dtype is None:
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


def _next_power_of_two(number: int, *, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _row_length(longest: int, options: CollateOptions) -> int:
    if options.row_length is None:
        return -(-longest // options.pad_to_multiple_of) * options.pad_to_multiple_of
    if longest > options.row_length:
        raise ValueError(f"a row of {longest} tokens does not fit row_length {options.row_length}")
    return options.row_length


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrays:
    """The numpy side of a batch while it is being filled; all [B, T]."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    document_ids: NDArray[np.int32]

    @staticmethod
    def filled(num_rows: int, row_length: int, pad_token_id: int) -> _Arrays:
        shape = (num_rows, row_length)
        return _Arrays(
            input_ids=np.full(shape, pad_token_id, dtype=np.int64),
            labels=np.full(shape, IGNORE_INDEX, dtype=np.int64),
            position_ids=np.tile(np.arange(row_length, dtype=np.int64), (num_rows, 1)),
            document_ids=np.full(shape, PADDING_DOCUMENT, dtype=np.int32),
        )

    def write(self, row: int, documents: list[tuple[NDArray[np.int32], NDArray[np.uint8]]]) -> None:
        """Writes documents one after the other; the padding behind them starts again at position 0."""
        start = 0
        for number, (ids, supervised) in enumerate(documents):
            end = start + len(ids)
            self.input_ids[row, start:end] = ids
            self.labels[row, start:end] = np.where(supervised, ids, IGNORE_INDEX)
            self.labels[row, start] = IGNORE_INDEX  # nothing in this document predicts its first token
            self.position_ids[row, start:end] = np.arange(end - start)
            self.document_ids[row, start:end] = number
            start = end
        self.position_ids[row, start:] = np.arange(self.position_ids.shape[1] - start)

    def attention_mask(self) -> NDArray[np.int64]:
        """1 for data. A row without data is all 1: a row that attends to nothing gives NaN in some kernels."""
        mask = (self.document_ids != PADDING_DOCUMENT).astype(np.int64)
        mask[~mask.any(axis=1)] = 1
        return mask

    def loss_rows(self) -> Tensor | None:
        """Tokens that get logits, each once; those that fill up have nothing to learn: [N]."""
        learned = np.zeros(self.labels.shape, dtype=bool)
        learned[:, :-1] = self.labels[:, 1:] != IGNORE_INDEX
        learned = learned.reshape(-1)
        count = int(learned.sum())
        number = max(1, -(-count // LOSS_ROWS_MULTIPLE)) * LOSS_ROWS_MULTIPLE
        if number >= len(learned):
            return None
        filling = np.flatnonzero(~learned)[: number - count]
        return torch.from_numpy(np.concatenate([np.flatnonzero(learned), filling]))

    def cu_seqlens(self) -> NDArray[np.int32]:
        """Starts of the documents of the only row, and its end: [documents + 1]."""
        starts = np.flatnonzero(self.position_ids[0] == 0)
        return np.append(starts, self.position_ids.shape[1]).astype(np.int32)
