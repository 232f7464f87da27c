#!/bin/sh
# Builds the release of the commit that is checked out: dist/*.tar.gz, and from it dist/*.whl.
#
#   scripts/make-dist.sh [python]     with pip, setuptools and wheel (the extra dev); no network is needed
set -eu
python=${1:-python3}
cd "$(dirname "$0")/.."
case $python in
/*) ;;
*/*) python=$PWD/$python ;; # as make gives it: relative to the checkout
esac

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -z "$(git status --porcelain)" ] ||
    fail "the working tree has changes that are not in the commit; commit or stash them"
version=$("$python" -c 'import s2_megatron; print(s2_megatron.__version__)')
grep -q "^## \\[*$version" CHANGELOG.md ||
    fail "CHANGELOG.md has no section '## $version'; write it, or change __version__ in s2_megatron/__init__.py"

# A copy of the commit: what lies around in the checkout, and what setuptools remembers of earlier builds, stays out.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git archive HEAD | tar -x -C "$copy"
mkdir -p dist
(cd "$copy" && "$python" -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > build.log 2>&1) || {
    cat "$copy/build.log" >&2
    fail "the source distribution could not be built; the reason is above"
}
sdist=s2_megatron-$version.tar.gz
cp "$copy/dist/$sdist" dist/
"$python" -m pip --disable-pip-version-check --quiet wheel --no-build-isolation --no-deps --no-index -w dist \
    "dist/$sdist"
echo "dist/$sdist"
echo "dist/s2_megatron-$version-py3-none-any.whl"
