#!/usr/bin/env bash
# Writes requirements/*.txt from the .in files. dev.txt is resolved first and constrains the images'
# locks, so that a test runs the versions that are shipped.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="${DEEPSEEK_CACHE:-$HOME/.cache/deepseek}/uv/bin/uv"
# Universal: one lock for every platform; no index address is written.
compile() {
  "$uv" pip compile -q --universal --generate-hashes --no-header --python-version 3.11 "$@"
}
compile requirements/uv.in -o requirements/uv.txt
compile requirements/dev.in -o requirements/dev.txt
for name in operator torch worker; do
  compile -c requirements/dev.txt "requirements/$name.in" -o "requirements/$name.txt"
done
