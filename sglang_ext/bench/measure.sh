#!/usr/bin/env bash
# Starts SGLang workers on GPUs (or on the CPU, DEVICE=cpu) and runs the phases of
# `python -m sglang_ext.bench` on them:
#   OUT=out/elastic GPUS="0 1 2 3" SGLANG_PYTHON=/opt/sglang/bin/python sglang_ext/bench/measure.sh
# WORKERS names them: plain (SGLang without the plugin), colocated (with telemetry), itl, stock, mixed
# (elastic, by pacing), prefill; the n-th gets the n-th of GPUS, which may repeat one. A name may go on
# with -graphs (prefill CUDA graphs, up to GRAPH_TOKENS) and with a target in ms: itl-graphs-40. The
# phase "death" is identity once more, with the prefill worker killed in the middle.
# Everything goes to $OUT as it is measured; a worker or phase that fails is left out, the rest goes on.
# Weights are random; with fewer LAYERS several workers fit on a GPU. Run from the repository's root.
set -uo pipefail
: "${OUT:?set OUT to the folder of results}"
ROOT=${ROOT:-$PWD}
SGLANG_PYTHON=${SGLANG_PYTHON:?set SGLANG_PYTHON to the interpreter that has SGLang}
OUR_PYTHON=${OUR_PYTHON:-$ROOT/.venv/bin/python}
DEVICE=${DEVICE:-cuda}
PORT=${PORT:-31000}
LIMIT_START_S=${LIMIT_START_S:-230}   # for all workers to come up
LIMIT_TOTAL_S=${LIMIT_TOTAL_S:-540}   # for everything; phases are cut to what is left of it
MODEL=${MODEL:-$([ "$DEVICE" = cpu ] && echo tiny-qwen3-moe || echo qwen3-coder-30b-a3b)}
PHASES=${PHASES:-"warm identity stall tax transfer death"}
WORKERS=${WORKERS:-"plain itl-graphs stock prefill"}
GPUS=(${GPUS:-0})
BACKEND=${BACKEND:-nixl}              # or mooncake
IDENTITY_ARMS=${IDENTITY_ARMS:-all}   # or mixed: only the arm that takes both ways
FLAGS=(${FLAGS:-})                    # more flags for every worker; they win
WORK=${WORK:-$(mktemp -d /tmp/sglang-ext-bench.XXXXXX)}
mkdir -p "$OUT" "$WORK/steps" "$WORK/model" "$WORK/cwd"
T0=$SECONDS
exec > >(tee -a "$OUT/run.log") 2>&1
say() { printf '[%4d s] %s\n' $((SECONDS - T0)) "$*"; }

if [ "$DEVICE" = cuda ]; then
  memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
  # 61 GB of weights at 48 layers; as many workers share a GPU as WORKERS has more names than GPUS.
  sharing=$(( ($(wc -w <<< "$WORKERS") + ${#GPUS[@]} - 1) / ${#GPUS[@]} ))
  LAYERS=${LAYERS:-$((memory_mib / sharing > 100000 ? 48 : memory_mib / sharing / 2200))}
  KV_TOKENS=${KV_TOKENS:-150000}
  CHUNK=${CHUNK:-8192}
  GRAPH_TOKENS=${GRAPH_TOKENS:-4096}
  ITL_MS=${ITL_MS:-$((80 * LAYERS / 48))}   # the target of 48 layers, scaled
  IDENTITY=${IDENTITY:-"--sessions 12 --turns 3 --first-tokens 4000 --turn-tokens 1000 --output-tokens 16 --at-once 1 --abort-percent 10"}
  STALL=${STALL:-"--decodes 8 --context-tokens 2000 --prompt-tokens 32000 --repeats 5"}
  TAX=${TAX:-"--lanes 8 --sessions 16 --turns 2 --first-tokens 6000 --turn-tokens 1000 --output-tokens 64 --rounds 4"}
  TRANSFER=${TRANSFER:-"--lengths 4000,8000,16000,32000,64000 --delta-tokens 2000 --repeats 5"}
  VOCABULARY=${VOCABULARY:-30000}
  nvidia-smi --query-gpu=timestamp,index,memory.used,utilization.gpu,power.draw --format=csv -l 1 \
    > "$OUT/gpu.csv" 2>/dev/null & GPU_PID=$!
else
  LAYERS=${LAYERS:-2}; KV_TOKENS=${KV_TOKENS:-40000}; CHUNK=${CHUNK:-512}; ITL_MS=${ITL_MS:-60}
  IDENTITY=${IDENTITY:-"--sessions 4 --turns 3 --first-tokens 600 --turn-tokens 200 --output-tokens 8 --at-once 2 --abort-percent 25"}
  STALL=${STALL:-"--decodes 4 --context-tokens 200 --prompt-tokens 3000 --repeats 2"}
  TAX=${TAX:-"--lanes 4 --sessions 4 --turns 2 --first-tokens 500 --turn-tokens 100 --output-tokens 16 --rounds 2"}
  TRANSFER=${TRANSFER:-"--lengths 500,1000,2000 --delta-tokens 100 --repeats 2"}
  VOCABULARY=${VOCABULARY:-1000}
  GPU_PID=
fi
DEATH=${DEATH:-"--after-turns 6"}
LIMIT_WARM_S=${LIMIT_WARM_S:-60}; LIMIT_IDENTITY_S=${LIMIT_IDENTITY_S:-45}; LIMIT_STALL_S=${LIMIT_STALL_S:-80}
LIMIT_TAX_S=${LIMIT_TAX_S:-70}; LIMIT_TRANSFER_S=${LIMIT_TRANSFER_S:-45}; LIMIT_DEATH_S=${LIMIT_DEATH_S:-60}

# The plugin's entry point beside a link to the package: SGLang's environment need not hold it.
mkdir -p "$WORK/path/deltaserve-0.dist-info"
printf 'Metadata-Version: 2.1\nName: deltaserve\nVersion: 0\n' > "$WORK/path/deltaserve-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\ndeltaserve = sglang_ext.plugin:install\n' > "$WORK/path/deltaserve-0.dist-info/entry_points.txt"
ln -sfn "$ROOT/sglang_ext" "$WORK/path/sglang_ext"
"$OUR_PYTHON" - "$ROOT/launch/models/$MODEL.toml" "$WORK/model/config.json" <<'PY'
import json, sys, tomllib
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "w") as target:
    json.dump(tomllib.load(source), target)
PY

declare -A PID=() PORT_OF=() LOG=()
start() {  # name, features, extra environment (one word each), --, flags
  local name=$1 features=$2 graphs=(--cuda-graph-backend-prefill disabled); shift 2
  [[ $name == *-graphs* ]] && graphs=(--cuda-graph-backend-prefill breakable --cuda-graph-max-bs-prefill "$GRAPH_TOKENS")
  local vars=() flags=() path="$WORK/path"
  while [ "$1" != -- ]; do vars+=("$1"); shift; done; shift
  local n=${#PID[@]}; local port=$((PORT + 10 * n)); PORT_OF[$name]=$port; LOG[$name]="$WORK/$name.log"
  flags=(--model-path "$WORK/model" --load-format dummy --skip-tokenizer-init --random-seed 0
    --host 127.0.0.1 --port "$port" --nccl-port $((port + 1)) --device "$DEVICE"
    --json-model-override-args "{\"num_hidden_layers\": $LAYERS}" --enable-cache-report --enable-metrics
    --max-total-tokens "$KV_TOKENS" --chunked-prefill-size "$CHUNK" --max-running-requests 32
    --sampling-backend pytorch --grammar-backend none)
  if [ "$DEVICE" = cuda ]; then
    flags+=(--attention-backend fa3 "${graphs[@]}" --cuda-graph-max-bs-decode 32 --mem-fraction-static 0.9)
    vars+=("CUDA_VISIBLE_DEVICES=${GPUS[$((n % ${#GPUS[@]}))]}")
  else
    flags+=(--dtype float32 --attention-backend torch_native --disable-overlap-schedule --sleep-on-idle
      --mem-fraction-static 0.4)
    features="cpu,$features"; path="$path:$path/sglang_ext/cpu/stubs"
    vars+=(SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES=)
  fi
  features=${features%,}
  (cd "$WORK/cwd" && exec setsid env ${features:+"PYTHONPATH=$path" SGLANG_PLUGINS=deltaserve "DELTASERVE_SGLANG=$features"} \
    "DELTASERVE_TELEMETRY_DIR=$WORK/steps" "DELTASERVE_WORKER_ID=$name" MASTER_PORT=$((port + 2)) \
    SGLANG_HOST_IP=127.0.0.1 NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost HF_HUB_OFFLINE=1 \
    OMP_NUM_THREADS=1 SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 PYTHONUNBUFFERED=1 "${vars[@]}" \
    "$SGLANG_PYTHON" -m sglang.launch_server "${flags[@]}" ${FLAGS[@]+"${FLAGS[@]}"} "$@") > "${LOG[$name]}" 2>&1 &
  PID[$name]=$!
  disown
  say "starting $name: pid ${PID[$name]}, port $port, GPU ${GPUS[$((n % ${#GPUS[@]}))]}"
}

finish() {
  trap - EXIT TERM INT
  say "ending"
  for name in "${!PID[@]}"; do kill -TERM -- -"${PID[$name]}" 2>/dev/null; done
  [ -n "$GPU_PID" ] && kill "$GPU_PID" 2>/dev/null
  [ -e "$OUT/samples.jsonl" ] && (cd "$ROOT" && "$OUR_PYTHON" -m sglang_ext.bench report --output "$OUT" > /dev/null)
  tar -C "$WORK" -czf "$OUT/logs.tar.gz" $(cd "$WORK" && ls ./*.log) 2>/dev/null
  tar -C "$WORK" -czf "$OUT/steps.tar.gz" steps 2>/dev/null
  for _ in 1 2 3 4 5 6; do
    alive=0; for name in "${!PID[@]}"; do kill -0 -- -"${PID[$name]}" 2>/dev/null && alive=1; done
    [ $alive = 0 ] && break; sleep 0.5
  done
  for name in "${!PID[@]}"; do kill -KILL -- -"${PID[$name]}" 2>/dev/null; done
  say "done"
}
trap finish EXIT
trap 'exit 143' TERM INT

SEPARATED=(--disaggregation-transfer-backend "$BACKEND"); SEPARATED_VARS=()
if [ "$BACKEND" = mooncake ] && [ "$DEVICE" = cuda ]; then  # docs/elastic-worker.md, Transfer backends
  SEPARATED_VARS=(SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK MC_INTRANODE_NVLINK=true MC_LOG_LEVEL=INFO)
fi
target_of() {  # the number that a name ends with, or ITL_MS
  [[ $1 =~ -([0-9]+)$ ]] && echo "${BASH_REMATCH[1]}" || echo "$ITL_MS"
}
for name in $WORKERS; do
  kind=${name%%-*}
  case $kind in
    plain) start "$name" "" -- ;;
    colocated) start "$name" telemetry -- ;;
    prefill) start prefill telemetry "${SEPARATED_VARS[@]}" -- --disaggregation-mode prefill \
      --disaggregation-bootstrap-port $((PORT + 99)) "${SEPARATED[@]}" ;;
    itl | stock | mixed) start "$name" elastic,telemetry "DELTASERVE_ELASTIC_INTERFERENCE=$kind" \
      "DELTASERVE_ELASTIC_TARGET_ITL_MS=$(target_of "$name")" "${SEPARATED_VARS[@]}" -- --disaggregation-mode decode \
      --disaggregation-decode-enable-radix-cache "${SEPARATED[@]}" ;;
    *) say "unknown worker $name"; exit 2 ;;
  esac
done

cat > "$WORK/up.py" <<'PY'
"""Prints the workers that answer, one a line; gives up on those that end or take too long."""
import os, sys, time, urllib.request
limit_s = time.monotonic() + float(sys.argv[1])
waiting = {name: (int(pid), int(port)) for name, pid, port in (a.split(":") for a in sys.argv[2:])}
while waiting and time.monotonic() < limit_s:
    for name, (pid, port) in list(waiting.items()):
        try:
            if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError
        except (OSError, ProcessLookupError):
            print(f"{name} ended while starting", file=sys.stderr, flush=True)
            del waiting[name]
            continue
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    print(name, flush=True)
                    del waiting[name]
        except OSError:
            pass
    time.sleep(0.5)
for name in waiting:
    print(f"{name} was not up in time", file=sys.stderr, flush=True)
PY
asked=(); for name in "${!PID[@]}"; do asked+=("$name:${PID[$name]}:${PORT_OF[$name]}"); done
UP=$(NO_PROXY=127.0.0.1 no_proxy=127.0.0.1 "$OUR_PYTHON" "$WORK/up.py" "$LIMIT_START_S" "${asked[@]}")
say "up: $(echo $UP)"
up() { [[ " $(echo $UP) " == *" $1 "* ]]; }
for name in $WORKERS; do
  up "$name" || { say "$name is not up; the end of its log:"; tail -n 40 "${LOG[$name]}"; }
done
grep -hE "max_total_num_tokens|Failed to (load|execute)" "$WORK"/*.log | tail -n 8

alive() { up "$1" && kill -0 "${PID[$1]}" 2>/dev/null; }
join() { local IFS=,; echo "$*"; }
choose() {  # what the workers that are alive allow
  given=(); arms=(); locals=(); separated=
  for name in $WORKERS; do
    alive "$name" || continue
    local url="$name=http://127.0.0.1:${PORT_OF[$name]}"
    if [ "$name" = prefill ]; then url="$url,127.0.0.1:$((PORT + 99))"; else locals+=("$name"); fi
    given+=(--worker "$url")
  done
  arms=("${locals[@]}")
  for name in "${locals[@]}"; do
    [[ $name =~ ^(itl|stock|mixed) ]] || continue
    if alive prefill; then separated="$name+prefill"; arms+=("$separated"); break; fi
  done
  mixed=${separated/+/\~}
  reference=${locals[0]:-none}
}

bench() {  # name, limit, more arguments; 1 when a worker has died
  local name=$1 limit=$2; shift 2
  local left=$((LIMIT_TOTAL_S - (SECONDS - T0) - 15))
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then say "no time left for $name"; return 0; fi
  say "phase $name, at most $limit s, workers: ${locals[*]} $separated"
  (cd "$ROOT" && NO_PROXY=127.0.0.1 no_proxy=127.0.0.1 timeout $((limit + 10)) "$OUR_PYTHON" -m sglang_ext.bench "$name" \
    --output "$OUT" --limit-s "$limit" --vocabulary "$VOCABULARY" "${given[@]}" "$@") 2>&1 && return 0
  say "phase $name ended with an error"
  for worker in "${locals[@]}" prefill; do
    if up "$worker" && ! alive "$worker"; then
      say "$worker has died; the end of its log:"; tail -n 25 "${LOG[$worker]}" | cut -c1-300; return 1
    fi
  done
  return 0
}

run_phase() {
  choose
  [ ${#locals[@]} -gt 0 ] || { say "no worker is left"; return 0; }
  case $1 in
    warm) bench warm "$LIMIT_WARM_S" --arms "$(join "${arms[@]}")" ;;
    identity) [ "$IDENTITY_ARMS" = mixed ] && [ -n "$mixed" ] && arms=()
      bench identity "$LIMIT_IDENTITY_S" --reference "$reference" --arms "$(join "${arms[@]}" $mixed)" $IDENTITY ;;
    death) [ -z "$separated" ] || bench death "$LIMIT_DEATH_S" --reference "$reference" --arms "$mixed" \
      --kill "${PID[prefill]}" --seed 2 $IDENTITY $DEATH ;;
    stall) bench stall "$LIMIT_STALL_S" --arms "$(join "${arms[@]}")" $STALL ;;
    tax) bench tax "$LIMIT_TAX_S" --reference "$reference" --arms "$(join "${locals[@]}")" $TAX ;;
    transfer) [ -z "$separated" ] || bench transfer "$LIMIT_TRANSFER_S" --arms "$separated" \
      --telemetry "$WORK/steps" $TRANSFER ;;
    *) say "unknown phase $1" ;;
  esac
}
for phase in $PHASES; do
  run_phase "$phase" || run_phase "$phase"   # once more without the worker that died
  (cd "$ROOT" && "$OUR_PYTHON" -m sglang_ext.bench report --output "$OUT" > /dev/null)
done
[ -e "$OUT/report.md" ] && cat "$OUT/report.md"
say "measured"
