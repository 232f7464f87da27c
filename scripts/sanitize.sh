#!/usr/bin/env bash
# The kernels on a GPU under compute-sanitizer (memcheck, racecheck), 1000 repeats, CUDA graphs and torch.compile: one
# line for each, exit status 1 when one fails. Needs a GPU with the CUDA toolkit; about four minutes.
#
#   scripts/sanitize.sh                  every part, of triton and, on Hopper, gluon
#   scripts/sanitize.sh --help           what the parts are, and how to choose some
#   PYTHON=.venv/bin/python COMPUTE_SANITIZER=/usr/local/cuda/bin/compute-sanitizer scripts/sanitize.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || true)}
case " $* " in *" --help "* | *" -h "*) exec "$python" tests/kernels/check_kernels.py --help ;; esac

sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
if [ -z "$sanitizer" ]; then
    for candidate in /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer; do
        [ -x "$candidate" ] && sanitizer=$candidate
    done
fi
if [ -z "$sanitizer" ] || ! command -v "$sanitizer" >/dev/null; then
    echo "sanitize.sh: compute-sanitizer not found (${sanitizer:-neither in PATH nor below /usr/local/cuda*}); it is" \
        "part of the CUDA toolkit: install it, or set COMPUTE_SANITIZER to its path" >&2
    exit 1
fi
if ! "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>/dev/null; then
    echo "sanitize.sh: ${python:-python3} sees no GPU through torch; run it on a machine with one, or set PYTHON" >&2
    exit 1
fi
is_hopper='import sys, torch; sys.exit(torch.cuda.get_device_capability()[0] != 9)'
backends=triton$("$python" -c "$is_hopper" && echo " gluon" || true)
# shellcheck disable=SC2086
exec "$python" tests/kernels/check_kernels.py --sanitizer "$sanitizer" --backends $backends "$@"
