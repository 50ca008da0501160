#!/usr/bin/env bash
# The KV tiers on a GPU: first that copies are right there, then what they cost.
#
# A model of Llama-3-8B's shape with random bf16 weights is made on the device, so that nothing has
# to be fetched; the host pool is pinned, copies run on streams of their own. Ends within eight
# minutes, whatever the GPU: where it is slow, rounds of the burst are left out, and the result says
# how many. The first section looks at every byte that copies leave and ends the run if one is
# wrong; with pytest, pytest-timeout and hypothesis the tests of the copies run before it.
#
#   perf/gpu_kv_tiers.sh              on the GPU
#   DEVICE=cpu perf/gpu_kv_tiers.sh   the same path with a tiny model on the CPU, in a minute
#
# Needs python3 (3.10 to 3.12) with torch (CUDA) and transformers, and what is listed below. What is
# missing is installed for this run alone from wheels in build/wheels (git ignores it). For a
# machine without network, fetch them before, for its Python:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux2014_x86_64 --dest build/wheels msgspec
#
# OUT: folder of the results (default perf/results). PYTHON: interpreter. WHEELS: folder of wheels.
# RUNS: of the burst, of each variant (default 5; 1 on the CPU). LIMIT_S: seconds for everything;
# when they are over, what is done by then is in the file.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cuda}
python=${PYTHON:-python3}
folder=${OUT:-perf/results}
wheels=${WHEELS:-build/wheels}
limit_s=${LIMIT_S:-460}
needed="torch transformers safetensors numpy msgspec tqdm"
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$folder"

# Names of those of its arguments that Python cannot find.
lacking() {
  "$python" -c '
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@"
}

missing=$(lacking $needed)
if [ -n "$missing" ]; then
  extra=$(mktemp -d)
  trap 'rm -rf "$extra"' EXIT
  # shellcheck disable=SC2086  # one argument each
  "$python" -m pip install --quiet --no-index --no-deps --find-links "$wheels" \
    --target "$extra" $missing || { echo "$python lacks $missing, $wheels too" >&2; exit 1; }
  export PYTHONPATH="$extra${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ "$device" = cpu ]; then
  arguments=(--model tiny-random --quick --runs "${RUNS:-1}")
else
  arguments=(--model llama-3-8b-random --runs "${RUNS:-5}")
fi

status=0
if [ -z "$(lacking pytest pytest_timeout hypothesis)" ]; then
  timeout -k 5 90 "$python" -m pytest -q -p no:cacheprovider \
    tests/torch/test_transport_cuda.py tests/torch/test_transport_model.py || status=1
fi
left_s=$((limit_s - SECONDS))
timeout -k 5 "$left_s" "$python" -m perf.kv_tiers --device "$device" "${arguments[@]}" \
  --limit-s $((left_s - 20)) --output "$folder/kv_tiers_$device.json" || status=1
exit $status
