"""MODEL on the command line: a folder or file with a config.json, a catalogue name, or a hub id.

Only config.json is read, and only as data (see [Note: config.json] in `config.py`). The hub's cache is looked up in the
folders that huggingface_hub uses, without importing it; what is not there is fetched with the standard library, which
keeps `plan` quick and free of the training extra. A fetched config.json is not kept: the cache belongs to
huggingface_hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.errors import ConfigError, ResourceError, UnknownNameError, UsageError
from shardwise.facts import catalog
from shardwise.facts.config import model_from_config
from shardwise.vocabulary.codec import MAX_FILE_BYTES, read_text
from shardwise.vocabulary.model import ModelShape

if TYPE_CHECKING:
    from http.client import HTTPResponse

__all__ = ["FoundModel", "cached_file", "find_model", "hub_cache", "model_from_config"]

ModelOrigin = Literal["folder", "catalog", "cache", "download"]
TIMEOUT_SECONDS = 10.0
"""For connecting and for the whole of config.json, which has a few kB."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.\-/]{0,199}", re.ASCII)
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's shape, and where its weights would come from."""

    shape: ModelShape
    origin: ModelOrigin
    source: str
    """The file, catalogue entry or address that was read."""
    weights: str | None
    """Folder or hub id for from_pretrained; None for a bare config file."""


def find_model(name: str, revision: str | None = None) -> FoundModel:
    """The model that the user means.

    A folder or file wins over a catalogue name, a catalogue name over the hub, as transformers prefers what is local.

    Args:
        name: A folder or file with a config.json, a catalogue name, or a hub id `owner/name`.
        revision: Branch, tag or commit of a hub id; the catalogue is then not asked, since it knows `main` only.

    Raises:
        UnknownNameError: If it is none of these, or the hub has no such repository.
        ConfigError: If the config.json cannot be read or makes no sense; carries every problem.
        UsageError: If the hub refuses access, or the revision is not one.
        ResourceError: If the hub cannot be reached.
    """
    path = _existing(name)
    if path is not None:
        return _local(name, path)
    if revision in (None, "main") and catalog.knows("models", name):
        shape = catalog.model(name)
        return FoundModel(shape=shape, origin="catalog", source=shape.name, weights=_weights(name))
    if _HUB_ID.fullmatch(name) is None or ".." in name:
        catalog.canonical("models", name, _way_out(name))  # raises UnknownNameError
        raise UsageError(f"a revision ({revision!r}) needs a hub id, such as {catalog.hub_id(name)!r}, not {name!r}")
    return _from_hub(name, revision or "main")


def _existing(name: str) -> Path | None:
    """The folder or file of that name, if there is one."""
    # RuntimeError: ~nobody; OSError: a name too long for any file.
    with contextlib.suppress(RuntimeError, OSError, ValueError):
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    return None


def _weights(name: str) -> str:
    """The hub id as the user spelled it, or the one behind a catalogue name."""
    return name if _HUB_ID.fullmatch(name) else catalog.hub_id(name)


def _way_out(name: str) -> str:
    if "/" in name or name.endswith(".json") or name.startswith((".", "~")):
        return "No such folder or file either, and a hub id is owner/name."
    return "A folder or file with a config.json, or a hub id (owner/name), is read as well."


# --------------------------------------------------------------------------------------------------------------- local


def _local(name: str, path: Path) -> FoundModel:
    if path.is_file():
        return FoundModel(shape=_shape(path, name), origin="folder", source=str(path), weights=None)
    file = path / "config.json"
    if not file.is_file():
        base = _adapter_base(path)
        if base is not None:
            raise ConfigError(f"{name} holds a LoRA adapter, not a model; name its base model instead: {base}")
        if not path.is_dir():
            raise ConfigError(f"{name} is neither a folder nor a regular file; name the folder that holds config.json")
        raise ConfigError(f"{name} is a folder without a config.json; name the folder that holds the model's")
    return FoundModel(shape=_shape(file, name), origin="folder", source=str(file), weights=str(path))


def _adapter_base(folder: Path) -> str | None:
    """The base model of a PEFT adapter's folder; None if it is not one."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    data = _parse(read_text(file), str(file))
    base = data.get("base_model_name_or_path") if isinstance(data, Mapping) else None
    return str(base)[:200] if base else "(adapter_config.json does not say which)"


def _shape(file: Path, name: str) -> ModelShape:
    return model_from_config(_parse(read_text(file), str(file)), name)


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply to be a model's configuration") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise ConfigError(f"{where} holds a number that cannot be read: {error}") from error


# ----------------------------------------------------------------------------------------------------------------- hub


def hub_cache() -> Path:
    """The folder of downloaded repositories, by the same environment variables as huggingface_hub.

    Source: huggingface_hub, `constants.py`: HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def cached_file(hub_id: str, filename: str, revision: str = "main") -> Path | None:
    """A file of a repository's snapshot in the hub's cache, or None.

    Args:
        hub_id: `owner/name`.
        filename: Such as `config.json`.
        revision: Branch, tag or commit.
    """
    folder = hub_cache() / ("models--" + hub_id.replace("/", "--"))
    commit = revision
    with contextlib.suppress(OSError, UnicodeDecodeError):  # without a ref the revision may be a commit itself
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    if not re.fullmatch(r"[0-9A-Za-z]{1,64}", commit):
        return None
    file = folder / "snapshots" / commit / filename
    return file if file.is_file() else None


def _from_hub(hub_id: str, revision: str) -> FoundModel:
    if _REVISION.fullmatch(revision) is None or ".." in revision:
        raise UsageError(f"{revision[:60]!r} is not a revision; give a branch, a tag or a commit")
    file = cached_file(hub_id, "config.json", revision)
    if file is not None:
        return FoundModel(shape=_shape(file, hub_id), origin="cache", source=str(file), weights=hub_id)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in _TRUE:
            raise ResourceError(
                f"{hub_id} (revision {revision}) is not in the cache {hub_cache()}, and {variable} is set; "
                "download it first, name a folder, or unset the variable"
            )
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    url = f"{endpoint}/{hub_id}/resolve/{revision}/config.json"
    text = _download(url, hub_id)
    return FoundModel(shape=model_from_config(_parse(text, url), hub_id), origin="download", source=url, weights=hub_id)


def _download(url: str, hub_id: str) -> str:
    """The text at an address of the hub.

    Raises:
        UsageError, ResourceError: As in `find_model`.
    """
    import http.client
    import urllib.error
    import urllib.request

    if not url.startswith(("https://", "http://")):
        raise UsageError(f"HF_ENDPOINT must begin with https:// or http://, not {url[:60]!r}")
    token = os.environ.get("HF_TOKEN", "").strip()
    if re.fullmatch(r"[!-~]*", token) is None:  # an error further down would print it
        raise UsageError("HF_TOKEN holds blanks or characters that no token has; set it to the bare token or unset it")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "shardwise"})
        if token:
            # Not repeated after a redirect: the token belongs to the hub, not to where it sends us.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            raw = _read_all(response, url)
        return raw.decode("utf-8")
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(error.code, url, hub_id, bool(token)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{url} is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # no route, time-out, an address that is none
        reason = getattr(error, "reason", None) or error
        raise ResourceError(
            f"{url} cannot be reached ({reason}); name a catalogue model or a folder with config.json, "
            "or set HF_ENDPOINT to a mirror"
        ) from error


def _read_all(response: HTTPResponse, url: str) -> bytes:
    """The whole answer, if it is small and quick."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    raw = bytearray()
    while chunk := response.read1(65536):
        raw += chunk
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{url} has over {MAX_FILE_BYTES:,} bytes; a config.json has a few thousand")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not complete after {TIMEOUT_SECONDS:g} s")
    return bytes(raw)


def _refused(code: int, url: str, hub_id: str, has_token: bool) -> Exception:
    page = url.split("/resolve/", 1)[0]
    if code in (401, 403):
        # The hub answers 401 for private and for unknown repositories alike.
        way = "accept its terms there" if has_token else "accept its terms there and set HF_TOKEN"
        return UsageError(
            f"{hub_id} is private, gated or does not exist ({page} answers {code}); {way}, or name a folder"
        )
    if code == 404:
        return UnknownNameError("model", hub_id, catalog.known_names("models"), f"{url} answers 404.")
    return ResourceError(f"{url} answers {code}; try again later, or name a folder with config.json")
