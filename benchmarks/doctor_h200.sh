#!/usr/bin/env bash
# The doctor on three wires of one machine with NVLink: as it is, through host memory, over sockets.
#
#     OUT=results benchmarks/doctor_h200.sh [MODEL]
#
# Each doctor measures (--run) with a plan of MODEL for these cards, so that a loss is told in GB/s and in step time.
# Its JSON goes to $OUT/doctor_<wire>.json; the summary says whether the doctor was silent on the good wire, named the
# switch on the bad ones, saw NVLink idle, and stayed within 60 s.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?say where results go: OUT=FOLDER}"
python="${PYTHON:-python}"
model="${1:-qwen2.5-1.5b}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

cards=$("$python" -c 'from shardwise.facts.machine.child import count_cuda_cards as c; n = c(); print(n if isinstance(n, int) else 0)')
[ "$cards" -ge 2 ] || { echo "needs two cards, found $cards"; exit 2; }
"$python" -m shardwise plan "$model" --gpus "${cards}xh200" --tuning full --seq 4096 --out "$OUT/doctor_plan.yaml" >"$OUT/doctor_plan.txt" || exit 1

examine() { # name, switches...
    local name=$1 started ended
    shift
    started=$(date +%s.%N)
    env "$@" "$python" -m shardwise doctor --run --seconds 50 --plan "$OUT/doctor_plan.yaml" --json \
        >"$OUT/doctor_$name.json" 2>"$OUT/doctor_$name.err"
    local code=$?
    ended=$(date +%s.%N)
    echo "$name $code $started $ended"
}

{
    examine default SHARDWISE_WIRE=default
    examine host_memory NCCL_P2P_DISABLE=1
    examine sockets NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
} >"$OUT/doctor_times.txt"
"$python" benchmarks/doctor_summary.py "$OUT"
