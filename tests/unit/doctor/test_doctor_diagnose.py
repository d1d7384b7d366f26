"""Measurements as evidence, logs from elsewhere, bad input, recordings, and the two pages."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines.builder import Spec, build
from machines.catalog import a6000, eight_h100, h200_vm, rtx4090

from shardwise.doctor.check import Check
from shardwise.doctor.checks import ALL_CHECKS
from shardwise.doctor.diagnose import Diagnosis, DoctorOptions, Verdict, diagnose, examine, gather
from shardwise.doctor.experiments.plan import plan_trials, visible_cards
from shardwise.doctor.findings import Answer, Cost
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.report import render_text, to_json
from shardwise.doctor.scene import Scene
from shardwise.errors import UsageError
from shardwise.facts.machine import read_machine
from shardwise.facts.machine.nvml import ask_nvml, read_nvlink_traffic, sample_link
from shardwise.facts.machine.record import P2pStatus, Unreadable
from shardwise.vocabulary.units import GB, GIB, MIB

LINES = Path(__file__).parent / "nccl_log_lines.txt"
ALL = tuple(range(8))


def measured(variant: str, transport: str, gb_per_s: float, **changes: Any) -> Measurement:
    found = Measurement(
        kind="all_reduce",
        variant=variant,
        gpus=ALL,
        num_bytes=GIB,
        bytes_per_s=gb_per_s * GB,
        seconds_p50=0.01,
        seconds_p95=0.011,
        transport=transport,
    )
    return replace(found, **changes)


def judge(spec: Spec, tmp_path: Path, *measurements: Measurement, wire_bytes: int | None = None) -> Diagnosis:
    machine = read_machine(build(tmp_path / "m", spec))
    options = DoctorOptions(wire_bytes_per_step=wire_bytes)
    return examine(gather(machine, spec.environment, None, options, measurements), ALL_CHECKS)


# ---- three wires on one machine (measured figures of an 8-card Hopper machine)


def test_the_good_wire_is_silent(tmp_path: Path) -> None:
    found = judge(
        eight_h100(),
        tmp_path,
        measured("p2p_off", "SHM", 24, num_bytes=64 * MIB),
        measured("as_set", "P2P", 359),
        measured("ring", "P2P", 359),
    )
    assert found.verdict is Verdict.HEALTHY, render_text(found)


def test_host_memory_instead_of_nvlink(tmp_path: Path) -> None:
    found = judge(
        eight_h100(environment={"NCCL_P2P_DISABLE": "1"}),
        tmp_path,
        measured("as_set", "SHM", 24, nvlink_bytes=0),
        measured("no_switches", "P2P", 344),
        wire_bytes=30 * 10**9,
    )
    (finding,) = found.findings
    assert finding.check == "nccl-switches"
    assert finding.certainty.name == "MEASURED"
    assert finding.cost is not None
    assert finding.cost == Cost(actual_bytes_per_s=24e9, expected_bytes_per_s=344e9, basis="measured")
    assert finding.cost.lost_seconds(30 * 10**9) == pytest.approx(30 / 24 - 30 / 344)
    page = render_text(found)
    assert "NVLink lies idle" in page
    assert "0 B at 24 GB/s" in page
    assert "1.16 s a step" in page


def test_sockets_instead_of_nvlink(tmp_path: Path) -> None:
    both = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    found = judge(
        eight_h100(environment=both),
        tmp_path,
        measured("as_set", "NET/Socket", 2.1),
        measured("no_switches", "P2P", 344),
    )
    (finding,) = found.findings
    assert finding.cost is not None
    assert finding.cost.actual_bytes_per_s == 2.1e9
    assert "NCCL_SHM_DISABLE" in finding.fix


def test_slow_nvlink_is_measured(tmp_path: Path) -> None:
    found = judge(eight_h100(), tmp_path, measured("as_set", "P2P", 200))
    (finding,) = found.findings
    assert (finding.check, finding.headline) == (
        "bandwidth",
        "all_reduce reaches 44% of the link's one-way headline, far below 72%",
    )


def test_a_pair_is_judged_as_a_pair(tmp_path: Path) -> None:
    """Two H200s attained 324 GB/s at 1 GiB on a healthy machine (benchmarks/results/doctor_h200_x2.json)."""
    good = judge(h200_vm(2), tmp_path, measured("as_set", "P2P", 323.7, gpus=(0, 1)))
    assert "bandwidth" not in checks_of(good)
    slow = judge(h200_vm(2), tmp_path / "slow", measured("as_set", "P2P", 270, gpus=(0, 1)))
    assert "bandwidth" in checks_of(slow)


def test_small_messages_are_not_judged(tmp_path: Path) -> None:
    assert judge(eight_h100(), tmp_path, measured("as_set", "P2P", 107, num_bytes=4 * MIB)).verdict is Verdict.HEALTHY


# ---- P2P that is granted and does not work


def peer_copy(gb_per_s: float, **changes: Any) -> Measurement:
    found = Measurement(kind="peer_copy", variant="alone", gpus=(0, 1), num_bytes=256 * MIB, bytes_per_s=gb_per_s * GB)
    return replace(found, **changes)


TWO = Spec(cards=[a6000(0), a6000(1)])


def host_copy(gpu: int, gb_per_s: float, variant: str = "alone", **changes: Any) -> Measurement:
    found = Measurement(
        kind="host_to_device", variant=variant, gpus=(gpu,), num_bytes=256 * MIB, bytes_per_s=gb_per_s * GB
    )
    return replace(found, **changes)


def checks_of(found: Diagnosis) -> set[str]:
    return {finding.check for finding in found.findings}


def test_wrong_bytes_come_first(tmp_path: Path) -> None:
    found = judge(TWO, tmp_path, peer_copy(26, data_is_right=False), measured("as_set", "P2P", 5, gpus=(0, 1)))
    assert found.findings[0].check == "p2p-works"
    assert found.findings[0].severity.name == "FAULT"
    assert "NCCL_P2P_DISABLE=1 at once" in found.findings[0].fix


def test_a_hang_over_p2p_that_passes_without(tmp_path: Path) -> None:
    late = "did not finish within 60 s and was ended"
    found = judge(
        TWO,
        tmp_path,
        measured("p2p_off", "SHM", 9, gpus=(0, 1)),
        measured("as_set", "P2P", 0, gpus=(0, 1), problem=late),
    )
    assert "p2p-works" in checks_of(found)
    assert any(late in gap.why for gap in found.gaps)


def test_slow_peer_copy_and_p2p_slower_than_host_memory(tmp_path: Path) -> None:
    found = judge(
        TWO,
        tmp_path,
        host_copy(0, 25),
        host_copy(1, 25),
        peer_copy(10),
        measured("p2p_off", "SHM", 12, gpus=(0, 1)),
        measured("as_set", "P2P", 8, gpus=(0, 1)),
    )
    told = [finding.headline for finding in found.findings if finding.check == "p2p-works"]
    assert len(told) == 2
    assert any("40% of a copy from host memory" in words for words in told)


def test_a_good_pcie_pair_is_silent(tmp_path: Path) -> None:
    found = judge(
        TWO,
        tmp_path,
        host_copy(0, 26),
        host_copy(1, 26),
        host_copy(0, 25, "at_once"),
        host_copy(1, 25, "at_once"),
        peer_copy(26),
        measured("p2p_off", "SHM", 11, gpus=(0, 1)),
        measured("as_set", "P2P", 24, gpus=(0, 1)),
    )
    assert found.verdict is Verdict.HEALTHY, render_text(found)


def test_shared_uplink_drift_throttling_and_trained_down_under_load(tmp_path: Path) -> None:
    found = judge(
        TWO,
        tmp_path,
        host_copy(0, 26, pcie_samples=((0, 4, 16), (0, 4, 16))),
        host_copy(0, 13, "at_once"),
        host_copy(1, 26, pcie_samples=((1, 2, 16),) * 5, slowdowns=((1, "power brake"),)),
        host_copy(1, 13, "at_once"),
        measured("as_set", "P2P", 24, gpus=(0, 1), seconds_p95=0.05),
    )
    assert checks_of(found) == {"contention", "shared-fabric", "throttling", "pcie-link"}
    link = next(finding for finding in found.findings if finding.check == "pcie-link")
    assert (link.subject, link.certainty.name) == ("GPU 1", "MEASURED")


# ---- the trials


def scene_of(spec: Spec, tmp_path: Path) -> Scene:
    machine = read_machine(build(tmp_path / "m", spec))
    return gather(machine, spec.environment, None, DoctorOptions())


def test_trials_are_ordered_from_safe_to_risky(tmp_path: Path) -> None:
    scene = scene_of(Spec(cards=[a6000(i) for i in range(4)], nccl="2.26.2"), tmp_path)
    base = {"PATH": "/bin"}
    assert [trial.variant for trial in plan_trials(scene, base, risky=False)] == ["p2p_off", "as_set"]
    trials = plan_trials(scene, base, risky=True)
    assert [trial.variant for trial in trials] == ["p2p_off", "as_set", "forced_p2p"]
    assert trials[-1].environment["NCCL_P2P_LEVEL"] == "SYS"


def test_trials_with_switches_measure_both_ways(tmp_path: Path) -> None:
    spec = eight_h100(environment={"NCCL_P2P_DISABLE": "1"}, conf="NCCL_SHM_DISABLE=1\n")
    trials = {t.variant: t.environment for t in plan_trials(scene_of(spec, tmp_path), spec.environment, risky=False)}
    assert list(trials) == ["p2p_off", "as_set", "no_switches", "ring"]
    assert trials["as_set"]["NCCL_P2P_DISABLE"] == trials["as_set"]["NCCL_SHM_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in trials["no_switches"]
    assert trials["no_switches"]["NCCL_SHM_DISABLE"] == "0"  # what /etc/nccl.conf sets can only be set back
    assert trials["ring"]["NCCL_ALGO"] == "Ring"


def test_two_cards_need_no_trial_that_shows_nothing_new(tmp_path: Path) -> None:
    """Every trial costs a start of all ranks; NVLS off is no suspect on two cards, and a ring is what NCCL takes."""

    def variants(name: str, **environment: str) -> list[str]:
        spec = h200_vm(2, environment={"NCCL_NVLS_ENABLE": "0", **environment})
        scene = scene_of(spec, tmp_path / name)
        return [trial.variant for trial in plan_trials(scene, spec.environment, risky=False)]

    assert variants("good") == ["p2p_off", "as_set"]
    assert variants("host", NCCL_P2P_DISABLE="1") == ["as_set", "no_switches"]
    assert variants("net", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1") == ["p2p_off", "as_set", "no_switches"]


@pytest.mark.parametrize(
    ("value", "cards"), [(None, (0, 1, 2, 3)), ("2,0", (2, 0)), ("1,9,0", (1,)), ("", ()), ("-1", ())]
)
def test_visible_cards(value: str | None, cards: tuple[int, ...], tmp_path: Path) -> None:
    spec = Spec(
        cards=[a6000(i) for i in range(4)], environment={} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    )
    assert visible_cards(scene_of(spec, tmp_path)) == cards


# ---- logs


def test_log_of_another_machine_is_judged_alone(tmp_path: Path) -> None:
    root = build(tmp_path / "m", Spec(cards=[rtx4090(0), rtx4090(1)], p2p_all=2, hostname="laptop"))
    found = diagnose(DoctorOptions(root=root, log=LINES), environment={})
    assert "this machine is laptop" in found.machine_skipped
    assert {"shm", "nvls", "log-errors", "gpudirect", "iommu"} <= checks_of(found)
    assert not {"pcie-link", "p2p-refused", "nvlink"} & checks_of(found)
    assert not found.crashed


def test_log_with_switches_explains_its_edges(tmp_path: Path) -> None:
    pre = "far:1:2 [0] NCCL INFO "
    (tmp_path / "log").write_text(
        f"{pre}NCCL_P2P_DISABLE set by environment to 1\n{pre}NCCL_SHM_DISABLE set by environment to 1.\n"
        f"{pre}comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n"
        f"{pre}Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"
    )
    root = build(tmp_path / "m", Spec(hostname="laptop", nvml=False))
    found = diagnose(DoctorOptions(root=root, log=tmp_path / "log"), environment={})
    assert checks_of(found) == {"nccl-switches"}
    assert {finding.severity.name for finding in found.findings} == {"LOSS"}


def test_log_of_here_by_bus_ids_of_a_container(tmp_path: Path) -> None:
    """NCCL 2.18.1 and before print bus ids; the container's host name is another."""
    (tmp_path / "log").write_text(
        "0f3a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 21000 - Init COMPLETE\n"
        "0f3a:1:3 [1] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 1 busId 41000 - Init COMPLETE\n"
        "0f3a:1:2 [0] NCCL INFO Channel 00 : 0[21000] -> 1[41000] via SHM/direct/direct\n"
    )
    root = build(tmp_path / "m", Spec(cards=[a6000(0), a6000(1)]))
    found = diagnose(DoctorOptions(root=root, log=tmp_path / "log"), environment={})
    (finding,) = found.findings
    assert (finding.check, finding.subject) == ("transport", "GPU 0 - GPU 1")
    assert "the log shows SHM where topology, version and switches say P2P" in finding.headline
    assert finding.cost is not None


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02" * 1000, b"hello\nworld\n"])
def test_log_without_nccl_is_no_healthy_log(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    root = build(tmp_path / "m", eight_h100())
    found = diagnose(DoctorOptions(root=root, log=tmp_path / "log"), environment={})
    assert found.verdict is Verdict.COULD_NOT_LOOK
    assert "NCCL_DEBUG=INFO" in render_text(found)


def judge_log(text: str, tmp_path: Path) -> Diagnosis:
    """A log of other machines, judged alone."""
    (tmp_path / "far.log").write_text(text)
    root = build(tmp_path / "m", Spec(hostname="laptop", nvml=False))
    return diagnose(DoctorOptions(root=root, log=tmp_path / "far.log"), environment={})


def test_garbage_with_one_warning_is_not_healthy(tmp_path: Path) -> None:
    warned = "far:1:2 [0] somewhere.cc:12 NCCL WARN The flux capacitor is at 3 of 7\n"
    found = judge_log("hello\n\x00\x01\nworld\n" + warned, tmp_path)
    assert found.verdict is Verdict.FINDINGS
    (finding,) = found.findings
    assert (finding.check, finding.severity.name, finding.certainty.name) == ("log-errors", "RISK", "POSSIBLE")
    assert "flux capacitor" in finding.headline
    assert any("the log has none" in gap.why for gap in found.gaps if gap.essential)


def test_a_log_at_level_warn_without_warnings_was_not_looked_at(tmp_path: Path) -> None:
    assert judge_log("NCCL version 2.27.5+cuda12.9\n", tmp_path).verdict is Verdict.COULD_NOT_LOOK


GAVE_UP = "[rank{0}]: [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, "
STATUS = "[rank{0}]: [PG 0 Rank {0}] at work: {1}, detected by watchdog at work: {1}, last enqueued NCCL work: {2}, "


def hanging(calls: dict[int, int], number: int) -> str:
    return "".join(
        GAVE_UP.format(rank, min(number, last + 1)) + "NumelIn=1) ran for 600000 milliseconds before timing out.\n"
        + STATUS.format(rank, min(number, last + 1), last) + f"last completed NCCL work: {number - 1}.\n"
        for rank, last in calls.items()
    )  # fmt: skip


def test_a_rank_that_never_called_is_told_from_a_wire_that_hangs(tmp_path: Path) -> None:
    everyone = judge_log(hanging({0: 9, 1: 9}, 7), tmp_path)
    assert [f.headline for f in everyone.findings] == [
        "torch gave up ALLREDUCE number 7 after 600 s: 2 rank(s) waited in it"
    ]
    (tmp_path / "b").mkdir()
    absent = judge_log(hanging({0: 9}, 7) + hanging({1: 6}, 7), tmp_path / "b")
    assert "rank 1 never called it" in absent.findings[0].headline
    assert "fault of the program" in absent.findings[0].fix


def test_what_follows_from_a_fault_is_a_note_beside_it(tmp_path: Path) -> None:
    closed = "far:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer far2<57557>\n"
    refused = (
        "far:1:2 [0] misc/socket.cc:9 NCCL WARN socketStartConnect: Connect to far2<1> failed : Connection refused\n"
    )
    trace = "far:1:2 [0] NCCL INFO misc/socket.cc:567 -> 2\n"
    alone = judge_log(closed, tmp_path)
    assert [f.headline for f in alone.findings] == ["a peer closed the connection: another rank died first"]
    (tmp_path / "b").mkdir()
    both = judge_log(refused + closed + trace, tmp_path / "b")
    assert [f.check for f in both.findings] == ["reachability"]
    assert [f.check for f in both.notes] == ["log-errors"]
    (tmp_path / "c").mkdir()
    only_trace = judge_log(trace, tmp_path / "c")
    assert [(f.check, f.headline) for f in only_trace.findings] == [
        ("log-errors", "a call to the system or to a library failed (ncclSystemError)")
    ]


# ---- bad input


def test_a_recording_wants_a_folder_of_its_own(tmp_path: Path) -> None:
    root = build(tmp_path / "m", Spec())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, words in (("full", "holds thesis.tex"), ("file", "is a file")):
        with pytest.raises(UsageError, match=words):
            diagnose(DoctorOptions(root=root, record=tmp_path / name))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    diagnose(DoctorOptions(root=root, record=tmp_path / "empty"), environment={})
    assert (tmp_path / "empty" / "answers.json").is_file()


def test_a_time_limit_without_experiments_is_refused() -> None:
    with pytest.raises(UsageError, match="none without --run"):
        diagnose(DoctorOptions(seconds=30))
    with pytest.raises(UsageError, match="A time limit of nan s is none"):
        diagnose(DoctorOptions(run=True, seconds=float("nan")))


def test_all_problems_of_the_options_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        diagnose(
            DoctorOptions(root=build(tmp_path, Spec()), risky=True, seconds=0, pids=(999,), wire_bytes_per_step=-1)
        )
    assert len(caught.value.problems) == 5


def test_a_folder_that_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recording of a machine"):
        diagnose(DoctorOptions(root=tmp_path))


def test_nothing_at_all_is_readable(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(
        json.dumps(
            {
                name: {"unreadable": "no permission"}
                for name in ("shm_size_bytes", "shm_free_bytes", "affinity", "verbs_library", "kernel_log", "nvml")
            }
        )
    )
    found = diagnose(DoctorOptions(root=tmp_path), environment={"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    assert not found.crashed
    assert found.verdict is Verdict.COULD_NOT_LOOK
    assert {"inventory", "verbs", "interface"} <= {gap.check for gap in found.gaps}


def test_a_check_that_fails_itself_is_a_gap(tmp_path: Path) -> None:
    def broken(scene: Scene) -> Iterator[Answer]:
        raise RuntimeError(f"cannot {scene.machine.hostname}")
        yield

    scene = scene_of(eight_h100(), tmp_path)
    found = examine(scene, (Check(id="broken", title="Broken", reads=(), look=broken),))
    assert found.verdict is Verdict.COULD_NOT_LOOK
    assert "the check itself failed" in render_text(found)


# ---- the catalog of checks, the pages, recordings


def test_checks_have_unique_ids_and_say_what_they_read() -> None:
    assert len({check.id for check in ALL_CHECKS}) == len(ALL_CHECKS)
    assert all(check.reads and check.title for check in ALL_CHECKS)
    files = {path.stem for path in (Path(__file__).parents[3] / "src/shardwise/doctor/checks").glob("*.py")}
    assert {check.id.replace("-", "_") for check in ALL_CHECKS} == files - {"__init__", "common"}


def test_documentation_names_every_check() -> None:
    text = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    assert not [check.id for check in ALL_CHECKS if f"`{check.id}`" not in text]


def test_json_page(tmp_path: Path) -> None:
    root = build(tmp_path, Spec(cards=[a6000(i) for i in range(4)], nccl="2.26.2"))
    page = json.loads(to_json(diagnose(DoctorOptions(root=root, wire_bytes_per_step=10**10), environment={})))
    assert (page["schema"], page["verdict"], page["exit_code"]) == (1, "findings", 1)
    assert page["findings"][0]["check"] == "p2p-level"
    assert page["findings"][0]["cost"]["lost_seconds_per_step"] > 0
    assert {transport["transport"] for transport in page["transports"]} == {"SHM"}
    assert len(page["checks"]) == len(ALL_CHECKS)


def test_text_page_fits_a_terminal(tmp_path: Path) -> None:
    root = build(tmp_path, Spec(cards=[a6000(i) for i in range(4)], nccl="2.26.2", iommu="DMA-FQ"))
    page = render_text(diagnose(DoctorOptions(root=root), environment={}))
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.parametrize("spec", [eight_h100(iommu="DMA"), Spec(cards=[a6000(i) for i in range(2)], iommu="DMA-FQ")])
def test_a_recording_gives_the_same_diagnosis(spec: Spec, tmp_path: Path) -> None:
    root = build(tmp_path / "m", spec)
    first = diagnose(DoctorOptions(root=root, record=tmp_path / "copy"), environment={})
    again = diagnose(DoctorOptions(root=tmp_path / "copy"), environment={})
    assert again.findings == first.findings
    assert again.notes == first.notes
    assert again.gaps == first.gaps


def test_this_machine_can_be_read_whatever_it_is() -> None:
    found = diagnose(DoctorOptions())
    assert not found.crashed
    assert render_text(found)
    assert found.exit_code in (0, 1, 2)


# ---- NVML


class NVMLError_NotSupported(Exception):
    pass


class FakeNvml(types.SimpleNamespace):
    """Answers like pynvml for two cards with a bridge of four links; every other question is not supported."""

    c_nvmlGpuFabricInfoV_t = types.SimpleNamespace

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def refuse(*_: object) -> None:
            raise NVMLError_NotSupported("Not Supported")

        refuse.__name__ = name
        return refuse

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.15"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 4:
            raise NVMLError_NotSupported("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return types.SimpleNamespace(busId=f"00000000:0{2 - handle}:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return 5  # 3.1

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 30

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, kind: int) -> int:
        return 0 if (a, b) == (0, 1) or kind == 0 else 1

    def nvmlDeviceGetFieldValues(self, handle: int, wanted: list[Any]) -> list[Any]:
        return [types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(ullVal=14062 if wanted == [90] else 5))]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16


def test_nvml_answers_become_cards_and_pairs(tmp_path: Path) -> None:
    answer = ask_nvml(FakeNvml())
    assert isinstance(answer, dict)
    root = build(tmp_path, Spec())
    plain = json.loads((root / "answers.json").read_text())
    plain["nvml"] = json.loads(json.dumps(answer, default=lambda u: {"unreadable": u.why, "command": u.command}))
    (root / "answers.json").write_text(json.dumps(plain))
    machine = read_machine(root)
    assert not isinstance(machine.gpus, Unreadable)
    assert [card.address for card in machine.gpus] == ["0000:01:00.0", "0000:02:00.0"]
    assert isinstance(machine.gpus[0].uuid, Unreadable)
    assert "NotSupported" in machine.gpus[0].uuid.why
    (pair,) = machine.pairs
    assert (pair.num_nvlinks, pair.path, pair.pci_path) == (4, 1, 4)
    assert (pair.read, pair.write, pair.one_way) == (P2pStatus.OK, P2pStatus.CHIPSET, True)
    assert read_nvlink_traffic(FakeNvml()) == (10 * 1024, 10 * 1024)
    sample = sample_link(0, FakeNvml())
    assert not isinstance(sample, Unreadable)
    assert (sample.generation, sample.width) == (4, 16)


def test_nvml_that_cannot_start() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise RuntimeError("Driver Not Loaded")

    answer = ask_nvml(Broken())
    assert isinstance(answer, Unreadable)
    assert "Driver Not Loaded" in answer.why
