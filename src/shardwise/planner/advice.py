"""What would make it fit, whether more cards help, and what else is worth knowing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from shardwise.planner import duration, learning_rate, rules, search
from shardwise.planner.timeline import estimate_seconds
from shardwise.planner.uncertainty import usable_bytes
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Advice, Candidate
from shardwise.vocabulary.units import format_bandwidth, format_gb, format_percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that could be done differently."""

    what: str
    job: Job
    cluster: Cluster
    wishes: search.Wishes
    flags: str
    """What to add to the command."""
    size: int
    """Smaller changes come first."""


def advise(
    job: Job, cluster: Cluster, wishes: search.Wishes, best: Candidate | None, candidates: Sequence[Candidate]
) -> tuple[Advice, ...]:
    """The advice of a plan whose candidates are known."""
    if best is None:
        return tuple(_make_it_fit(job, cluster, wishes))
    rivals = [each for each in candidates if each.fits and each.strategy.tuning == best.strategy.tuning]
    about = (
        _one_card(job, cluster, wishes, best),
        _full_instead(job, best, candidates),
        _crossover(job, cluster, best, rivals),
        duration.how_long(job, cluster, best),
        duration.packing(job, best),
        learning_rate.advice(job),
    )
    return tuple(advice for advice in about if advice is not None)


def _make_it_fit(job: Job, cluster: Cluster, wishes: search.Wishes) -> Iterator[Advice]:
    """Ranked smallest changes, each with its price."""
    found: list[tuple[int, Advice]] = []
    for change in _changes(job, cluster, wishes):
        candidates, _ = search.survey(change.job, change.cluster, change.wishes)
        fitting = [candidate for candidate in candidates if candidate.fits]
        if fitting:
            best = min(fitting, key=lambda candidate: candidate.step.seconds)
            used = format_gb(best.memory.device_bytes)
            price = f"{best.tokens_per_s:,.0f} tokens/s with {best.strategy.name}, {used} a card"
            found.append(
                (change.size, Advice(rule="make_it_fit", message=change.what, command=change.flags, price=price))
            )
    yield from (advice for _, advice in sorted(found, key=lambda pair: pair[0]))
    if not found:
        limit = format_gb(usable_bytes(cluster))
        yield Advice(
            rule="make_it_fit", message=f"Nothing that was tried fits into {limit} a card: take a smaller model."
        )


def _changes(job: Job, cluster: Cluster, wishes: search.Wishes) -> Iterator[Change]:
    replace = dataclasses.replace

    def change(what: str, flags: str, size: int, **parts: object) -> Change:
        base = {"job": job, "cluster": cluster, "wishes": wishes} | parts
        return Change(what=what, flags=flags, size=size, **base)  # type: ignore[arg-type]

    free = replace(wishes, micro_batch_size=None, accumulation=None, checkpointing=None, loss=None)
    if free != wishes:
        yield change("Leave micro-batch, checkpointing and loss to the planner", "", 0, wishes=free)
    if wishes.zero_stage is not None or wishes.dp_shard is not None or wishes.dp_replicate is not None:
        open_mesh = replace(free, zero_stage=None, dp_shard=None, dp_replicate=None)
        yield change("Leave the ZeRO stage to the planner", "", 1, wishes=open_mesh)
    if job.tuning == "full":
        yield change("Train LoRA adapters", "--tuning lora", 2, job=replace(job, tuning="lora"), wishes=free)
        yield change("Train QLoRA adapters", "--tuning qlora", 3, job=replace(job, tuning="qlora"), wishes=free)
    elif job.tuning == "lora":
        yield change("Train QLoRA adapters", "--tuning qlora", 2, job=replace(job, tuning="qlora"), wishes=free)
    if job.tuning in ("full", "any") and job.optimizer == "adamw":
        light = replace(job, optimizer="adamw_8bit")
        yield change("Keep the optimizer's moments in 8 bits", "--optimizer adamw_8bit", 4, job=light, wishes=free)
    if wishes.offload == "none" and cluster.gpu.architecture != "cpu":
        waiting = replace(free, offload="parameters", zero_stage=3 if cluster.num_gpus > 1 else None)
        yield change(
            "Let weights, gradients and moments wait in host memory", "--offload parameters", 7, wishes=waiting
        )
    for sequence in (job.sequence_length // 2, job.sequence_length // 4):
        if sequence >= 256:
            shorter = replace(job, sequence_length=sequence)
            yield change(f"Cut sequences to {sequence:,} tokens", f"--seq {sequence}", 5, job=shorter, wishes=free)
            break
    for factor in (2, 4, 8, 16):
        more = cluster.num_gpus * factor
        if cluster.gpus_per_node * factor <= 8 or cluster.inter_node is None:
            bigger = replace(cluster, gpus_per_node=cluster.gpus_per_node * factor)
        else:
            bigger = replace(cluster, num_nodes=cluster.num_nodes * factor)
        batch = replace(job, global_batch_size=-(-job.global_batch_size // more) * more)
        wider = replace(free, dp_shard=None, dp_replicate=None)
        step = change(
            f"Take {more} cards", f"--gpus {more}x{cluster.gpu.name}", 6, job=batch, cluster=bigger, wishes=wider
        )
        candidates, _ = search.survey(step.job, step.cluster, step.wishes)
        if any(candidate.fits for candidate in candidates):
            yield step
            break


def _one_card(job: Job, cluster: Cluster, wishes: search.Wishes, best: Candidate) -> Advice | None:
    """Whether the other cards help, and by how much on this wire."""
    if cluster.num_gpus == 1:
        return None
    single = dataclasses.replace(cluster, num_nodes=1, gpus_per_node=1)
    same = dataclasses.replace(job, tuning=best.strategy.tuning)
    free = search.Wishes(micro_batch_size=wishes.micro_batch_size, checkpointing=wishes.checkpointing, loss=wishes.loss)
    candidates, _ = search.survey(same, single, free)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return None
    alone = max(fitting, key=lambda candidate: candidate.tokens_per_s)
    speedup = best.tokens_per_s / alone.tokens_per_s
    share = speedup / cluster.num_gpus
    message = (
        f"One card alone trains this at {alone.tokens_per_s:,.0f} tokens/s; {cluster.num_gpus} cards are "
        f"{speedup:.2f} times as fast ({format_percent(share)} of ideal)."
    )
    if share < 0.7:
        message += f" For several runs, one on each card finishes more: {cluster.num_gpus} times one card, no wire."
    return Advice(rule="do_more_cards_help", message=message)


def _full_instead(job: Job, best: Candidate, candidates: Sequence[Candidate]) -> Advice | None:
    """That a full fine-tune would fit too, where adapters were chosen by the rule."""
    full = [each for each in candidates if each.fits and each.strategy.tuning == "full"]
    if job.tuning != "any" or best.strategy.tuning == "full" or not full:
        return None
    fastest = min(full, key=lambda candidate: candidate.step.seconds)
    return Advice(
        rule="full_fine_tune_possible",
        message=f"A full fine-tune also fits, with {fastest.strategy.name}.",
        command="--tuning full",
        price=f"{fastest.tokens_per_s:,.0f} tokens/s, {format_gb(fastest.memory.device_bytes)} a card",
    )


def _crossover(job: Job, cluster: Cluster, best: Candidate, rivals: Sequence[Candidate]) -> Advice | None:
    """The bandwidth below which another of these candidates would be faster by more than the rules overlook."""

    def winner(factor: float) -> Candidate:
        slower = _scaled(cluster, factor)
        seconds = {id(each): _seconds(job, slower, each) for each in rivals}
        fastest = min(rivals, key=lambda each: seconds[id(each)])
        near = seconds[id(best)] <= seconds[id(fastest)] * (1 + rules.WITHIN)
        return best if near else fastest

    if cluster.num_gpus == 1 or len(rivals) < 2:
        return None
    high = 1.0
    low = next((factor for factor in (0.5, 0.25, 0.1, 0.03, 0.01) if winner(factor) is not best), None)
    if low is None:
        return None
    other = winner(low)
    high = min(1.0, low * 4)
    for _ in range(4):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if winner(middle) is best else (middle, high)
    wire = _wire_of(cluster)
    bandwidth = format_bandwidth(wire.bandwidth_bytes_per_s * wire.attained_fraction * (low * high) ** 0.5)
    message = f"Below about {bandwidth} attained on the wire, {other.strategy.name} becomes the better choice."
    return Advice(rule="crossover", message=message)


def _seconds(job: Job, cluster: Cluster, candidate: Candidate) -> float:
    return estimate_seconds(Placement(job=job, strategy=candidate.strategy), cluster)


def _wire_of(cluster: Cluster) -> Link:
    return cluster.inter_node if cluster.num_nodes > 1 and cluster.inter_node else cluster.intra_node


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with its slowest wire slower by a factor."""

    def slower(link: Link) -> Link:
        curves = tuple(
            dataclasses.replace(
                curve, points=tuple(dataclasses.replace(p, seconds=p.seconds / factor) for p in curve.points)
            )
            for curve in link.curves
        )
        return dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, curves=curves)

    if cluster.num_nodes > 1 and cluster.inter_node:
        return dataclasses.replace(cluster, inter_node=slower(cluster.inter_node))
    return dataclasses.replace(cluster, intra_node=slower(cluster.intra_node))
