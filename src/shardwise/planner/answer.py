"""The Plan: the search's candidates, the rules' choice, and everything that is said about it.

The recommendation is the fastest that fits, or a simpler one within 3 % of it; the rules of thumb then say what they
would have said, and where time disagrees with a rule, time wins and the answer says so.
"""

from __future__ import annotations

import dataclasses

from shardwise import __version__
from shardwise.facts.config import QUANTIZATION
from shardwise.planner import rules
from shardwise.planner.advice import advise
from shardwise.planner.compute import MATMUL_SHARE
from shardwise.planner.headline import headlines
from shardwise.planner.pricing import price
from shardwise.planner.search import Wishes, check, survey
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Candidate, Fact, Plan


def make_plan(job: Job, cluster: Cluster, wishes: Wishes | None = None) -> Plan:
    """Rank all legal strategies and pick one.

    Args:
        job: What is to be trained.
        cluster: The cards and wires.
        wishes: What the user has decided already.

    Raises:
        ConfigError: If the wishes cannot be met by any mesh, all problems at once.
    """
    wishes = wishes or Wishes()
    check(job, cluster, wishes)
    candidates, refusals = survey(job, cluster, wishes)
    open_mesh = all(getattr(wishes, name) is None for name in ("pp", "dp_replicate", "dp_shard", "tp", "zero_stage"))
    if open_mesh and not any(candidate.fits for candidate in candidates):
        wider, also_refused = survey(job, cluster, dataclasses.replace(wishes, every_axis=True))
        if any(candidate.fits for candidate in wider):
            candidates, refusals = wider, also_refused
    choice = rules.choose(job, cluster, candidates)
    best = _with_spans(job, cluster, choice.candidate) if choice.candidate else None
    ordered = tuple(best if best and each is choice.candidate else each for each in candidates)
    return Plan(
        job=job,
        cluster=cluster,
        recommended=best,
        reason=choice.reason,
        rules=choice.rules,
        candidates=ordered,
        refusals=refusals + rules.refusals_of(ordered, cluster),
        advice=advise(job, cluster, wishes, best, ordered),
        headline=headlines(job, cluster, best),
        facts=facts(cluster) + packing(job),
        version=__version__,
    )


def _with_spans(job: Job, cluster: Cluster, candidate: Candidate) -> Candidate:
    """The same candidate with its lanes kept."""
    return price(job, cluster, candidate.strategy, candidate.memory, spans=True)


def packing(job: Job) -> tuple[Fact, ...]:
    """What is assumed of a model whose files hold packed weights."""
    if not job.model.stored_as:
        return ()
    tunings = "4-bit NF4 under QLoRA, 2 bytes an element otherwise"
    value = (
        f"stored as {job.model.stored_as}; planned as the unpacked model ({tunings}), which is what is trained: "
        "fine-tune from the repository with bf16 weights"
    )
    return (Fact(name=f"{job.model.name} weights", value=value, source=f"config.json, {QUANTIZATION}"),)


def facts(cluster: Cluster) -> tuple[Fact, ...]:
    """The figures that the plan rests on, with their sources."""
    gpu, link = cluster.gpu, cluster.intra_node
    measured = bool(cluster.measurements.matmul_flops)
    share = MATMUL_SHARE.get(gpu.architecture)
    peaks = ", ".join(f"{dtype} {rate / 1e12:.1f} TFLOP/s" for dtype, rate in gpu.peak_flops.items())
    card = gpu.url or gpu.source
    wire = f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s one way, {link.attained_fraction:.0%} attained"
    rows = [
        Fact(name=f"{gpu.name} memory", value=f"{gpu.memory_bytes:,} B", source=card),
        Fact(name=f"{gpu.name} peak", value=peaks, source=card),
        Fact(
            name="matmul rate",
            value="measured table" if measured else f"{share or 0.85:.0%} of the peak",
            source="probe" if measured else "assumed by architecture",
        ),
        Fact(
            name=link.name,
            value=wire,
            source="probe" if link.curves else (link.attained_source or link.url or link.source),
        ),
    ]
    if cluster.inter_node is not None and cluster.num_nodes > 1:
        net = cluster.inter_node
        rows.append(Fact(name=net.name, value=f"{net.bandwidth_bytes_per_s / 1e9:g} GB/s one way a card",
                         source=net.attained_source or net.url or net.source))  # fmt: skip
    rows += [Fact(name="assumption", value=text, source="not measured, not said") for text in cluster.assumptions]
    return tuple(rows)
