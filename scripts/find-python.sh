#!/bin/sh
# Prints the path of a Python >= 3.12, or one line that says what to install.
#
#   scripts/find-python.sh              first of: python3.12, python3.13, python3, python3.14, python on PATH; pyenv's
#                                       versions
#   scripts/find-python.sh /opt/bin/py  that one only: an explicit choice is never replaced by another
set -u
explicit=${1:-}

# A candidate is run, not only looked up: pyenv's shims exist for versions that are not active and then fail.
executable_if_new_enough() {
    "$1" -c 'import sys; sys.version_info >= (3, 12) or sys.exit(1); print(sys.executable)' 2>/dev/null
}

if [ -n "$explicit" ]; then
    executable_if_new_enough "$explicit" && exit 0
    found=$("$explicit" --version 2>&1 | head -n 1)
    echo "PYTHON=$explicit is not a Python >= 3.12 ($found); give another, or leave PYTHON= out to have one looked for" >&2
    exit 1
fi

pyenv_versions=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 2>/dev/null | sort -V)
for candidate in python3.12 python3.13 python3 python3.14 python $pyenv_versions; do
    executable_if_new_enough "$candidate" && exit 0
done
echo "no Python >= 3.12 on PATH or among pyenv's versions; install one (apt install python3.12 python3.12-venv, or" \
    "pyenv install 3.12) or name it with PYTHON=/path/to/python3.12" >&2
exit 1
