#!/usr/bin/env bash
# Runs the live tests of the elastic worker and of reading KV over Mooncake's TCP transport, without a GPU or
# RDMA device:
#   tests/live/mooncake.sh [folder of the environment]
# Makes an environment of the pinned SGLang with Mooncake in it (beside the one that `deltaserve launch
# install` makes, which has none), once. Mooncake's library links RDMA's even when it uses TCP: those are
# the system's, and installing them needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/deltaserve/sglang-with-mooncake}
mooncake=mooncake-transfer-engine-non-cuda==0.3.13.post1

missing=()
for library in libibverbs.so.1 librdmacm.so.1 libnl-3.so.200 libnl-route-3.so.200; do
  ldconfig -p | grep -q "$library" || missing+=("$library")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "error: ${missing[*]} not found; on Debian and Ubuntu:" \
    "apt-get install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200" >&2
  exit 2
fi

if ! "$environment/bin/python" -c "import mooncake.engine" 2>/dev/null; then
  .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$environment"
  .venv/bin/uv pip install --quiet --python "$environment/bin/python" --no-deps --require-hashes \
    --requirement launch/engines/sglang.lock
  .venv/bin/uv pip install --quiet --python "$environment/bin/python" --no-deps "$mooncake"
fi
DELTASERVE_LIVE_ENGINE=$environment/bin/python \
  exec .venv/bin/python -m pytest -q -s -m live -k mooncake \
  tests/live/test_elastic_live.py tests/live/test_kv_read_live.py
