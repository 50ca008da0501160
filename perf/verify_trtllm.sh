#!/usr/bin/env bash
# Checks TokenFlow on TensorRT-LLM with one engine, and writes one report file that can be sent.
#
# For NVIDIA's Triton images 26.04 to 26.07 with the tag -trtllm-python-py3, from a checkout:
#
#   docker run --rm --gpus all --shm-size=2g --ulimit memlock=-1 -v $PWD:/tokenflow \
#     -v /srv/engines:/srv/engines -w /tokenflow IMAGE perf/verify_trtllm.sh /srv/engines/llama/engine
#
#   perf/verify_trtllm.sh ENGINE [--short] [--output FILE] [--sections NAME …] [--set NAME=VALUE] …
#
# The report is tokenflow-trtllm-report.txt unless --output says otherwise. Exit code: 0 nothing
# failed, 1 a section failed (the report ends with which), 2 the run was not begun.
#
# Nothing is installed into the image's Python: packages that it lacks (msgspec, tqdm) are fetched
# into a folder of their own, behind its own packages, for this run alone. WHEELS: a folder with
# their wheels, where there is no network. PYTHON: interpreter, 3.10 to 3.12 (default python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

give_up() {
  echo "verify_trtllm: $1" >&2
  exit 2
}

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  "") usage; exit 2 ;;
esac

command -v "$python" > /dev/null || give_up "there is no $python; set PYTHON"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' ||
  give_up "$("$python" --version 2>&1): Python 3.10 to 3.12 is needed"

# Those of its arguments that this Python cannot find.
lacking() {
  "$python" -c '
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@"
}

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ -z "$(lacking tensorrt_llm)" ] ||
  give_up "tensorrt_llm is not installed for $python: run this in a -trtllm-python-py3 image"
[ -z "$(lacking numpy)" ] || give_up "numpy is not installed for $python"

missing=$(lacking msgspec tqdm)
if [ -n "$missing" ]; then
  extra=$(mktemp -d)
  trap 'rm -rf "$extra"' EXIT
  from=()
  [ -z "${WHEELS:-}" ] || from=(--no-index --find-links "$WHEELS")
  # shellcheck disable=SC2086  # one argument each
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$extra" \
    ${from[@]+"${from[@]}"} $missing ||
    give_up "cannot fetch: $missing; put their wheels into a folder and set WHEELS to it"
  export PYTHONPATH="$PYTHONPATH:$extra"
fi

status=0
"$python" -m perf.trtllm_suite "$@" || status=$?
exit "$status"
