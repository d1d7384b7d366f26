"""What three doctors said on three wires, and whether that is what they had to say. Called by doctor_h200.sh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60.0
SWITCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "host_memory": ("NCCL_P2P_DISABLE",),
    "sockets": ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
}
"""What was set, and so has to be named; nothing may be found where nothing was."""


def main(folder: Path) -> int:
    """Print and write the summary; 0 if every wire was judged right."""
    rows = [row(folder, *line.split()) for line in (folder / "doctor_times.txt").read_text().splitlines()]
    for each in rows:
        verdict = "; ".join(each["wrong"]) or "right"
        print(f"\n{each['wire']}: exit {each['exit_code']}, {each['seconds']:.1f} s, {verdict}")
        for finding in each["findings"]:
            print(f"  [{finding['severity']}] {finding['headline']}")
            print(f"    {cost(finding['cost'])}")
            print(f"    fix: {finding['fix']}")
        for measured in each["measured"]:
            print(f"  {measured}")
    (folder / "doctor_h200.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(each["wrong"] for each in rows) else 0


def row(folder: Path, wire: str, code: str, started: str, ended: str) -> dict[str, Any]:
    """One wire's verdict, and what is wrong with it."""
    seconds = float(ended) - float(started)
    text = (folder / f"doctor_{wire}.json").read_text()
    wrong = [] if seconds <= LIMIT_SECONDS else [f"took longer than {LIMIT_SECONDS:.0f} s"]
    found: dict[str, Any] = {"findings": [], "measurements": []}
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        wrong.append("no answer: " + (folder / f"doctor_{wire}.err").read_text()[-500:].strip())
    else:
        wrong += judged(wire, int(code), found)
    return {
        "wire": wire, "exit_code": int(code), "seconds": seconds, "wrong": wrong, "findings": found["findings"],
        "measured": [measured(each) for each in found["measurements"]], "notes": found.get("notes", []),
        "gaps": found.get("gaps", []),
    }  # fmt: skip


def judged(wire: str, code: int, found: dict[str, Any]) -> list[str]:
    """What the doctor should have said and did not, or the other way round."""
    if not SWITCHES[wire]:
        return [] if code == 0 else [f"not silent on the good wire (exit {code})"]
    wrong = [] if code == 1 else [f"exit {code} instead of 1"]
    named = next((each for each in found["findings"] if each["check"] == "nccl-switches"), None)
    if named is None:
        return [*wrong, "did not name the switch"]
    told = f"{named['headline']} {named['fix']}"
    wrong += [f"did not name {name}" for name in SWITCHES[wire] if name not in told]
    if "NVLink lies idle" not in named["headline"]:
        wrong.append("did not see NVLink idle")
    loss = named["cost"]
    if loss is None or loss["basis"] != "measured":
        wrong.append("the loss was not measured")
    elif not loss["lost_seconds_per_step"]:
        wrong.append("the loss was not told in step time")
    others = [each["check"] for each in found["findings"] if each is not named]
    return wrong + [f"also found {name}" for name in others]


def cost(loss: dict[str, Any] | None) -> str:
    """A finding's cost in one line."""
    if loss is None:
        return "no cost told"
    now, then = loss["actual_bytes_per_s"] / 1e9, loss["expected_bytes_per_s"] / 1e9
    text = f"{now:.1f} instead of {then:.1f} GB/s ({loss['basis']})"
    most, least = loss["lost_seconds_per_step"], loss["least_lost_seconds_per_step"]
    return text if most is None else f"{text}; {1e3 * (least or 0.0):.0f} to {1e3 * most:.0f} ms a step"


def measured(each: dict[str, Any]) -> str:
    """A measurement in one line."""
    idle = "" if each["nvlink_bytes"] is None else f", NVLink moved {each['nvlink_bytes'] / 1e9:.2f} GB"
    return (
        f"{each['kind']} {each['variant']} {each['bytes'] / 2**20:.0f} MiB over {each['transport'] or '-'}: "
        f"{each['problem'] or format(each['bytes_per_s'] / 1e9, '.1f') + ' GB/s'}{idle}"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
