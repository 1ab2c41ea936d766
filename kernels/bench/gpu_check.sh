#!/bin/sh
# Everything that needs a CUDA GPU, in one go, under eight minutes: sh kernels/bench/gpu_check.sh [folder for the JSON]
# Exit status: 0 all right, 1 a kernel is wrong or failed, 2 there is no GPU. PYTHON chooses the interpreter; it needs
# torch with CUDA and triton, and nothing else.
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
PYTHONPATH=kernels exec timeout 480 "$python" kernels/bench/gpu_check.py "${1:-out/gpu}"
