"""Export from shards, verified by reload; and loading from files by shard."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import VOCAB, lay_out, make_model
from checkpoint_pool import Pool
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.trainer.export import ExportOptions, export, verify_export
from shardwise.trainer.weights import load_pretrained_sharded, plain_name, rebuild_rotary

pytestmark = pytest.mark.distributed
TOKENS = torch.arange(24).reshape(2, 12) * 7 % VOCAB


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as started:
        yield started


def _export(folder: str, layout: str, kind: str, tied: bool, dtype: torch.dtype) -> tuple[Any, Any, list[float]]:
    """Export, reload and compare; then load the files into an empty sharded model and compare that."""
    options = ExportOptions(dtype=dtype, max_shard_bytes=15_000, base_model="org/base", datasets=("org/data",))
    model, _ = lay_out(make_model(kind, tied=tied, seed=3), layout)
    report = export(model, folder, options=options)
    check = verify_export(model, folder, TOKENS, options=options)
    with torch.device("meta"):
        empty = make_model(kind, tied=tied)
    empty, _ = lay_out(empty, layout)
    empty.to_empty(device="cpu")
    empty.tie_weights()
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.fill_(float("nan"))  # what `to_empty` leaves may be right by chance
    loaded = load_pretrained_sharded(empty, folder)
    assert rebuild_rotary(empty) == ("model.rotary_emb",)
    again = verify_export(empty, folder, TOKENS, options=options)
    return report, check, [again.max_logit_difference, loaded.bytes_read, loaded.num_tensors]


@pytest.mark.parametrize(
    ("layout", "size", "kind", "tied", "dtype"),
    [
        ("plain", 1, "llama", True, torch.float32),
        ("fsdp", 2, "llama", True, torch.float32),
        ("fsdp", 2, "qwen2", False, torch.bfloat16),
        ("fsdp", 4, "qwen2", True, torch.float32),
        ("hsdp", 4, "llama", False, torch.float32),
        ("tp+fsdp", 4, "llama", False, torch.float32),
    ],
)
def test_an_export_is_the_model_and_loads_again_by_shards(
    pool: Pool, tmp_path: Path, layout: str, size: int, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = tmp_path / "final"
    answers = pool.run(size, _export, str(folder), layout, kind, tied, dtype)
    num_tensors = 2 * (9 if kind == "llama" else 12) + (2 if tied else 3)
    for report, check, (again, _, num_loaded) in answers:
        assert report.num_tensors == check.num_tensors == num_loaded == num_tensors
        assert report.dropped == (("lm_head.weight",) if tied else ())
        limit = 2e-6 if dtype == torch.float32 else 0.02  # tensor parallelism sums in another order
        assert max(check.max_logit_difference, again) <= limit
    copies = 2 if layout == "hsdp" else 1
    whole = answers[0][0].num_bytes
    assert whole <= sum(answer[2][1] for answer in answers) <= whole * copies + (size - 1) * 60_000 * ("tp" in layout)
    _check_folder(folder, tied, whole)


def _check_folder(folder: Path, tied: bool, num_bytes: int) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "README.md", "shardwise_export.json"} < names
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_bytes
    files = set(index["weight_map"].values())
    assert files == {name for name in names if name.endswith(".safetensors")}
    for file in files:
        stored = load_file(folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(stored)
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0] in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: org/base\nlibrary_name: transformers\n")
    assert "- org/data" in card


def _adapters(folder: str, layout: str, dora: bool) -> list[float]:
    from peft import LoraConfig, get_peft_model

    base = Path(folder) / "base"
    model = make_model(tied=False, seed=4)
    if dist.get_rank() == 0:
        model.save_pretrained(base)
    dist.barrier()
    adapted: Any = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", use_dora=dora, modules_to_save=["lm_head"])
    )
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=1.0 if "magnitude" in name else 0.0, std=0.1)
    adapted, _ = lay_out(adapted, layout)
    options = ExportOptions(base_model="org/base")
    export(adapted, Path(folder) / "adapter", options=options)
    check = verify_export(adapted, Path(folder) / "adapter", TOKENS, base_folder=base, options=options)
    merging = ExportOptions(merge=True, dtype=torch.float32)
    export(adapted, Path(folder) / "merged", options=merging)
    merged = verify_export(adapted, Path(folder) / "merged", TOKENS, options=merging)
    adapted.disable_adapter_layers()
    effect = (adapted(input_ids=TOKENS).logits - _reference(Path(folder) / "merged")).abs().max().item()
    return [check.max_logit_difference, merged.max_logit_difference, effect]


@torch.no_grad()
def _reference(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=TOKENS).logits


@pytest.mark.parametrize(("layout", "size", "dora"), [("plain", 1, True), ("fsdp", 2, False)])
def test_adapters_load_with_peft_and_merge(pool: Pool, tmp_path: Path, layout: str, size: int, dora: bool) -> None:
    for alone, merged, effect in pool.run(size, _adapters, str(tmp_path), layout, dora):
        assert alone <= 1e-6
        assert merged <= 2e-6
        assert effect > 1e-2  # the adapters do something
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["inference_mode"]
    assert config["base_model_name_or_path"] == "org/base"
    assert "library_name: peft" in (tmp_path / "adapter" / "README.md").read_text()


def test_an_export_does_not_replace_what_is_not_one(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    model = make_model()
    export(model, folder)
    export(model, folder)  # its own may be replaced
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        export(model, folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_weights_that_were_tampered_with_do_not_pass_the_check(tmp_path: Path) -> None:
    model = make_model()
    export(model, tmp_path / "final", options=ExportOptions(dtype=torch.float32))
    stored = load_file(tmp_path / "final" / "model.safetensors")
    stored["model.norm.weight"][3] *= 1.001
    save_file(stored, tmp_path / "final" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight differs from the model in memory"):
        verify_export(model, tmp_path / "final", TOKENS, options=ExportOptions(dtype=torch.float32))


def test_ties_that_have_come_apart_are_not_exported(tmp_path: Path) -> None:
    model = make_model(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        export(model, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_shared_head_that_the_configuration_does_not_tie_is_written_twice(tmp_path: Path) -> None:
    model = make_model(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    options = ExportOptions(dtype=torch.float32)
    export(model, tmp_path / "final", options=options)
    assert "lm_head.weight" in load_file(tmp_path / "final" / "model.safetensors")
    assert verify_export(model, tmp_path / "final", TOKENS, options=options).max_logit_difference <= 1e-6


@pytest.fixture
def plain_folder(tmp_path: Path) -> Path:
    make_model(tied=False, seed=1).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def _rewrite(folder: Path, change: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def test_every_misfit_is_named_at_once_and_nothing_is_loaded(plain_folder: Path) -> None:
    def change(stored: dict[str, torch.Tensor]) -> None:
        del stored["model.norm.weight"]
        stored["model.extra.weight"] = torch.ones(1)
        stored["lm_head.weight"] = torch.ones(3, 24)
        stored["model.layers.0.mlp.up_proj.weight"] = torch.ones(44, 24, dtype=torch.int8)
        stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)  # old files have it; it is ignored

    _rewrite(plain_folder, change)
    model = make_model(tied=False, seed=2)
    before = model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_pretrained_sharded(model, plain_folder)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in ("has no model.norm.weight", "holds model.extra.weight", "(3, 24) in the file", "is torch.int8"):
        assert part in text
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_model_on_meta_and_a_folder_without_weights_are_refused(plain_folder: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = make_model(tied=False)
    with pytest.raises(CheckpointError, match="to_empty"):
        load_pretrained_sharded(empty, plain_folder)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled weights"):
        load_pretrained_sharded(make_model(), tmp_path)


@pytest.mark.parametrize("file", ["../plain/model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_cannot_name_files_elsewhere(plain_folder: Path, file: str) -> None:
    index = {"weight_map": {"lm_head.weight": file}}
    (plain_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no safetensors file of the folder"):
        load_pretrained_sharded(make_model(), plain_folder)


def test_adapters_around_the_model_do_not_change_its_names(plain_folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(
        make_model(tied=False, seed=2), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    assert load_pretrained_sharded(adapted, plain_folder).num_tensors == 21
    with torch.no_grad():
        found = adapted(input_ids=TOKENS).logits
    torch.testing.assert_close(found, _reference(plain_folder))  # lora_B starts at zero
    assert plain_name("base_model.model.model.layers.0.q_proj.lora_A.default.weight") is None


def test_the_tokenizer_lies_beside_the_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    export(make_model(), tmp_path / "final", tokenizer=tokenizer)
    assert (tmp_path / "final" / "chat_template.jinja").read_text() == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "final").encode("a") == [0]
