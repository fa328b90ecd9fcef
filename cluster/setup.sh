#!/usr/bin/env bash
# Everything vitscale needs on one machine: system libraries (where it may install them), a virtual environment, packages.
#   bash cluster/setup.sh [VENV]          default .venv; PYTHON=... chooses the interpreter
set -euo pipefail
venv="${1:-.venv}"
python="${PYTHON:-python3}"
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 or newer; $python is $("$python" --version 2>&1 || true). Choose one: make setup PYTHON=python3.11"

# FFCV compiles against OpenCV and libturbojpeg, our own decoding against libjpeg-turbo. Asked for here, so that their absence is one line and no compiler trace.
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v pkg-config >/dev/null || missing+=(pkg-config)
pkg-config --exists opencv4 2>/dev/null || missing+=(libopencv-dev)
pkg-config --exists libturbojpeg 2>/dev/null || [ -e /usr/include/turbojpeg.h ] || missing+=(libturbojpeg0-dev)
pkg-config --exists libjpeg 2>/dev/null || [ -e /usr/include/jpeglib.h ] || missing+=(libjpeg-dev)
version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
"$python" -c 'import ensurepip' 2>/dev/null || missing+=("$version-venv")
"$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    missing+=("$version-dev")
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]} (Debian's names). Install them with your system's package manager, then repeat."
    [ "$(id -u)" = 0 ] ||
        fail "missing system packages. Run: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
    say "installing system packages: ${missing[*]}"
    log="$(mktemp)"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
        >"$log" 2>&1 || { tail -n 5 "$log" >&2; fail "apt-get install -y ${missing[*]} failed (whole log: $log)"; }
    rm -f "$log"
fi

say "installing Python packages into $venv (minutes the first time)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
log="$venv/setup.log"
: >"$log"
install() {
    pip install --quiet --constraint constraints.txt "$@" >>"$log" 2>&1 ||
        { { grep -iE 'error' "$log" || cat "$log"; } | tail -n 5 >&2; fail "pip install $* failed (whole log: $log)"; }
}
# torch goes first and alone, at the pinned version: whether that is a CPU or a CUDA build is up to what pip finds.
install torch wheel setuptools
install --editable '.[dedup,demo,dev,fp8,plot,ray,s3]'
# timm is a peer in tests only. Without dependencies: torchvision would insist on a torch of its own choice.
install --no-deps timm torchvision
say "ready: $venv"
