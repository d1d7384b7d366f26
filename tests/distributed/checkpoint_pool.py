"""Four processes that become worlds of 1, 2 or 4 ranks, again and again: starting torch is the dear part."""

import itertools
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_DEAR = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
]


def _serve(rank: int, orders: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while (order := orders.get()) is not None:
        size, store, work, arguments = order
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
            results.put((rank, None, work(*arguments)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers results with their mesh, and takes the mesh of a world that is gone for an equal new one.

    Its groups have the old names, which stand for other groups now: ranks would wait for each other forever.
    """
    from torch.distributed.tensor import debug
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    debug._clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


class Pool:
    """The processes."""

    def __init__(self, size: int = 4) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_DEAR)  # imported once, not four times
        self._results: Any = context.Queue()
        self._orders: list[Any] = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(target=_serve, args=(rank, orders, self._results), daemon=True)
            for rank, orders in enumerate(self._orders)
        ]
        self._folder = tempfile.TemporaryDirectory()
        self._stores = (Path(self._folder.name) / f"store-{i}" for i in itertools.count())
        for process in self.processes:
            process.start()

    def start(self, size: int, work: Callable[..., Any], *arguments: Any) -> None:
        """Let the first `size` processes do something together, and do not wait for it."""
        store = next(self._stores)
        for orders in self._orders[:size]:
            orders.put((size, store, work, arguments))

    def run(self, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Let the first `size` processes do something together; what each returns, in the order of ranks."""
        self.start(size, work, *arguments)
        answers = sorted((self.answer() for _ in range(size)), key=lambda answer: answer[0])
        failures = [f"rank {rank}:\n{trace}" for rank, trace, _ in answers if trace]
        assert not failures, "\n".join(failures)
        return [value for _, _, value in answers]

    def answer(self) -> tuple[int, str | None, Any]:
        """The next answer: rank, traceback if it failed, and what it returned."""
        return self._results.get(timeout=120)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
