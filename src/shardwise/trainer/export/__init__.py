"""A plain Hugging Face folder from a sharded model, without the whole model on any rank.

One tensor at a time is gathered by the ranks that hold its shards, and written by the rank that its file belongs to;
files are dealt out among the ranks, so that all of them write. Peak memory beyond the model: on the device the largest
tensor in the model's type and once more in the export's (the embedding, usually); on the host three such tensors.
Merging adapters gathers one layer's weight in fp32 besides.

The folder appears under its name only when it is complete and durable. `shardwise_export.json` in it lists every file
with size and hash; a later export to the same name replaces a folder only if it holds nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shardwise.trainer.checkpoint.folder import check_disk
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.export.companions import complete, make_room, write_companions, write_index
from shardwise.trainer.export.files import deal, file_names, gather_specs, write_files
from shardwise.trainer.export.options import ExportOptions, ExportReport
from shardwise.trainer.export.pieces import find_pieces, is_adapter
from shardwise.trainer.export.verify import ExportCheck, verify_export

__all__ = ["ExportCheck", "ExportOptions", "ExportReport", "export", "verify_export"]


def export(
    model: nn.Module, folder: str | Path, *, tokenizer: Any = None, options: ExportOptions | None = None
) -> ExportReport:
    """Write a folder that `AutoModelForCausalLM.from_pretrained`, or for adapters `PeftModel`, loads. On every rank.

    Args:
        model: A transformers model or PeftModel, sharded or not.
        folder: The folder to make, on storage that all machines share.
        tokenizer: Saved beside the weights, with its chat template.
        options: Type, merging, file sizes, model card.

    Returns:
        What was written.

    Raises:
        CheckpointError: The folder exists and holds other files, the model cannot be exported, or ties have come apart.
        ResourceError: The disk has no room.
    """
    options, folder, ranks = options or ExportOptions(), Path(folder), Ranks.create()
    try:
        partial = folder.with_name(folder.name + ".partial")
        ranks.by_coordinator(lambda: make_room(folder, partial))
        pieces, dropped = ranks.agree(lambda: find_pieces(model, options))
        files = deal(gather_specs(pieces, ranks), options.max_shard_bytes, single=is_adapter(model, options))
        names = file_names(len(files), adapter=is_adapter(model, options))
        num_bytes = sum(spec.num_bytes for file in files for spec in file.specs)
        ranks.by_coordinator(lambda: check_disk(folder.parent, num_bytes))
        mine = write_files(partial, files, names, pieces, ranks)
        records = [record for several in ranks.all_gather(mine) for record in several]

        def finish() -> None:
            if len(files) > 1:
                write_index(partial, files, names, num_bytes)
            write_companions(model, partial, tokenizer, options)
            complete(folder, partial, records)

        ranks.by_coordinator(finish)
        num_tensors = sum(len(file.specs) for file in files)
        return ExportReport(folder=folder, num_tensors=num_tensors, num_bytes=num_bytes, dropped=tuple(dropped))
    finally:
        ranks.close()
