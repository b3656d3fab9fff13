#!/usr/bin/env bash
# Refreshes requirements.lock and requirements-dev.lock from pyproject.toml: the newest versions that fit together, each
# with its hashes, for every platform and for Python 3.11 and later. Run it after changing a dependency, then the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Held at the releases that the recipes were measured with. Raise them together: each torchvision fits one torch.
pins="torch==2.14.1
torchvision==0.29.1"

if ! command -v uv >/dev/null; then
    echo "scripts/lock.sh needs uv: pip install uv" >&2
    exit 1
fi

# Both files are made before either is replaced: a failure half-way leaves the old pair, which still agrees.
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

# No index address goes into the files: they must install from PyPI and from any mirror of it.
compile() { # compile OUTPUT [OPTION...]
    uv pip compile pyproject.toml --output-file "$@" --constraint - <<<"$pins" \
        --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command scripts/lock.sh
}

compile "$new/requirements-dev.lock" --extra dev
# uv keeps the versions that it finds in the output file, so both files get the same ones (tests/test_locks.py checks).
cp "$new/requirements-dev.lock" "$new/requirements.lock"
extras=()
# part: reports
extras+=(--extra report)  # a bare fit ends with report.html
# /part
compile "$new/requirements.lock" "${extras[@]}"

mv "$new/requirements.lock" "$new/requirements-dev.lock" .
echo "Wrote requirements.lock and requirements-dev.lock."
