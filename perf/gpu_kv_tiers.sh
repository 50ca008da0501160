#!/usr/bin/env bash
# The KV tiers on a GPU: first that copies are right there, then what they cost.
#
# A model of Llama-3-8B's shape with random bf16 weights is made on the device, so that nothing has
# to be fetched; the host pool is pinned, copies run on streams of their own. Takes less than eight
# minutes on an H200. Needs python3 with torch (CUDA), transformers, safetensors, numpy, msgspec and
# tqdm; pytest as well for the check of the copies.
#
#   perf/gpu_kv_tiers.sh              on the GPU
#   DEVICE=cpu perf/gpu_kv_tiers.sh   the same path with a tiny model on the CPU, in a minute
#
# OUT: folder of the results (default perf/results). PYTHON: interpreter. RUNS: of the burst, of each
# variant. LIMIT_S: seconds after which measuring is ended; what is done by then is in the file.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cuda}
python=${PYTHON:-python3}
folder=${OUT:-perf/results}
limit_s=${LIMIT_S:-420}
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$folder"

for module in torch transformers safetensors numpy msgspec tqdm; do
  "$python" -c "import $module" || { echo "$python lacks $module" >&2; exit 1; }
done

if [ "$device" = cpu ]; then
  arguments=(--model tiny-random --quick --runs "${RUNS:-1}")
else
  arguments=(--model llama-3-8b-random --runs "${RUNS:-3}")
fi

status=0
if "$python" -c "import pytest, pytest_timeout, hypothesis" 2>/dev/null; then
  timeout 90 "$python" -m pytest -q tests/torch/test_transport_model.py || status=1
else
  echo "no pytest: copies are not checked, only measured" >&2
fi
timeout "$limit_s" "$python" -m perf.kv_tiers --device "$device" "${arguments[@]}" \
  --output "$folder/kv_tiers_$device.json" || status=1
exit $status
