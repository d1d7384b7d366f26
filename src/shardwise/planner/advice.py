"""Whether more cards help, where the choice changes, what the job costs, and what else is worth knowing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from shardwise.axes import engine
from shardwise.planner import changes, crossover, duration, learning_rate, reasons, rules, search
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Advice, Candidate
from shardwise.vocabulary.units import format_bandwidth, format_gb, format_percent, format_rate

WORTH_SEVERAL_RUNS = 0.7
"""Below this share of ideal, one run on each card finishes clearly more than one run over all."""
MOST_WAYS_TO_RUN = 3
CLOSE = 1.5
"""A crossover within this factor of an assumed bandwidth may lie on its other side."""


def advise(
    job: Job, cluster: Cluster, wishes: search.Wishes, best: Candidate | None, candidates: Sequence[Candidate]
) -> tuple[Advice, ...]:
    """The advice of a plan whose candidates are known."""
    here = changes.Situation(job=job, cluster=cluster, wishes=wishes)
    if best is None:
        return tuple(changes.make_it_fit(here))
    rivals = [each for each in candidates if each.fits and each.strategy.tuning == best.strategy.tuning]
    rivals = [each for each in rivals if engine.runs(each.strategy) is engine.runs(best.strategy)]
    wires = crossover.Wires(job, cluster, rivals)
    about = (
        _one_card(here, best, wires),
        _full_instead(job, best, candidates),
        *_crossovers(here, best, wires),
        duration.how_long(job, cluster, best),
        duration.packing(job, best),
        learning_rate.advice(job, best.strategy.tuning),
    )
    made = tuple(advice for advice in about if advice is not None)
    return made if engine.runs(best.strategy) else (*_make_it_run(here), *made)


def _make_it_run(here: changes.Situation) -> Iterator[Advice]:
    """What this version's engine runs instead, where all it runs is too large."""
    for advice in itertools.islice(changes.make_it_fit(here), MOST_WAYS_TO_RUN):
        message = f"To run it with this version's engine: {advice.message[0].lower()}{advice.message[1:]}"
        yield dataclasses.replace(advice, rule="make_it_run", message=message)


def _one_card(here: changes.Situation, best: Candidate, wires: crossover.Wires) -> Advice | None:
    """Whether the other cards help, and by how much on this wire."""
    cluster, wishes = here.cluster, here.wishes
    if cluster.num_gpus == 1:
        return None
    single = dataclasses.replace(cluster, num_nodes=1, gpus_per_node=1)
    same = dataclasses.replace(here.job, tuning=best.strategy.tuning)
    free = search.Wishes(micro_batch_size=wishes.micro_batch_size, checkpointing=wishes.checkpointing, loss=wishes.loss)
    fitting = [candidate for candidate in search.survey(same, single, free)[0] if candidate.fits]
    if not fitting:
        return None
    alone = max(fitting, key=lambda candidate: candidate.tokens_per_s)
    speedup = best.tokens_per_s / alone.tokens_per_s
    share = speedup / cluster.num_gpus
    wire = crossover.deciding_link(cluster).name
    message = (
        f"One card alone fits it too and trains {format_rate(alone.tokens_per_s)} tokens/s; {cluster.num_gpus} cards "
        f"over {wire} are {speedup:.2f} times as fast ({format_percent(share)} of ideal)."
    )
    edge = crossover.where_cards_stop_helping(wires, wishes, alone.tokens_per_s) if speedup > 1 else None
    if edge is not None:
        message += f" Below about {format_bandwidth(edge.bandwidth_bytes_per_s)} attained they would not help at all."
    if share >= WORTH_SEVERAL_RUNS:
        return Advice(rule="do_more_cards_help", message=message)
    message += f" If there are several runs to do, one on each card finishes {1 / share:.2g} times as many in all."
    return Advice(rule="do_more_cards_help", message=message, command="shardwise train a.yaml b.yaml --one-per-card")


def _full_instead(job: Job, best: Candidate, candidates: Sequence[Candidate]) -> Advice | None:
    """That a full fine-tune would fit too, where adapters were chosen by the rule."""
    full = [each for each in candidates if each.fits and each.strategy.tuning == "full" and engine.runs(each.strategy)]
    if job.tuning != "any" or best.strategy.tuning == "full" or not full:
        return None
    fastest = rules.fastest_or_simpler(full)
    times = fastest.step.seconds / best.step.seconds
    return Advice(
        rule="full_fine_tune_possible",
        message=f"A full fine-tune also fits, with {fastest.strategy.name}.",
        command=changes.spelled({"tuning": "full"}),
        price=(
            f"{format_rate(fastest.tokens_per_s)} tokens/s, {times:.2g} times the step, and "
            f"{format_gb(fastest.memory.needed_bytes)} a card"
        ),
    )


def _crossovers(here: changes.Situation, best: Candidate, wires: crossover.Wires) -> Iterator[Advice]:
    """The bandwidths nearest to the wire's, below and above, at which another of these candidates would be taken."""
    if here.cluster.num_gpus == 1 or len(wires.rivals) < 2:
        return
    link = crossover.deciding_link(here.cluster)
    for word, factors in (("Below", crossover.SLOWER), ("Above", crossover.FASTER)):
        found = crossover.where_choice_changes(wires, here.wishes, best, factors)
        if found is not None and found.other is not None:
            yield Advice(rule="crossover", message=f"{word} {_crossed(found, link)}.")


def _crossed(found: crossover.Crossover, link: Link) -> str:
    assert found.other is not None
    now = crossover.attained(link)
    text = (
        f"about {format_bandwidth(found.bandwidth_bytes_per_s)} attained on {link.name} (now {format_bandwidth(now)}) "
        f"{reasons.called(found.other.strategy)} would be the better choice"
    )
    if not link.curves and max(found.bandwidth_bytes_per_s / now, now / found.bandwidth_bytes_per_s) < CLOSE:
        text += "; that is close, so measure the wire: shardwise probe"
    return text
