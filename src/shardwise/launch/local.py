"""Start ranks on this machine through torch's elastic launcher, and bring back what they return or raise.

[Note: errors of ranks]
When one rank fails, the others fail a moment later with "connection closed" and the like. Each rank writes what it
raised to a file of its own; the launcher reads them all and raises the earliest, as the very class it was. So a user
sees "data.jsonl, line 7: ...", not a launcher's table of exit codes. Ranks that are started again leave their words in
a folder of that attempt.

[Note: restarts]
After a rank is lost, torch's elastic launcher ends the others and starts all of them again, up to `max_restarts` times;
the run then goes on from its newest good checkpoint. What a restart cannot mend (a wrong run file, other data than
planned) is raised again at once instead.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import CheckpointError, PlanMismatchError, ShardwiseError, TrainingError, UsageError
from shardwise.launch.environment import NodeEnvironment, RankEnvironment, node_environment, rank_environment
from shardwise.launch.stopping import STOPPED_FILE, TORCHS_OWN, Stopping
from shardwise.vocabulary import last_words
from shardwise.vocabulary.restarts import restart_count
from shardwise.vocabulary.run import RunFile

_MAX_CUDA_THREADS = 8
"""Host threads of a rank that computes on a card: it only launches kernels and builds batches."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How to start ranks."""

    num_ranks: int
    """On all machines together."""
    device: Literal["cuda", "cpu"]
    """What the ranks compute on; decides the host threads of each."""
    max_restarts: int = 0
    """How often all ranks are started again after one was lost ([Note: restarts]). Above 0, a launcher that is there
    already may bring another number of ranks than `num_ranks`: the entry must ask how many there are."""
    shutdown_timeout: float = 600.0
    """How long the ranks may take to save after a stop signal, in seconds; then they are killed."""

    @classmethod
    def of_run(cls, run: RunFile, num_ranks: int, *, cuda: bool) -> LaunchOptions:
        """As a run file says."""
        return cls(
            num_ranks=num_ranks,
            device="cuda" if cuda else "cpu",
            max_restarts=run.max_restarts,
            shutdown_timeout=run.shutdown_timeout,
        )


@dataclass(frozen=True)
class _Ended:
    """What a rank hands back instead of a result if it ended by `SystemExit`: after a signal it has saved for."""

    code: int


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Host threads of each rank, and why."""

    count: int
    reason: str


def choose_threads(options: LaunchOptions, num_cores: int, environ: Mapping[str, str]) -> Threads:
    """How many threads each rank's matrix products and copies use on the host (OMP_NUM_THREADS)."""
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return Threads(count=int(given), reason="OMP_NUM_THREADS was set")
    share = max(1, num_cores // options.num_ranks)
    if options.device == "cuda":
        count = min(share, _MAX_CUDA_THREADS)
        return Threads(count=count, reason=f"{num_cores} cores for {options.num_ranks} ranks, at most {count} each")
    return Threads(count=share, reason=f"{num_cores} cores shared by {options.num_ranks} ranks")


def launch(entry: Callable[..., Any], args: tuple[Any, ...], options: LaunchOptions) -> Any:
    """Run `entry(*args)` on every rank and return what this machine's first rank returns.

    In a process that torchrun or Slurm has started as one rank of several, runs it here and now, as that rank.

    Args:
        entry: A function of a module; it and `args` are pickled to the ranks, its result back.
        args: The same for every rank.
        options: How many ranks, on what.

    Raises:
        ShardwiseError: What the first failing rank raised, if it was one; the same class and words.
        TrainingError: A rank raised something else or died; names the rank and the reason.
        UsageError: The environment's ranks are not as many as the plan needs.
        SystemExit: A signal has stopped the ranks; 128 and its number.
    """
    joined = rank_environment(os.environ)
    if joined is not None:
        _check_joined(joined, options)
        os.environ.update(joined.variables())
        return entry(*args)
    node = node_environment(os.environ)
    if options.num_ranks % node.num_nodes:
        raise UsageError(f"{options.num_ranks} ranks do not divide over {node.num_nodes} machines (PET_NNODES).")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = choose_threads(options, cores, os.environ)
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as folder, _environment(threads):
        return _elastic((entry, args, folder), options, node)


def _check_joined(joined: RankEnvironment, options: LaunchOptions) -> None:
    if joined.world_size != options.num_ranks and not options.max_restarts:
        raise UsageError(
            f"{joined.launcher} has started {joined.world_size} ranks, but the plan needs {options.num_ranks}. "
            f"Start {options.num_ranks}, make a plan for {joined.world_size}, or set max_restarts: a run that may be "
            "restarted goes on with the ranks that are left."
        )


def _run_rank(entry: Callable[..., Any], args: tuple[Any, ...], error_folder: str) -> Any:
    """What a started process runs: the entry, with its error kept in a file."""
    _die_with_parent()
    attempt = restart_count(os.environ)
    folder = _attempt_folder(Path(error_folder), attempt)
    folder.mkdir(exist_ok=True)
    os.environ[last_words.FOLDER_VARIABLE] = str(folder)
    if (Path(error_folder) / STOPPED_FILE).exists():
        return _Ended(128 + signal.SIGTERM)  # started again although the user has asked to stop
    try:
        if attempt:
            _raise_what_stays(_attempt_folder(Path(error_folder), attempt - 1))
        return entry(*args)
    except (SystemExit, KeyboardInterrupt) as ended:
        code = ended.code if isinstance(ended, SystemExit) else 128 + signal.SIGINT
        if code is not None and not isinstance(code, int):
            raise
        return _Ended(code or 0)  # an exit code would look like a failure, and be started again
    except BaseException as error:
        last_words.leave(int(os.environ.get("RANK", "0")), error)
        raise


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt}"


def _raise_what_stays(before: Path) -> None:
    """Raises the error of the attempt before again if another attempt would only come to it once more."""
    for record in filter(last_words.is_ours, last_words.read(before)):
        error = last_words.as_error(record)
        if isinstance(error, (UsageError, PlanMismatchError)):
            raise error


def _elastic(
    started: tuple[Callable[..., Any], tuple[Any, ...], str], options: LaunchOptions, node: NodeEnvironment
) -> Any:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    several = node.num_nodes > 1
    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=options.num_ranks // node.num_nodes,
        run_id=os.environ.get("PET_RDZV_ID", "shardwise") if several else f"shardwise-{os.getpid()}",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=f"{node.master_addr}:{node.master_port}",
        rdzv_configs={"rank": node.node_rank} if several else {},
        local_addr=None if several else "127.0.0.1",
        max_restarts=options.max_restarts,
        start_method="spawn",
        log_line_prefix_template="",
        signals_to_handle=TORCHS_OWN,
    )
    with _quiet_launcher(), Stopping(Path(started[2]), options.shutdown_timeout) as stopping:
        try:
            results: dict[int, Any] = elastic_launch(config, _run_rank)(*started)
        except ChildFailedError as failed:
            if stopping.number:  # killed before they could save, or because they took too long
                raise SystemExit(128 + stopping.number) from None
            raise _first_error(Path(started[2]), failed.failures, options) from None
        except SignalException as stopped:
            raise SystemExit(128 + int(stopped.sigval)) from None
    if ended := [result.code for result in results.values() if isinstance(result, _Ended)]:
        raise SystemExit(max(ended) if not stopping.number else 128 + stopping.number)  # as a shell expects it
    return results[min(results)]


def _first_error(folder: Path, failures: Mapping[int, Any], options: LaunchOptions) -> ShardwiseError:
    """What the ranks of the last attempt have failed of."""
    attempts = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
    said = last_words.read(attempts[-1]) if attempts else []
    killed = [failure for failure in failures.values() if failure.exitcode < 0]
    if killed and not any(map(_is_a_cause, said)):
        # A rank that was killed says nothing; the others' complaints about the lost connection are its echo.
        first = min(killed, key=lambda failure: failure.timestamp)
        notice = _death_notice(first.local_rank, -first.exitcode)
        if options.max_restarts:
            notice += f" It was started again {len(attempts) - 1} times (max_restarts {options.max_restarts})."
        return TrainingError(notice)
    if not said:
        codes = ", ".join(f"rank {rank}: {failure.exitcode}" for rank, failure in failures.items())
        return TrainingError(f"The ranks ended without a word (exit codes {codes}). Their output above may say why.")
    first_of_ours = next(filter(last_words.is_ours, said), said[0])
    return last_words.as_error(next(filter(_is_a_cause, said), first_of_ours))


def _is_a_cause(record: Mapping[str, Any]) -> bool:
    """Whether a rank's error can be why another was killed; a save that is cut off is an echo of that."""
    return last_words.is_ours(record) and record["class"] != CheckpointError.__name__


def _death_notice(rank: int, number: int) -> str:
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    hint = (
        " Mostly the machine ran out of host memory: see `dmesg`, and use fewer ranks or a smaller micro-batch."
        if number == signal.SIGKILL
        else ""
    )
    return f"Rank {rank} was killed by signal {number} ({name}).{hint} Resume from the newest checkpoint with --resume."


@contextlib.contextmanager
def _environment(threads: Threads) -> Generator[None]:
    """Sets OMP_NUM_THREADS for the ranks, for as long as they are being started."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads.count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def _quiet_launcher() -> Generator[None]:
    """The elastic launcher logs every failure with a table of its own; what we raise says it once."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _die_with_parent() -> None:
    """A rank whose launcher was killed with -9 must not go on holding a card."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = importlib.import_module("ctypes").CDLL(None, use_errno=True)
        pr_set_pdeathsig = 1
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
