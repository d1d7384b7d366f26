"""What one rank computes and copies, measured while every rank does the same (cores, buses and power are shared).

Runs inside a rank. Rates are those of the slowest rank, each from its median call.

[Note: attention's FLOPs]
Causal attention over b sequences, h heads, length s, head size d: the two products of the forward pass cost
4 b h s^2 d FLOPs without the mask and half of that with it; the backward pass is counted as twice the forward pass.
Kernels recompute in the backward pass; that is not counted, so the rate turns a model's FLOPs into time.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.probe.budget import NO_TIME
from shardwise.probe.control import Control
from shardwise.probe.curves import mean, median
from shardwise.probe.findings import Contention, RateRecord, Skipped
from shardwise.probe.wire import Group, make_exchange, synchronize, time_calls
from shardwise.vocabulary.units import MIB

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHES = 1000


def _steady(call: Callable[[], Any], device: torch.device, control: Control, seconds: float) -> tuple[float, int]:
    """The slowest rank's median seconds of a call, and the fewest calls that any rank timed.

    Every rank keeps calling for the whole of `seconds`, so that none is measured while another is idle.
    """
    call()
    synchronize(device)
    control.barrier()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        times += time_calls(call, 1 if device.type == "cpu" else 10, device)
    slowest = control.slowest([median(times)])[0]
    return slowest, round(control.fastest([len(times)])[0])


def measure_matmul(
    sizes: Mapping[str, tuple[int, ...]], device: torch.device, control: Control, seconds: float
) -> tuple[list[RateRecord], list[Skipped]]:
    """FLOP/s of square products by dtype and size, within about `seconds`.

    The first size of each dtype is measured in any case (past the limit only that of the first dtype); others that
    would not fit into their share of the time, at the rate of the size before, are left out.
    """
    records: list[RateRecord] = []
    skipped: list[Skipped] = []
    for dtype, sides in sizes.items():
        if records and control.seconds_to_limit() <= 0:
            skipped.append(Skipped(what=f"matmul {dtype}", why=NO_TIME))
            continue
        until = control.slowest([control.seconds])[0] + seconds / len(sizes)
        rate = 0.0
        for i, n in enumerate(sides):
            left = until - control.slowest([control.seconds])[0]
            if rate and 4 * 2 * n**3 / rate > left:
                skipped.append(Skipped(what=f"matmul {dtype} n={n}", why=NO_TIME))
                continue
            try:
                call = _matmul_call(n, dtype, device)
                spent, iterations = _steady(call, device, control, max(0.02, 0.6 * left / (len(sides) - i)))
            except RuntimeError as error:
                skipped.append(Skipped(what=f"matmul {dtype}", why=str(error).splitlines()[0]))
                break
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False
            rate = 2 * n**3 / spent
            records.append(RateRecord(what="matmul", dtype=dtype, size=n, rate=rate, iterations=iterations))
        if rate:
            best = max(record.rate for record in records if record.dtype == dtype)
            control.say(f"matmul {dtype}: {best / 1e12:.3g} TFLOP/s a rank")
    return records, skipped


def _matmul_call(n: int, dtype: str, device: torch.device) -> Callable[[], Any]:
    """A product of two (n, n) matrices of random numbers; zeros would draw less power and run faster."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    a = torch.randn(n, n, device=device).to(DTYPES[dtype])
    b = torch.randn(n, n, device=device).to(DTYPES[dtype])
    out = torch.empty(n, n, device=device, dtype=DTYPES[dtype])
    return lambda: torch.mm(a, b, out=out)


def measure_attention(
    lengths: tuple[int, ...], dtype: str, device: torch.device, control: Control, seconds: float
) -> tuple[list[RateRecord], list[Skipped]]:
    """FLOP/s of causal attention, forward and backward, by sequence length; see [Note: attention's FLOPs].

    The first length is measured in any case; others only if about ten calls of them still fit.
    """
    records: list[RateRecord] = []
    skipped: list[Skipped] = []
    heads, head_dim, tokens = (32, 128, 16_384) if device.type == "cuda" else (9, 64, 512)
    started, per_length = control.slowest([control.seconds])[0], 0.0
    for i, length in enumerate(lengths):
        left = seconds - (control.slowest([control.seconds])[0] - started)
        if i and 10 * per_length * length > left:  # at a fixed number of tokens the time grows with the length
            skipped.append(Skipped(what=f"attention s={length}", why=NO_TIME))
            continue
        batch = max(1, tokens // length)
        shape = (batch, heads, length, head_dim)
        q, k, v = (torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def backward(out: Any = out, inputs: Any = (q, k, v), grad: Any = grad) -> Any:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        flops = 2.0 * batch * heads * length**2 * head_dim
        piece = max(0.02, 0.3 * left / (len(lengths) - i))
        for name, call, work in (("forward", forward, flops), ("backward", backward, 2 * flops)):
            spent, iterations = _steady(call, device, control, piece)
            per_length = max(per_length, spent / length)
            records.append(
                RateRecord(what=f"attention {name}", dtype=dtype, size=length, rate=work / spent, iterations=iterations)
            )
    return records, skipped


def measure_copy(num_bytes: int, device: torch.device, control: Control, seconds: float) -> float:
    """Bytes a second of a copy inside the device's memory, read and written bytes both counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    spent, _ = _steady(lambda: target.copy_(source), device, control, seconds)
    return 2 * num_bytes / spent


def measure_host_copies(num_bytes: int, device: torch.device, control: Control, seconds: float) -> tuple[float, float]:
    """Bytes a second from pinned host memory to the device, and back, while every rank copies."""
    host = torch.ones(num_bytes // 4).pin_memory()
    card = torch.empty(num_bytes // 4, device=device)
    up, _ = _steady(lambda: card.copy_(host, non_blocking=True), device, control, seconds / 2)
    down, _ = _steady(lambda: host.copy_(card, non_blocking=True), device, control, seconds / 2)
    return num_bytes / up, num_bytes / down


def measure_launch_gap(device: torch.device, control: Control) -> float:
    """Seconds from one tiny kernel to the next when they are launched as fast as the host can."""
    data = torch.zeros(1, device=device)

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            data.add_(1)

    launch_many()
    control.barrier()
    return control.slowest([median(time_calls(launch_many, 3, device)) / LAUNCHES])[0]


# ---------------------------------------------------------------------------------------------------------- contention


def measure_contention(group: Group, dtype: str, control: Control, seconds: float) -> Contention:
    """How much a matmul and an all_reduce cost each other when they run at the same time.

    Means, not medians: on shared cores most calls run undisturbed and a few wait for long.

    Args:
        group: All ranks.
        dtype: Of the matmul.
        control: Brings the ranks to the same number of calls.
        seconds: About how long the joint run may take.
    """
    cuda = group.device.type == "cuda"
    n, num_bytes = 4096 if cuda else 512, together_bytes(group.device)
    matmul = _matmul_call(n, dtype, group.device)
    exchange = make_exchange("all_reduce", num_bytes, group)
    exchange.fill()
    for call in (matmul, exchange.call):
        time_calls(call, 2, group.device)
    alone_matmul = _mean_alone(matmul, group.device, control, 0.25 * seconds)
    alone_wire = _mean_alone(exchange.call, group.device, control, 0.25 * seconds)
    count = max(5, min(1000, int(0.4 * seconds / alone_wire)))
    control.barrier()
    run = _together_on_gpu if cuda else _together_on_cpu
    with_wire, with_matmul = run(matmul, exchange.call, count, group.device)
    matmul_slowdown, wire = control.slowest([with_wire / alone_matmul, with_matmul])
    return Contention(
        matmul_size=n,
        dtype=dtype,
        message_bytes=exchange.bytes,
        matmul_slowdown=max(1.0, matmul_slowdown),
        wire_slowdown=max(1.0, wire / alone_wire),
    )


def together_bytes(device: torch.device) -> int:
    """Size of the all_reduce that runs beside a matmul."""
    return 64 * MIB if device.type == "cuda" else MIB


def _mean_alone(call: Callable[[], Any], device: torch.device, control: Control, seconds: float) -> float:
    """Mean seconds of a call on the slowest rank, over about `seconds`: many time slices of a shared core."""
    control.barrier()
    first = control.slowest([mean(time_calls(call, 3, device))])[0]
    count = max(5, min(2000, int(seconds / max(first, 1e-9))))
    control.barrier()
    return control.slowest([mean(time_calls(call, count, device))])[0]


def _together_on_cpu(
    matmul: Callable[[], Any], send: Callable[[], Any], count: int, device: torch.device
) -> tuple[float, float]:
    """Mean seconds of a matmul while another thread sends `count` messages, and of a message meanwhile."""
    import threading

    sent: list[float] = []
    thread = threading.Thread(target=lambda: sent.extend(time_calls(send, count, device)))
    thread.start()
    computed: list[float] = []
    while thread.is_alive() or not computed:
        computed += time_calls(matmul, 1, device)
    thread.join()
    return mean(computed), mean(sent)


def _together_on_gpu(
    matmul: Callable[[], Any], send: Callable[[], Any], count: int, device: torch.device
) -> tuple[float, float]:
    """The same with two streams: messages are queued first, then matmuls for as long as the messages will take."""
    stream = torch.cuda.Stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(count):
            send()
        end.record()
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    while not end.query() and len(events) < 20_000:
        matmul()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > 64:  # the host must not run so far ahead that matmuls outlast the messages by much
            events[-64].synchronize()
    synchronize(device)
    during = [
        before.elapsed_time(after) / 1e3
        for before, after in itertools.pairwise(events)
        if begin.elapsed_time(before) >= 0 and after.elapsed_time(end) >= 0
    ]
    alone = [events[-2].elapsed_time(events[-1]) / 1e3] if len(events) > 1 else []
    return mean(during or alone), begin.elapsed_time(end) / 1e3 / count


# ---------------------------------------------------------------------------------------------------------------- disk


def measure_disk(folder: Path, num_bytes: int, seconds: float) -> tuple[float | None, str]:
    """Bytes a second of writing a checkpoint: new file, random bytes, fsync; the file is removed.

    Args:
        folder: Where checkpoints will go.
        num_bytes: At most this much is written.
        seconds: Writing stops after this, but not before the first 4 MiB; the fsync that follows counts, however long
            it takes.

    Returns:
        The rate, or None and why there is none.
    """
    import shutil
    import tempfile

    piece = os.urandom(4 * MIB)
    try:
        free = shutil.disk_usage(folder).free
        if free < 2 * num_bytes:
            return None, f"{folder} has {free:,} bytes free; writing {num_bytes:,} needs twice that"
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-probe-") as file:
            started, written = time.perf_counter(), 0
            while written < num_bytes and (not written or time.perf_counter() - started < seconds):
                written += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return written / (time.perf_counter() - started), ""
    except OSError as error:
        return None, f"{folder}: {error.strerror or error}"
