"""MODEL on the command line: folder, file, catalogue name, cached or fetched hub id."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardwise.errors import ConfigError, ResourceError, UnknownNameError, UsageError
from shardwise.facts import hub

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": 131,
}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test looks at this machine's cache or reaches the real hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def cache(root: Path, hub_id: str = "me/tiny", ref: str = "main", **changes: Any) -> Path:
    """A repository in the layout that huggingface_hub keeps."""
    folder = root / ("models--" + hub_id.replace("/", "--"))
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(COMMIT)
    blob = folder / "blobs" / "abc"
    blob.parent.mkdir(exist_ok=True)
    blob.write_text(json.dumps({**CONFIG, **changes}))
    (snapshot / "config.json").symlink_to(blob)
    return snapshot / "config.json"


# --------------------------------------------------------------------------------------------------------------- local


def test_folder_and_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    folder = hub.find_model(str(tmp_path))
    assert (folder.origin, folder.weights, folder.source) == ("folder", str(tmp_path), str(file))
    assert folder.shape.num_hidden_layers == 3
    alone = hub.find_model(str(file))
    assert (alone.origin, alone.weights) == ("folder", None)
    assert alone.shape.num_parameters == folder.shape.num_parameters


def test_a_folder_wins_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2.5-7b").mkdir()
    (tmp_path / "qwen2.5-7b" / "config.json").write_text(json.dumps(CONFIG))
    assert hub.find_model("qwen2.5-7b").shape.hidden_size == 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON: line 1"),
        ("[]", "must hold an object"),
        ('{"model_type": "llama", "hidden_size": NaN}', "'hidden_size' must be a whole number"),
        ('{"model_type": "llama", "hidden_size": 1e999}', "'hidden_size' must be a whole number"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "a number that cannot be read"),
        ("[" * 200_000, "nested too deeply"),
    ],
    ids=["cut", "list", "nan", "infinite", "digits", "deep"],
)
def test_a_bad_config_file(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        hub.find_model(str(tmp_path))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder without a config\.json"):
        hub.find_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    with pytest.raises(ConfigError, match="a LoRA adapter, not a model; name its base model instead: me/base"):
        hub.find_model(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------- catalogue


def test_catalogue_names_and_ids_need_no_hub() -> None:
    found = hub.find_model("qwen2.5-7b")
    assert (found.origin, found.weights) == ("catalog", "Qwen/Qwen2.5-7B")
    assert hub.find_model("Qwen/Qwen2.5-7B-Instruct").weights == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("name", ["", "qwen2.5-8b", "./nowhere", "~nobody/x", "a/b/c", "me/..", "/dev", "x" * 5000])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(UsageError):
        hub.find_model(name)


def test_a_revision_needs_a_hub_id() -> None:
    with pytest.raises(UsageError, match=r"needs a hub id, such as 'Qwen/Qwen2\.5-7B'"):
        hub.find_model("qwen2.5-7b", "v1")


# --------------------------------------------------------------------------------------------------------------- cache


def test_cached_snapshot(tmp_path: Path) -> None:
    file = cache(tmp_path / "hf" / "hub")
    found = hub.find_model("me/tiny")
    assert (found.origin, found.weights, found.source) == ("cache", "me/tiny", str(file))


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_cache_folders_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    cache(tmp_path / "elsewhere")
    assert hub.find_model("me/tiny").origin == "cache"


def test_cache_under_xdg_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_revisions(tmp_path: Path) -> None:
    cache(tmp_path / "hf" / "hub", ref="v1")
    assert hub.find_model("me/tiny", "v1").origin == "cache"
    assert hub.find_model("me/tiny", COMMIT).origin == "cache"
    with pytest.raises(ResourceError, match=r"revision main\) is not in the cache .* HF_HUB_OFFLINE is set"):
        hub.find_model("me/tiny")
    for hostile in ("../../etc", "-x", "a b"):
        with pytest.raises(UsageError, match="is not a revision"):
            hub.find_model("me/tiny", hostile)


# ------------------------------------------------------------------------------------------------------------ download


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one repository."""

    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        Hub.seen.append((self.path, self.headers.get("Authorization")))
        owner = self.path.split("/")[1]
        body = {"bytes": b"\xff\xfe", "text": b"<html>", "large": b" " * (17 * 2**20)}.get(
            owner, json.dumps(CONFIG).encode()
        )
        if owner == "moved":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.headers['Host'].rsplit(':')[1]}/cdn/x/config.json")
            self.end_headers()
            return
        code = {"gone": 404, "gated": 403, "broken": 500}.get(owner, 200)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    Hub.seen.clear()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}/")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(fake_hub: str) -> None:
    found = hub.find_model("me/tiny", "v1")
    assert (found.origin, found.weights) == ("download", "me/tiny")
    assert found.source == f"{fake_hub}/me/tiny/resolve/v1/config.json"
    assert Hub.seen == [("/me/tiny/resolve/v1/config.json", None)]


def test_the_token_goes_to_the_hub_and_not_where_it_redirects(fake_hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert hub.find_model("moved/tiny").origin == "download"
    assert Hub.seen == [("/moved/tiny/resolve/main/config.json", "Bearer secret"), ("/cdn/x/config.json", None)]


@pytest.mark.usefixtures("fake_hub")
def test_a_broken_token_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sec ret")
    with pytest.raises(UsageError, match="HF_TOKEN holds blanks") as caught:
        hub.find_model("me/tiny")
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("gone/tiny", UnknownNameError, "answers 404"),
        ("gated/tiny", UsageError, "accept its terms there and set HF_TOKEN"),
        ("broken/tiny", ResourceError, "answers 500"),
        ("text/tiny", ConfigError, "is not JSON"),
        ("bytes/tiny", ConfigError, "is not UTF-8"),
        ("large/tiny", ConfigError, "has over 16,777,216 bytes"),
    ],
)
@pytest.mark.usefixtures("fake_hub")
def test_what_a_hub_may_answer(name: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        hub.find_model(name)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no such host", "http://[bad"])
def test_no_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ResourceError, match="cannot be reached"):
        hub.find_model("me/tiny")


def test_an_endpoint_that_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(UsageError, match="must begin with https"):
        hub.find_model("me/tiny")
