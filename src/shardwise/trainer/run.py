"""The entry of every rank: from a run file and a strategy to a run folder.

Data is tokenized before any process group exists, so that nobody waits for it behind a collective's timeout. Then the
ranks compare their plans; a rank with other data or another order stops the run before its first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import PlanMismatchError
from shardwise.levers.optimizer import apply as optimizers
from shardwise.trainer.attention import attention_in_words
from shardwise.trainer.checkpoint import Checkpointer, SaveOptions
from shardwise.trainer.checkpoint.state import reseed
from shardwise.trainer.data.batches import BatchOptions, BatchPlan, MicroBatch, plan_batches
from shardwise.trainer.data.collate import collate
from shardwise.trainer.data.store import TokenizedSet
from shardwise.trainer.evaluate import Sampler
from shardwise.trainer.export import ExportOptions, export
from shardwise.trainer.feeder import BatchForm, DataSource, batch_form, collate_options
from shardwise.trainer.loop import Loop, LoopParts, LoopResult
from shardwise.trainer.mesh import RankMesh, build_mesh, choose_device, join_ranks, local_rank
from shardwise.trainer.meter import Meter, MeterOptions
from shardwise.trainer.model import (
    Skeleton,
    build_skeleton,
    initialize,
    initialize_adapters,
    materialize,
)
from shardwise.trainer.optimizer import optimizer_settings
from shardwise.trainer.parallelize import parallelize, refuse_machine, refuse_unsupported
from shardwise.trainer.prepare import Prepared, RunWishes, data_lengths, data_lines, prepare_run
from shardwise.trainer.progress import Progress
from shardwise.trainer.reference import check_first_loss
from shardwise.trainer.resume import Continued, agree_restarts, disk_need, fit_ranks, resume
from shardwise.trainer.schedule import schedule_of
from shardwise.trainer.sentinels import check_buffers, check_ties, verify_wrapping, wrapped_classes
from shardwise.trainer.sentinels.hang import HangWatch, limits_of
from shardwise.trainer.sentinels.out_of_memory import MemoryWitness
from shardwise.trainer.sentinels.samples import check_effective_batch
from shardwise.trainer.sentinels.watch import watch_of
from shardwise.trainer.sentinels.world import check_world
from shardwise.trainer.state import DataPosition, RunState, app_state
from shardwise.trainer.step import Stepper, pipeline_of
from shardwise.trainer.tracking import Tracking, TrackingWish
from shardwise.trainer.weights import load_pretrained_sharded
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.measured import Measured, Sample
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

__all__ = ["RunWishes", "build_model", "data_lengths", "run_training"]

MEASURED_FILE, CLUSTER_FILE, FINAL_FOLDER = "measured.json", "cluster.yaml", "final"
MERGED_FOLDER = "merged"


def run_training(run: RunFile, strategy: Strategy, wishes: RunWishes | None = None) -> str:
    """Trains; called on every rank, by `shardwise.launch.local.launch`.

    Args:
        run: What to train on what.
        strategy: How it is split.
        wishes: Measuring, and places outside the run folder.

    Returns:
        The run folder.

    Raises:
        ShardwiseError: Whatever the user, the machine or the training got wrong.
    """
    wishes = wishes or RunWishes()
    strategy = fit_ranks(run, strategy)
    refuse_unsupported(strategy)
    device = choose_device(local_rank())
    refuse_machine(strategy, device)
    prepared = prepare_run(run, strategy, wishes)
    join_ranks(device)
    try:
        mesh = build_mesh(strategy, device)
        restarts = agree_restarts(mesh)
        if restarts:
            run = dataclasses.replace(run, resume_from_checkpoint=run.resume_from_checkpoint or True)
        start = RunStart(run=run, strategy=strategy, wishes=wishes, prepared=prepared, mesh=mesh, num_restarts=restarts)
        with guarded(start):
            return _train(start)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStart:
    """Everything that is known when the ranks have met and nothing is built yet."""

    run: RunFile
    strategy: Strategy
    wishes: RunWishes
    prepared: Prepared
    mesh: RankMesh
    num_restarts: int = 0
    """How often a launcher has started the ranks again."""
    hang: HangWatch = field(init=False)
    memory: MemoryWitness = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hang", HangWatch(limits_of(self.run.hang_timeout)))
        object.__setattr__(self, "memory", MemoryWitness(Path(self.run.output_dir), self.strategy, self.mesh))


@contextlib.contextmanager
def guarded(start: RunStart) -> Generator[None]:
    """First the world, the data and the batch are as planned; then, inside, hangs and full memory are explained.

    Raises:
        PlanMismatchError: Something is not as planned.
        TrainingError: What is inside has run out of memory.
    """
    with start.hang.running(), start.memory.explaining():
        _compare_plans(start.prepared, start.mesh)
        check_effective_batch(start.prepared.plan, start.strategy)
        said = check_world(start.mesh, start.strategy, _planned_cluster(Path(start.run.output_dir)))
        Progress(0, 0, speaks=start.mesh.is_first).say(said)
        start.hang.at("building the model", patient=True)
        yield


def _planned_cluster(folder: Path) -> Cluster | None:
    """The machines that the run folder's plan was made for; None if there is no plan (on this machine)."""
    path = folder / CLUSTER_FILE
    return codec.read_noun(Cluster, path) if path.is_file() else None


def _train(start: RunStart) -> str:
    run, strategy, mesh, folder = start.run, start.strategy, start.mesh, Path(start.run.output_dir)
    parts, sampler = assemble(start)
    loop = Loop(parts)
    answers = _Answers(sampler, run.sample_prompt)
    try:
        if parts.position.next_step == 0:
            compare_with_plain(run, parts, strategy, mesh)
            answers.take("before", parts.progress)
            if parts.held_out is not None:
                loop.evaluate(0)
        with loop.signals.noted():  # to the very end: a signal must not cut off the last save or the export
            result = loop.run()
            start.hang.at("finishing: answers, numbers, export, last save", patient=True)
            parts.checkpointer.wait()
            if not result.stopped_by:
                answers.take("after", parts.progress)
            _finish(parts, result, answers, start.prepared, start.wishes)
            parts.checkpointer.close()
        if result.stopped_by:
            parts.progress.say(
                f"Stopped by signal {result.stopped_by} after step {result.num_steps}; saved. "
                f"Go on with: shardwise train {run.output_dir} --resume"
            )
            raise SystemExit(128 + result.stopped_by)
    finally:
        if parts.tracking is not None:
            parts.tracking.close()
    return str(folder)


def compare_with_plain(run: RunFile, parts: LoopParts, strategy: Strategy, mesh: RankMesh) -> None:
    """Real weights of a small model, no foreign code: the loss of the first document is known from elsewhere."""
    reasons = {
        "its weights are random": run.random_init,
        "it brings its own code": run.trust_remote_code,
        "flash attention has no counterpart on the CPU": run.attn_implementation == "flash",
    }
    because = next((reason for reason, holds in reasons.items() if holds), None)
    said = None
    if because is None:
        first = next(micro for micro in parts.train.plan.micro_batches(0) if not micro.is_empty)
        alone = MicroBatch(rows=(first.rows[0][:1],))
        batch = collate(parts.train.tokenized, alone, dataclasses.replace(parts.train.collate, layout="padded"))
        said = check_first_loss(parts.skeleton, weights_folder(run), batch, parts.stepper)
        because = "it is too large to be loaded twice, or its first document has nothing to learn"
    parts.progress.say(said or f"First loss not compared with the plain model: {because}.")


def _compare_plans(prepared: Prepared, mesh: RankMesh) -> None:
    """Every rank must have cut the same data the same way.

    Raises:
        PlanMismatchError: Some rank has not; names it.
    """
    mine = (prepared.plan.layout_fingerprint, prepared.plan.num_steps)
    everyone: list[Any] = [None] * dist.get_world_size(mesh.control)
    dist.all_gather_object(everyone, mine, group=mesh.control)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise PlanMismatchError(
            f"Ranks {', '.join(map(str, others))} have cut the data otherwise than rank 0: their files, tokenizer or "
            "settings differ. Give every machine the same files."
        )


def build_model(run: RunFile, strategy: Strategy, mesh: RankMesh, config: Any) -> Skeleton:
    """The model as the strategy wants it, with its values, checked.

    Raises:
        PlanMismatchError: What was made differs from the plan.
        CheckpointError: The weights cannot be loaded.
    """
    lora = LoraSettings(
        r=run.lora_r,
        alpha=run.lora_alpha,
        dropout=run.lora_dropout,
        target_modules=run.lora_target_modules,
        use_dora=run.use_dora,
        use_rslora=run.use_rslora,
    )
    skeleton = build_skeleton(
        config, strategy, lora, run.attn_implementation, stage=mesh.stage, trust_remote_code=run.trust_remote_code
    )
    parallelize(skeleton, mesh, strategy)
    materialize(skeleton, mesh.device, strategy)
    if run.random_init:
        initialize(skeleton, run.seed, mesh.device)
    else:
        load_pretrained_sharded(skeleton.adapted, weights_folder(run), whole=skeleton.template)
        initialize_adapters(skeleton, run.seed, mesh.device)
    verify_wrapping(skeleton, mesh, strategy)
    check_buffers(skeleton.model, skeleton.buffers)
    check_ties(skeleton.model, skeleton.aliases)
    return skeleton


def weights_folder(run: RunFile) -> str:
    """A local folder with the weights; fetched from the hub if it is not one yet."""
    if Path(run.model_name_or_path).is_dir():
        return run.model_name_or_path
    from huggingface_hub import snapshot_download

    return snapshot_download(
        run.model_name_or_path,
        revision=run.model_revision,
        allow_patterns=["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"],
    )


def assemble(start: RunStart) -> tuple[LoopParts, Sampler | None]:
    """Builds everything that a run is made of, and goes on where a checkpoint stands if the run file says so.

    Raises:
        ShardwiseError: Whatever of it cannot be built, or is not as planned.
    """
    run, strategy, wishes, prepared, mesh = start.run, start.strategy, start.wishes, start.prepared, start.mesh
    folder, plan = Path(run.output_dir), prepared.plan
    progress = Progress(plan.num_steps, 0, speaks=mesh.is_first)
    checkpointer = Checkpointer(folder, SaveOptions(save_total_limit=run.save_total_limit))
    for line in data_lines(prepared):
        progress.say(line)
    progress.say(plan.describe())
    skeleton = build_model(run, strategy, mesh, prepared.config)
    classes = ", ".join(f"{count} {name}" for name, count in wrapped_classes(skeleton.model).items())
    progress.say(f"{strategy.name}, {strategy.precision} on {mesh.device.type}: groups {classes}")
    form = batch_form(run, skeleton.model, strategy, mesh.device)
    progress.say(attention_in_words(skeleton.model, form.layout))
    schedule = schedule_of(run, plan.num_steps, strategy)
    if run.learning_rate_base_batch is not None:
        progress.say(
            f"learning_rate {run.learning_rate:g} belongs to a batch of {run.learning_rate_base_batch}; for "
            f"{strategy.global_batch_size} it is {schedule.peak:.3g}, after {schedule.num_warmup_steps} steps of "
            "warm-up"
        )
    optimizer = optimizers.apply(skeleton.model, optimizer_settings(run, schedule.peak))
    stepper = Stepper(
        model=skeleton.model,
        optimizer=optimizer,
        strategy=strategy,
        mesh=mesh,
        max_grad_norm=run.max_grad_norm,
        attention=run.attn_implementation,
        pipeline=pipeline_of(skeleton, mesh, strategy, run.attn_implementation),
    )
    start.memory.model, start.memory.optimizer = skeleton.model, optimizer
    position, state = DataPosition(plan), RunState()
    extra: dict[str, Any] = {"data": position, "run": state}
    app = app_state(skeleton, optimizer, strategy, extra, seed=run.seed, data_rank=mesh.data_rank)
    reseed(run.seed, 0, mesh.data_rank)  # dropout: other draws on ranks that see other data, the same in every run
    continued = Continued(
        checkpointer=checkpointer, app_state=app, position=position, progress=progress, num_restarts=start.num_restarts
    )
    resume(run, continued)
    exported_bytes = _export_dtype(run, prepared.config).itemsize
    checkpointer.check_room(disk_need(run, strategy, continued, plan, exported_bytes))
    source = functools.partial(_source, prepared, mesh, form)
    tracking = None
    if mesh.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        wish = TrackingWish(
            folder=folder,
            trackers=run.report_to,
            settings=codec.to_data(run),
            run_name=run.run_name or folder.name,
            first_step=position.next_step,
        )
        tracking = Tracking(wish, progress.say)
    meter = Meter(
        MeterOptions(model=skeleton.model, optimizer=optimizer, strategy=strategy, mesh=mesh, enabled=wishes.measure)
    )
    parts = LoopParts(
        run=run,
        skeleton=skeleton,
        stepper=stepper,
        schedule=schedule,
        train=source(prepared.train, plan),
        held_out=_held_out_source(run, strategy, prepared, source),
        checkpointer=checkpointer,
        app_state=app,
        position=position,
        state=state,
        tracking=tracking,
        progress=Progress(plan.num_steps, position.next_step, speaks=mesh.is_first),
        meter=meter,
        watch=watch_of(skeleton, stepper, plan, schedule, progress.say),
        hang=start.hang,
    )
    sampler = None
    if run.sample_prompt is not None and strategy.pp > 1:
        progress.say("No sample answers during this run: its layers lie on several stages. Ask the exported model.")
    elif run.sample_prompt is not None and prepared.tokenizer is not None:
        sampler = Sampler(
            model=skeleton.model,
            tokenizer=prepared.tokenizer,
            strategy=strategy,
            device=mesh.device,
            max_new_tokens=run.sample_max_new_tokens,
        )
    return parts, sampler


def _source(
    prepared: Prepared, mesh: RankMesh, form: BatchForm, tokenized: TokenizedSet, plan: BatchPlan
) -> DataSource:
    pad = getattr(prepared.tokenizer, "pad_token_id", None)
    options = collate_options(form, plan.options, 0 if pad is None else pad)
    return DataSource(
        tokenized=tokenized, plan=plan, collate=options, data_rank=mesh.data_rank, device=mesh.device
    )  # fmt: skip


def _held_out_source(
    run: RunFile, strategy: Strategy, prepared: Prepared, source: Callable[[TokenizedSet, BatchPlan], DataSource]
) -> DataSource | None:
    if prepared.held_out is None:
        return None
    options = BatchOptions(
        global_batch=run.per_device_eval_batch_size * strategy.data_parallel,
        micro_batch=run.per_device_eval_batch_size,
        num_ranks=strategy.data_parallel,
        packing=run.packing,
        max_length=run.max_length,
        shuffle=False,
    )
    return source(prepared.held_out, plan_batches(prepared.held_out, options))


class _Answers:
    """The sample answers, before and after."""

    def __init__(self, sampler: Sampler | None, prompt: str | None) -> None:
        self._sampler, self._prompt = sampler, prompt
        self.taken: dict[str, str] = {}

    def take(self, when: str, progress: Progress) -> None:
        if self._sampler is not None and self._prompt is not None:
            self.taken[when] = self._sampler.answer(self._prompt)
            progress.say(f"Answer {when}: {self.taken[when]!r}")

    def samples(self) -> tuple[Sample, ...]:
        if self._prompt is None or not self.taken:
            return ()
        return (Sample(prompt=self._prompt, before=self.taken.get("before", ""), after=self.taken.get("after", "")),)


def _with_earlier(measured: Measured, path: Path) -> Measured:
    """What this start has not measured, because it had too few steps, stays as an earlier start has left it."""
    if not path.is_file():
        return measured
    earlier = codec.read_noun(Measured, path)
    if earlier.strategy != measured.strategy:
        return measured
    if measured.step is None:  # not one timed step
        return dataclasses.replace(
            earlier,
            num_steps=measured.num_steps,
            held_out_loss_after=measured.held_out_loss_after or earlier.held_out_loss_after,
        )
    samples = measured.samples if any(one.before for one in measured.samples) else earlier.samples or measured.samples
    return dataclasses.replace(measured, samples=samples)


def _finish(parts: LoopParts, result: LoopResult, answers: _Answers, prepared: Prepared, wishes: RunWishes) -> None:
    """Numbers of the whole, what was measured, answers, and the exported model."""
    run, plan, folder = parts.run, prepared.plan, Path(parts.run.output_dir)
    if result.train_loss is not None and parts.tracking is not None:
        values = {
            "train_runtime": result.seconds,
            "train_loss": result.train_loss,
            "train_steps_per_second": result.num_steps_here / max(result.seconds, 1e-9),
            "epoch": result.num_steps / plan.steps_per_epoch,
        }
        parts.tracking.log(values, result.num_steps)
    measured = dataclasses.replace(
        parts.meter.measured(),
        samples=answers.samples(),
        held_out_loss_before=parts.state.first_eval_loss(),
        held_out_loss_after=parts.state.last_eval_loss(),
        num_steps=result.num_steps,
        command=wishes.command,
    )
    if parts.stepper.mesh.is_first:
        if run.resume_from_checkpoint:
            measured = _with_earlier(measured, folder / MEASURED_FILE)
        (folder / MEASURED_FILE).write_text(codec.to_json(measured))
        state = parts.state.trainer_state(plan, result.num_steps, {})
        (folder / "trainer_state.json").write_text(codec.to_json(state))
    if run.save_final and not result.stopped_by:
        options = export_options(run, prepared.config)
        adapts = parts.stepper.strategy.tuning != "full"
        report = export(
            parts.skeleton.adapted,
            folder / FINAL_FOLDER,
            tokenizer=prepared.tokenizer,
            options=dataclasses.replace(options, dtype=None) if adapts else options,  # adapters stay fp32
        )
        parts.progress.say(f"Exported {report.num_tensors} tensors to {report.folder}")
        if run.merge_adapters and adapts:
            merged = export(
                parts.skeleton.adapted,
                folder / MERGED_FOLDER,
                tokenizer=prepared.tokenizer,
                options=dataclasses.replace(options, merge=True),
            )
            parts.progress.say(f"Exported {merged.num_tensors} tensors, adapters merged, to {merged.folder}")


def export_options(run: RunFile, config: Any) -> ExportOptions:
    """How a run's model is exported."""
    return ExportOptions(
        base_model=run.model_name_or_path, datasets=(run.dataset_name or "",), dtype=_export_dtype(run, config)
    )  # fmt: skip


def _export_dtype(run: RunFile, config: Any) -> torch.dtype:
    """What the model came in, so that it leaves as it came; the fp32 masters stay in the checkpoints."""
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    return torch.bfloat16 if run.bf16 else torch.float32
