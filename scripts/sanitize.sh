#!/usr/bin/env bash
# compute-sanitizer over small calls of every kernel: memcheck must be clean, and so must racecheck, but for reports
# that tests/kernels/sanitizer_explained.json explains (plain Triton has none). Needs a GPU; about a minute for each
# tool and backend.
#
#   scripts/sanitize.sh                  memcheck and racecheck of triton and, on Hopper, gluon
#   BACKENDS=triton TOOLS=memcheck scripts/sanitize.sh
#   PYTHON=.venv/bin/python COMPUTE_SANITIZER=/usr/local/cuda/bin/compute-sanitizer scripts/sanitize.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || true)}
tools=${TOOLS:-memcheck racecheck}

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
backends=${BACKENDS:-triton$("$python" -c "$is_hopper" && echo " gluon" || true)}

# An allocation of its own for every tensor: inside torch's pools a write out of bounds would hit another tensor unseen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0
for backend in $backends; do
    # Without the tool first: it compiles, so that the tool's time is the kernels'.
    "$python" tests/kernels/sanitizer_cases.py --backend "$backend"
    for tool in $tools; do
        log="$logs/$tool-$backend.log"
        options=()
        [ "$tool" = racecheck ] && options+=(--racecheck-report all --show-backtrace no --print-limit 1000000)
        # Only kernels of ours (their names begin with s2_): torch's would take most of the time.
        timeout "${LIMIT:-600}" "$sanitizer" --tool "$tool" "${options[@]}" --kernel-name kernel_substring=s2_ \
            "$python" tests/kernels/sanitizer_cases.py --backend "$backend" >"$log" 2>&1 || echo "exit code $?" >>"$log"
        "$python" tests/kernels/sanitizer_reports.py "$tool" "$backend" "$log" || failed=1
    done
done
exit $failed
