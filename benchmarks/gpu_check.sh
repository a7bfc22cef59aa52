#!/usr/bin/env bash
# The device path checked and measured in at most 6 minutes: benchmarks/gpu_check.sh FOLDER [--dry-run]
# One table at the end; every figure in FOLDER/figures.json.  See benchmarks/gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/gpu_check.sh FOLDER [--dry-run]}
shift
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec timeout 355 "$python" benchmarks/gpu_check.py "$folder" "$@"
