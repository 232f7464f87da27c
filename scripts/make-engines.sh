#!/bin/sh
# Makes the environments of the engines that `make test-engines` compares with, one each, from PyPI: .engines/NAME.
# What cannot be installed is named, and its tests are skipped.
#
#   scripts/make-engines.sh [python3.12]
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/scripts/find-python.sh" "${1:-}") || exit 1
to=${S2_ENGINES:-$root/.engines}

for list in "$root"/tests/engines/requirements-*.txt; do
    engine=$(basename "$list" .txt)
    engine=${engine#requirements-}
    venv=$to/$engine
    cmp -s "$list" "$venv/.installed" && continue
    echo "== $venv: installing what ${list#"$root"/} lists: 3 GB to download, 6 GB on the disk, up to 20 minutes, silently"
    rm -rf "$venv"
    if "$python" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$list"; then
        cp "$list" "$venv/.installed"
    else
        rm -rf "$venv"
        echo "note: $engine could not be installed; its tests are skipped" >&2
    fi
done
