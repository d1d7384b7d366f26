"""What to read and how to tokenize it, spelled as in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """One data set, and the settings that decide its tokens."""

    source: str
    """A file (.jsonl, .json, .csv, .parquet, .arrow; the first three also .gz), a folder written by `save_to_disk`,
    or a hub id. `#500` or `[:500]` behind it takes the first 500 rows."""
    split: str = "train"
    """Split of a hub data set or a saved folder."""
    subset: str | None = None
    """Configuration of a hub data set, such as `default`."""
    column_map: Mapping[str, str] = field(default_factory=dict[str, str])
    """Renames columns before their meaning is looked for: `{"question": "prompt"}`."""
    max_length: int = 1024
    """Longer samples are cut here, and counted."""
    assistant_only_loss: bool = True
    """Conversations: learn the assistant's tokens only. False learns every token."""
    completion_only_loss: bool = True
    """`prompt` + `completion`: learn the completion only. False learns every token."""
    chat_template_path: str | None = None
    """Path of a jinja file that replaces the tokenizer's chat template."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read or used, and count them; otherwise they are an error."""
    streaming: bool = False
    """Read the source window by window while training ([Note: windows] of stream.py); never held as a whole."""
    num_workers: int | None = None
    """Processes for rendering and tokenizing; None decides by the size of the set, 0 and 1 stay in this process."""
    cache_dir: Path | None = None
    """Where tokenized sets are kept; None means no cache: memory only."""
