#!/bin/sh
# Makes the virtual environment $1 and installs this project with its development tools into it, editable.
#
#   scripts/make-venv.sh .venv [python]
set -eu
venv=$1
python=$("$(dirname "$0")/find-python.sh" "${2:-}")
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python cannot make virtual environments: apt install python$version-venv" >&2
    exit 1
fi

# Triton compiles its launchers with the C compiler and Python's headers at run time, so a machine with a GPU cannot do
# without. A machine without one only needs them for a package that has no wheel there: said, not refused.
missing=
command -v "${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 ||
    missing="build-essential"
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    missing="$missing python$version-dev"
missing=${missing# }
if [ -n "$missing" ]; then
    if [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1; then
        echo "Triton needs a C compiler and Python's headers on a GPU machine: apt install $missing" >&2
        exit 1
    fi
    echo "note: no C compiler or no Python headers here; fine without a GPU, else: apt install $missing" >&2
fi

echo "== $venv with $python (Python $version): installing what setup.py lists: 3 GB to download, 7 GB on the disk, a few minutes, silently"
# A folder left by an interrupted run, or one of another Python, is completed or refused by venv itself.
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    "$python" -m venv "$venv"
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]"; then
    [ -n "$missing" ] && echo "the installation failed, perhaps for want of a compiler: apt install $missing" >&2
    exit 1
fi

# The Hopper kernels run on several releases of Triton. Tests compile them with the one that torch brings, and with the oldest, beside it.
oldest=$(sed -n 's/^MEASURED = ((\([0-9]*\), \([0-9]*\)).*/\1.\2/p' "$(dirname "$0")/../s2_megatron/kernels/trial.py")
case $("$venv/bin/python" -m pip show triton 2>/dev/null | sed -n 's/^Version: //p') in
"" | "$oldest".*) ;;
*)
    [ -d "$venv/triton-$oldest.x" ] ||
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$venv/triton-$oldest.x" "triton==$oldest.*" ||
        echo "note: no Triton $oldest to compile the Hopper kernels with; those tests are skipped" >&2
    ;;
esac
