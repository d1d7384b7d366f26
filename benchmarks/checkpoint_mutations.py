"""Damage checkpoints in every way we can think of, and count what a resume makes of it.

    PYTHONPATH=src python benchmarks/checkpoint_mutations.py --count 500 --seed 0

Each case copies a run folder with two good checkpoints, damages the newer one, and asks three things: is the damage
named, is nothing of it loaded, and is the older checkpoint found. Damage is of two kinds. The blind kind changes bytes
or files and leaves the hashes as they are. The hostile kind plants something (a pickle that would write a canary file,
a path outside the folder, a header that lies) and then makes every hash right again, as an attacker would.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint import AppState, SaveOptions, load, newest_good, save
from shardwise.trainer.checkpoint.manifest import MANIFEST


@dataclass(frozen=True)
class Case:
    """One damaged run folder."""

    kind: str
    run_folder: Path
    damaged_file: str
    """The file that a message must name."""


@dataclass
class Outcome:
    """What happened over all cases."""

    cases: Counter[str] = field(default_factory=Counter[str])
    not_noticed: list[str] = field(default_factory=list[str])
    not_named: list[str] = field(default_factory=list[str])
    loaded: list[str] = field(default_factory=list[str])
    older_not_found: list[str] = field(default_factory=list[str])
    canaries: list[str] = field(default_factory=list[str])
    other_errors: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[str]:
        return [
            *self.not_noticed,
            *self.not_named,
            *self.loaded,
            *self.older_not_found,
            *self.canaries,
            *self.other_errors,
        ]


class Counting:
    """Something with a state of its own, as a sampler has."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def make_state(seed: int) -> AppState:
    """A small model with an optimizer that has taken a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 24, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return AppState(model=model, optimizers=[optimizer], extra={"sampler": Counting()}, counters={"tokens": seed})


def make_run(folder: Path) -> Path:
    """A run folder with two good checkpoints of several files each."""
    options = SaveOptions(max_file_bytes=12_000)
    for step in (1, 2):
        save(make_state(step), folder, step, options=options, trainer_state={"log_history": [{"step": step}]})
    return folder


# Damage that leaves the hashes as they are ----------------------------------------------------------------------------


def flip_bit(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    data = bytearray(path.read_bytes())
    bit = chance.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return path.name


def zero_block(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    data = bytearray(path.read_bytes())
    size = min(chance.choice((16, 512, 4096)), len(data))
    while True:  # a block of zeros that already were zeros is no damage
        start = chance.randrange(len(data) - size + 1)
        if any(data[start : start + size]):
            break
    data[start : start + size] = bytes(size)
    path.write_bytes(data)
    return path.name


def truncate(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    os.truncate(path, chance.randrange(path.stat().st_size))
    return path.name


def append(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice((1, 8, 4096))))
    return path.name


def delete(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    path.unlink()
    return path.name


def stale(folder: Path, chance: random.Random) -> str:
    """A file of the older checkpoint in place of the newer one's; same length, other contents."""
    older = folder.parent / "checkpoint-1"
    names = [path.name for path in _files(folder) if path.read_bytes() != (older / path.name).read_bytes()]
    name = chance.choice(names)
    shutil.copyfile(older / name, folder / name)
    return name


def swap(folder: Path, chance: random.Random) -> str:
    one, two = chance.sample([path for path in _files(folder) if path.name != MANIFEST], 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return one.name


def add_stranger(folder: Path, chance: random.Random) -> str:
    name = chance.choice(
        (".metadata", "pytorch_model.bin", "rank-00009-00000.safetensors", "rng_state.pth", "note.txt")
    )
    (folder / name).write_bytes(pickle.dumps(Bomb(folder.parent / "canary")))
    return name


def link_outside(folder: Path, chance: random.Random) -> str:
    """A symbolic link to an identical copy elsewhere: the bytes are right, the file is not the checkpoint's own."""
    path = _any_file(folder, chance)
    copy = folder.parent / f"outside-{path.name}"
    path.rename(copy)
    path.symlink_to(copy)
    return path.name


def reorder_bytes(folder: Path, chance: random.Random) -> str:
    """Two blocks of one file change places: length and byte counts stay right."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[half:] + data[:half])
    return path.name


# Damage with every hash made right again ------------------------------------------------------------------------------


class Bomb:
    """Unpickling this makes a canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def hostile_manifest(folder: Path, chance: random.Random) -> str:
    body = _body(folder)
    tensor = body["tensors"][chance.choice(sorted(name for name in body["tensors"] if body["tensors"][name]["shape"]))]
    file = chance.choice(sorted(body["files"]))
    value = body["values"][chance.choice(sorted(body["values"]))]
    chunk = tensor["chunks"][0]
    changes: list[Callable[[], Any]] = [
        lambda: body["files"].update({chance.choice(_EVIL_NAMES): body["files"].pop(file)}),
        lambda: body["files"].update({chance.choice(_EVIL_NAMES): {"bytes": 0, "sha256": "0" * 64}}),
        lambda: chunk.__setitem__(2, chance.choice(_EVIL_NAMES)),
        lambda: chunk.__setitem__(3, "another key"),
        lambda: chunk.__setitem__(0, [-1] * len(tensor["shape"])),
        lambda: chunk.__setitem__(0, [10**12] * len(tensor["shape"])),
        lambda: chunk.__setitem__(1, [0] * len(tensor["shape"])),
        lambda: tensor.__setitem__("shape", [10**15, 10**15]),
        lambda: tensor.__setitem__("shape", [True]),
        lambda: tensor.__setitem__("dtype", chance.choice(("F4", "torch.float32", "__reduce__", 7))),
        lambda: tensor.__setitem__("chunks", tensor["chunks"] * 2),
        lambda: tensor.__setitem__("chunks", []),
        lambda: value.__setitem__("file", chance.choice(_EVIL_NAMES)),
        lambda: value.__setitem__("tensors", [[file, "no such key"]]),
        lambda: body.__setitem__("version", 2),
        lambda: body.__setitem__("format", "another"),
        lambda: body.__setitem__("step", chance.choice((-1, "2", None, True, 7))),
        lambda: body.__setitem__("_target_", "os.system"),
        lambda: body.__setitem__("paths", {"a": [{"b": 1}]}),
    ]
    chance.choice(changes)()
    _seal(folder, json.dumps(body).encode())
    return MANIFEST


_EVIL_NAMES = (
    "../canary",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    ".hidden",
    "manifest.json",
    "x\x00.json",
    "UP\n",
    "",
)


def hostile_text(folder: Path, chance: random.Random) -> str:
    """A manifest whose text is no proper JSON, under a right hash."""
    text = json.dumps(_body(folder)).encode()
    bad = (
        text.replace(b'"step":', b'"step": NaN, "step":', 1),
        text.replace(b'"version": 1', b'"version": 1, "version": 1', 1),
        b"[" * 100_000 + b"]" * 100_000,
        text[:-1],
        pickle.dumps(Bomb(folder.parent / "canary")),
        b'{"$python": "os.system"}',
        text.replace(b'"format"', b'"\xff\xfe"', 1),
        b"1e999",
    )
    _seal(folder, chance.choice(bad))
    return MANIFEST


def planted_pickle(folder: Path, chance: random.Random) -> str:
    """A pickle in place of a file's contents, under a right hash."""
    path = chance.choice([path for path in _files(folder) if path.name.startswith("rank-")])
    path.write_bytes(pickle.dumps(Bomb(folder.parent / "canary")))
    _rehash(folder, path.name)
    return path.name


def planted_value(folder: Path, chance: random.Random) -> str:
    """A value of a type that no checkpoint holds, in every place of the JSON, under a right hash."""
    path = folder / "rank-00000.json"
    values = json.loads(path.read_text())
    evil = chance.choice(
        (
            {"$pickle": pickle.dumps(Bomb(folder.parent / "canary")).hex()},
            {"$class": "os.system", "args": ["touch canary"]},
            {"$tensor": 10**9},
            {"$tensor": -1},
            {"$tensor": "0"},
            {"$float": "1e5"},
            {"$bytes": "not base64!"},
            {"$dict": [[[1], 2]]},
            {"$dict": [1]},
            {"$dtype": "object"},
            {"$tuple": [], "more": 1},
        )
    )
    name = chance.choice(sorted(values))
    values[name] = chance.choice((evil, [evil], {"lr": evil}, {"$tuple": [0, evil]}))
    path.write_text(json.dumps(values))
    _rehash(folder, path.name)
    return path.name


def lying_header(folder: Path, chance: random.Random) -> str:
    """A safetensors header that lies, under a right hash."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    name = chance.choice(sorted(header))
    entry = header[name]
    start, stop = entry["data_offsets"]
    lies: list[Callable[[], Any]] = [
        lambda: entry.__setitem__("dtype", "I64" if entry["dtype"] != "I64" else "F32"),
        lambda: entry.__setitem__("dtype", "F32X"),
        lambda: entry.__setitem__("shape", [*entry["shape"], 2]),
        lambda: entry.__setitem__("shape", [-1]),
        lambda: entry.__setitem__("shape", [2**62, 2**62]),
        lambda: entry.__setitem__("data_offsets", [start + 8, stop + 8]),
        lambda: entry.__setitem__("data_offsets", [stop, start]),
        lambda: header.__setitem__(f"{name}-twin", dict(entry)),
        lambda: header.__setitem__("other", header.pop(name)),
        lambda: header.pop(name),
    ]
    chance.choice(lies)()
    text = json.dumps(header).encode()
    claimed = chance.choice((len(text), len(text), len(text), 2**62, 0))
    path.write_bytes(claimed.to_bytes(8, "little") + text + data[8 + length :])
    _rehash(folder, path.name)
    return path.name


KINDS: dict[str, tuple[int, Callable[[Path, random.Random], str]]] = {
    "flip one bit": (8, flip_bit),
    "zero a block": (4, zero_block),
    "truncate": (3, truncate),
    "append": (2, append),
    "delete a file": (2, delete),
    "stale file of an older step": (3, stale),
    "swap two files": (2, swap),
    "reorder blocks": (1, reorder_bytes),
    "add a file": (1, add_stranger),
    "link outside": (1, link_outside),
    "hostile manifest": (6, hostile_manifest),
    "hostile manifest text": (3, hostile_text),
    "pickle in place of a file": (2, planted_pickle),
    "planted value": (4, planted_value),
    "lying header": (4, lying_header),
}
"""Kind of damage, how often it is drawn, and how it is done."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _any_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(_files(folder))


def _body(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / MANIFEST).read_text())["body"])


def _seal(folder: Path, body: bytes) -> None:
    frame = b'{"sha256": "' + sha256(body).hexdigest().encode() + b'",\n"body": ' + body + b"\n}\n"
    (folder / MANIFEST).write_bytes(frame)


def _rehash(folder: Path, name: str) -> None:
    body = _body(folder)
    data = (folder / name).read_bytes()
    body["files"][name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    _seal(folder, json.dumps(body).encode())


# Running --------------------------------------------------------------------------------------------------------------


def cases(source: Path, workplace: Path, count: int, seed: int) -> Iterator[Case]:
    """Damaged copies of a good run folder, one at a time; each of the kinds comes up."""
    chance = random.Random(seed)
    drawn = list(KINDS) * (count // len(KINDS) > 0)
    weights = [weight for weight, _ in KINDS.values()]
    drawn += chance.choices(list(KINDS), weights, k=count - len(drawn))
    for i, kind in enumerate(drawn):
        run_folder = workplace / f"case-{i}"
        shutil.copytree(source, run_folder)
        name = KINDS[kind][1](run_folder / "checkpoint-2", chance)
        yield Case(kind=kind, run_folder=run_folder, damaged_file=name)
        shutil.rmtree(run_folder)


def judge(case: Case, number: int, outcome: Outcome) -> None:
    """Try to resume from a damaged run folder and note every way in which that went wrong."""
    label = f"{number}: {case.kind} ({case.damaged_file})"
    outcome.cases[case.kind] += 1
    try:
        found = newest_good(case.run_folder)
        if found.path is None or found.path.name != "checkpoint-1":
            outcome.older_not_found.append(label)
        if not found.damaged:
            outcome.not_noticed.append(label)
        elif not any(case.damaged_file in problem for problem in found.damaged):
            outcome.not_named.append(f"{label}: {found.damaged[0][:200]}")
        _try_to_load(case, label, outcome)
    except BaseException as error:
        outcome.other_errors.append(f"{label}: {type(error).__name__}: {error}")
    if (case.run_folder / "canary").exists():
        outcome.canaries.append(label)


def _try_to_load(case: Case, label: str, outcome: Outcome) -> None:
    state = make_state(99)
    before = [tensor.clone() for tensor in state.model.state_dict().values()]
    try:
        load(state, case.run_folder / "checkpoint-2")
        outcome.loaded.append(label)
    except CheckpointError:
        after = state.model.state_dict().values()
        if not all(torch.equal(one, two) for one, two in zip(before, after, strict=True)):
            outcome.loaded.append(f"{label}, in part")


def run(count: int, seed: int) -> tuple[Outcome, float]:
    """Judge `count` cases; returns the outcome and the seconds it took."""
    outcome, started = Outcome(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        source = make_run(Path(name) / "good")
        assert newest_good(source).step == 2
        for number, case in enumerate(cases(source, Path(name), count, seed)):
            judge(case, number, outcome)
    return outcome, time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint_mutations.json"))
    arguments = parser.parse_args()
    outcome, seconds = run(arguments.count, arguments.seed)
    result = {
        "what": "seeded damage to a checkpoint: named, not loaded, older one found, planted code inert",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "count": sum(outcome.cases.values()),
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "by_kind": dict(sorted(outcome.cases.items())),
        "not_noticed": outcome.not_noticed,
        "not_named": outcome.not_named,
        "loaded": outcome.loaded,
        "older_not_found": outcome.older_not_found,
        "canaries": outcome.canaries,
        "other_errors": outcome.other_errors,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
