"""Adapters and 4-bit weights: the same training however it is cut; files that PEFT and transformers load."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool
from harness import Case, Trace, batches_of, make_config, make_data, make_plan, make_stepper, whole_weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Phi3Config

from shardwise.axes.fully_shard_apply import fsdp_modules
from shardwise.levers.adapters import apply_nf4 as nf4
from shardwise.trainer.checkpoint.checkpointer import load, save
from shardwise.trainer.checkpoint.state import reseed
from shardwise.trainer.export import ExportOptions, export
from shardwise.trainer.mesh import RankMesh, build_mesh
from shardwise.trainer.model import Skeleton, build_skeleton, initialize, initialize_adapters, materialize
from shardwise.trainer.parallelize import parallelize
from shardwise.trainer.sentinels import check_buffers, verify_wrapping
from shardwise.trainer.state import app_state
from shardwise.trainer.weights import load_pretrained_sharded
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=4, tuning="lora")
DDP = replace(ONE, accumulation=2, dp_replicate=2)
ZERO_1 = replace(ONE, accumulation=2, dp_shard=2, zero_stage=1)
ZERO_3 = replace(ZERO_1, zero_stage=3)
SPLITS = {"ddp": DDP, "zero1": ZERO_1, "zero3": ZERO_3}
RANK_4 = LoraSettings(r=4)
LIMITS = {"loss": 2e-6, "norm": 5e-6, "weight": 5e-5}


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What is trained beside which model."""

    strategy: Strategy
    lora: LoraSettings = RANK_4
    steps: int = 3
    family: str = "llama"
    folder: str | None = None
    """Weights of a Hugging Face folder instead of random ones."""

    @property
    def case(self) -> Case:
        return Case(strategy=self.strategy, steps=self.steps, layers=2, hidden_size=64)

    def config(self) -> Any:
        if self.family == "phi3":
            return Phi3Config(
                vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, pad_token_id=0, tie_word_embeddings=False,
            )  # fmt: skip
        return make_config(self.case)


def quantized(adapted: Adapted) -> Adapted:
    pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes")
    return replace(adapted, strategy=replace(adapted.strategy, tuning="qlora"))


def build(adapted: Adapted) -> tuple[Skeleton, RankMesh]:
    device = torch.device("cpu")
    mesh = build_mesh(adapted.strategy, device)
    skeleton = build_skeleton(adapted.config(), adapted.strategy, adapted.lora)
    parallelize(skeleton, mesh, adapted.strategy)
    materialize(skeleton, device, adapted.strategy)
    if adapted.folder is None:
        initialize(skeleton, 3, device)
    else:
        load_pretrained_sharded(skeleton.adapted, adapted.folder)
        initialize_adapters(skeleton, 3, device)
    verify_wrapping(skeleton, mesh, adapted.strategy)
    check_buffers(skeleton.model, skeleton.buffers)
    return skeleton, mesh


def steps_of(adapted: Adapted, skeleton: Skeleton, mesh: RankMesh, stepper: Any, numbers: range) -> Trace:
    data = make_data(adapted.case)
    plan = make_plan(adapted.case, data, adapted.strategy.data_parallel)
    losses: list[float] = []
    norms: list[float] = []
    for number in numbers:
        batches = batches_of(data, plan, number, mesh.data_rank, "cpu")
        outcome = stepper.run(batches, len(batches), plan.num_supervised_tokens(number))
        loss = outcome.loss.double()
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(outcome.grad_norm.item())
    return Trace(losses=tuple(losses), norms=tuple(norms), weights=whole_weights(skeleton.model))


def train(adapted: Adapted) -> Trace:
    skeleton, mesh = build(adapted)
    stepper = make_stepper(adapted.case, skeleton, mesh)
    reseed(1, 0, mesh.data_rank)
    return steps_of(adapted, skeleton, mesh, stepper, range(adapted.steps))


_kept: dict[Any, Trace] = {}


def one_process(ranks: Pool, adapted: Adapted) -> Trace:
    alone = replace(adapted, strategy=replace(ONE, tuning=adapted.strategy.tuning))
    key = repr(alone)
    if key not in _kept:
        [_kept[key]] = ranks.run(1, train, alone)
    return _kept[key]


def check(ranks: Pool, adapted: Adapted) -> None:
    expected = one_process(ranks, adapted)
    assert expected.losses[0] != expected.losses[-1]
    for trace in ranks.run(adapted.strategy.num_ranks, train, adapted):
        found = trace.difference(expected)
        assert all(found[what] <= limit for what, limit in LIMITS.items()), found


KINDS = {
    "lora-by-name": LoraSettings(r=4, target_modules=("q_proj", "down_proj")),
    "rslora": LoraSettings(r=4, alpha=4, use_rslora=True),
    "dora": LoraSettings(r=4, use_dora=True),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_equals_one_process(ranks: Pool, kind: str, name: str) -> None:
    check(ranks, Adapted(strategy=SPLITS[name], lora=KINDS[kind]))


@pytest.mark.parametrize("name", SPLITS)
def test_4_bit_weights_equal_one_process(ranks: Pool, name: str) -> None:
    check(ranks, quantized(Adapted(strategy=SPLITS[name])))


def test_fused_modules_of_phi3_get_adapters_and_4_bits(ranks: Pool) -> None:
    for adapted in (Adapted(strategy=ZERO_3, family="phi3"), quantized(Adapted(strategy=DDP, family="phi3"))):
        check(ranks, adapted)
        names = one_process(ranks, adapted).weights
        assert any("qkv_proj.lora_B" in name for name in names)
        assert any("gate_up_proj.lora_A" in name for name in names)


def test_4_bit_dora_with_checkpointing(ranks: Pool) -> None:
    strategy = replace(ZERO_3, checkpointing="full")
    check(ranks, quantized(Adapted(strategy=strategy, lora=KINDS["dora"])))


def plain_loss(adapted: Adapted) -> tuple[float, float, int]:
    """First loss of the engine, of plain code on unpacked matrices, and how many matrices differ from the files'."""
    skeleton, _ = build(adapted)
    plain: Any = AutoModelForCausalLM.from_pretrained(str(adapted.folder), dtype=torch.float32)
    changed = 0
    for name, layer in nf4.packed_layers(skeleton.model).items():
        weight = layer.unpacked(layer.packed_weight, torch.float32).weight
        own = plain.get_submodule(name.removesuffix(".base_layer")).weight
        changed += int(0.08 < (weight - own).norm() / own.norm() < 0.1)  # NF4's error on normal values is 0.092
        own.data.copy_(weight)
    data = make_data(adapted.case)
    [batch, *_] = batches_of(data, make_plan(adapted.case, data, 1), 0, 0, "cpu")
    ours = skeleton.model(input_ids=batch.input_ids, loss_labels=batch.labels).item()
    logits = plain(input_ids=batch.input_ids).logits
    theirs = torch.nn.functional.cross_entropy(logits[0, :-1], batch.labels[0, 1:], reduction="sum")
    return ours, theirs.item(), changed


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(make_config(Adapted(strategy=ONE).case)).save_pretrained(folder)
    return str(folder)


def test_4_bit_weights_are_those_of_the_files(ranks: Pool, model_folder: str) -> None:
    [(ours, theirs, changed)] = ranks.run(1, plain_loss, quantized(Adapted(strategy=ONE, folder=model_folder)))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert changed == 14  # all seven matrices of both blocks, each within what 4 bits explain


def hashes(adapted: Adapted) -> dict[str, dict[str, str]]:
    """Hash of every packed matrix: put together from shards, and as a block sees it after gathering."""
    skeleton, _ = build(adapted)
    layers = nf4.packed_layers(skeleton.model)

    def digest(tensor: Any) -> str:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()

    stored = {name: digest(layer.packed_weight) for name, layer in layers.items()}
    for module in fsdp_modules(skeleton.model):
        module.unshard()
    gathered = {name: digest(layer.packed_weight) for name, layer in layers.items()}
    assert not any(isinstance(layer.packed_weight, DTensor) for layer in layers.values())
    return {"stored": stored, "gathered": gathered}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_bytes_cross_the_wire_unchanged(ranks: Pool, model_folder: str, precision: Any) -> None:
    """Some of the bytes are NaNs in every floating-point dtype; all must arrive."""
    adapted = quantized(Adapted(strategy=replace(ZERO_3, precision=precision), folder=model_folder))
    [alone] = ranks.run(1, hashes, replace(adapted, strategy=replace(ONE, tuning="qlora", precision=precision)))
    assert len(alone["stored"]) == 14
    for found in ranks.run(2, hashes, adapted):
        assert found["stored"] == found["gathered"] == alone["stored"]


def test_packed_size_is_the_planners() -> None:
    pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes")
    from shardwise.vocabulary.placement import NF4_DOUBLE_BYTES

    num_elements = 4096 * 11008
    assert nf4.num_packed_bytes(num_elements) == pytest.approx(NF4_DOUBLE_BYTES * num_elements, abs=8)


def train_and_export(adapted: Adapted, target: str) -> torch.Tensor:
    skeleton, mesh = build(adapted)
    stepper = make_stepper(adapted.case, skeleton, mesh)
    for group in stepper.optimizer.param_groups:
        group["lr"] = 0.05
    steps_of(adapted, skeleton, mesh, stepper, range(3))
    options = ExportOptions(dtype=torch.float32, base_model=adapted.folder)
    export(skeleton.adapted, Path(target) / "adapters", options=options)
    export(skeleton.adapted, Path(target) / "merged", options=replace(options, merge=True))
    skeleton.model.eval()
    with torch.no_grad():
        logits = skeleton.model(input_ids=torch.arange(1, 20)[None]).logits
    return logits


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", "qdora"])
def test_exported_adapters_and_merged_models_compute_the_same(
    ranks: Pool, model_folder: str, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    adapted = Adapted(strategy=ZERO_3, lora=LoraSettings(r=4, use_dora="dora" in kind), folder=model_folder)
    adapted = quantized(adapted) if kind.startswith("q") else adapted
    for logits in ranks.run(2, train_and_export, adapted, str(tmp_path)):
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        ids = torch.arange(1, 20)[None]
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
        base: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        before = base(input_ids=ids).logits
        beside: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
        after = beside(input_ids=ids).logits
        assert (after - before).abs().max() > 0.05  # they have learned something
        if not kind.startswith("q"):  # 4-bit adapters were trained beside other weights than the files'
            torch.testing.assert_close(after, logits, rtol=1e-4, atol=1e-5)


def dropped(adapted: Adapted) -> tuple[Trace, tuple[float, ...]]:
    """A training with dropout, and this rank's first draw."""
    trace = train(adapted)
    reseed(1, 0, dist.get_rank())
    return trace, tuple(torch.rand(2).tolist())


def test_dropout_is_the_same_in_every_run_and_differs_between_ranks(ranks: Pool) -> None:
    adapted = Adapted(strategy=ZERO_3, lora=LoraSettings(r=4, dropout=0.3))
    first, second = ranks.run(2, dropped, adapted), ranks.run(2, dropped, adapted)
    assert first[0][0].losses == second[0][0].losses == first[1][0].losses
    assert first[0][1] == second[0][1] != first[1][1]
    without = ranks.run(2, train, replace(adapted, lora=LoraSettings(r=4)))[0]
    assert without.losses[1:] != first[0][0].losses[1:]


def half(adapted: Adapted, folder: str, *, second: bool) -> Trace:
    skeleton, mesh = build(adapted)
    stepper = make_stepper(adapted.case, skeleton, mesh)
    app = app_state(skeleton, stepper.optimizer, adapted.strategy, {}, seed=0, data_rank=mesh.data_rank)
    if second:
        load(app, Path(folder) / "checkpoint-2")
        return steps_of(adapted, skeleton, mesh, stepper, range(2, 4))
    trace = steps_of(adapted, skeleton, mesh, stepper, range(2))
    save(app, folder, 2)
    return trace


def first_half(adapted: Adapted, folder: str) -> Trace:
    return half(adapted, folder, second=False)


def second_half(adapted: Adapted, folder: str) -> Trace:
    return half(adapted, folder, second=True)


def test_4_bit_runs_go_on_from_adapters_alone(ranks: Pool, tmp_path: Path) -> None:
    adapted = quantized(Adapted(strategy=ZERO_3, lora=KINDS["dora"], steps=4))
    straight = ranks.run(2, train, adapted)[0]
    ranks.run(2, first_half, adapted, str(tmp_path))
    assert sum(path.stat().st_size for path in (tmp_path / "checkpoint-2").glob("*.safetensors")) < 300_000
    [rest] = ranks.run(1, second_half, replace(adapted, strategy=replace(ONE, tuning="qlora")), str(tmp_path))
    found = rest.difference(replace(straight, losses=straight.losses[2:], norms=straight.norms[2:]))
    assert all(found[what] <= limit for what, limit in LIMITS.items()), found
