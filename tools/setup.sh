#!/usr/bin/env bash
# Makes .venv from requirements/dev.txt: every version and hash is in the lock, nothing else is taken.
# Runs again only when a lock or a package's metadata changed. Needs Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

cache="${DEEPSEEK_CACHE:-$HOME/.cache/deepseek}"
python="${PYTHON:-python3}"
stamp=.venv/.locked
state=$(cat requirements/*.txt ./*/pyproject.toml | sha256sum | cut -d' ' -f1)
[ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $("$python" --version 2>&1) is too old; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.12 make setup" >&2
  exit 1
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  echo "setup: $python has no venv module; installing python3-venv"
  apt-get install -y -qq python3-venv || {
    echo "setup: install python3-venv (Debian) or name another interpreter by PYTHON=" >&2
    exit 1
  }
fi

uv="$cache/uv/bin/uv"
if [ "$("$uv" --version 2>/dev/null | cut -d' ' -f2)" != "$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements/uv.txt)" ]; then
  echo "setup: installing uv into $cache/uv"
  "$python" -m venv --clear "$cache/uv"
  "$cache/uv/bin/python" -m pip install -q --require-hashes -r requirements/uv.txt
fi

[ -x .venv/bin/python ] || "$uv" venv -q --python "$python" .venv
echo "setup: installing the locked packages (about 5 GB with torch; some minutes the first time)"
"$uv" pip sync -q --python .venv/bin/python --require-hashes requirements/dev.txt
"$uv" pip install -q --python .venv/bin/python --no-deps --no-build-isolation \
  -e contract -e operator -e kernels -e worker
echo "$state" >"$stamp"
echo "setup: .venv is ready"
