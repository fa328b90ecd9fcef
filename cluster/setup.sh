#!/usr/bin/env bash
# Sets vitscale up on one machine: system libraries (where it may install them), a virtual environment, packages.
#   bash cluster/setup.sh [VENV]           what `vitscale demo` and the README's commands need; VENV is .venv
#   bash cluster/setup.sh VENV --peers     timm and transformers besides, without another torch
#   bash cluster/setup.sh VENV --tests     what the tests need besides, which includes them
# PYTHON=... chooses the interpreter.
set -euo pipefail
venv="${1:-.venv}"
python="${PYTHON:-python3}"
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
case "${2:-}" in "" | --peers | --tests) ;; *) fail "knows no $2; usage: bash cluster/setup.sh [VENV [--peers | --tests]]" ;; esac

"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 or newer; $python is $("$python" --version 2>/dev/null || echo not there). Choose one: make setup PYTHON=python3.11"

# Asked for here, so that their absence is one line and no compiler trace. Our own C needs gcc and libjpeg-dev; once built,
# vitscale needs libjpeg62-turbo alone.
missing=()
command -v gcc >/dev/null || missing+=(gcc)
pkg-config --exists libjpeg 2>/dev/null || [ -e /usr/include/jpeglib.h ] || missing+=(libjpeg-dev)
version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
"$python" -c 'import ensurepip' 2>/dev/null || missing+=("$version-venv")
# FFCV, which is compiled here as well, is an extra: where its libraries cannot be had, all but it is set up. The tests need it.
for_ffcv=()
command -v g++ >/dev/null || for_ffcv+=(g++)
command -v pkg-config >/dev/null || for_ffcv+=(pkg-config)
pkg-config --exists opencv4 2>/dev/null || for_ffcv+=(libopencv-dev)
pkg-config --exists libturbojpeg 2>/dev/null || [ -e /usr/include/turbojpeg.h ] || for_ffcv+=(libturbojpeg0-dev)
"$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    for_ffcv+=("$version-dev")
no_ffcv=""
if [ "${2:-}" = --tests ] || { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }; then
    missing+=("${for_ffcv[@]}")
elif [ ${#for_ffcv[@]} -gt 0 ]; then
    no_ffcv="it needs ${for_ffcv[*]}"
fi
if [ "${2:-}" = --tests ]; then  # pages are opened in it
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
        missing+=(chromium)
fi
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

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log="$venv/setup.log"
: >"$log"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
run() {
    "$@" >>"$log" 2>&1 ||
        { { grep -iE 'error' "$log" || cat "$log"; } | tail -n 5 >&2; fail "$* failed (whole log: $log)"; }
}
# Bytecode of what is never imported would take half a minute and 300 MB: the first import compiles. It is to be kept, also
# where the environment says otherwise, as images for containers often do: without it each `import torch` takes twice as long.
unset PYTHONDONTWRITEBYTECODE
install() { run pip install --quiet --no-compile --constraint constraints.txt "$@"; }

# PyPI's torch brings gigabytes of CUDA: not where there is no NVIDIA driver, unless pip was told where to find packages.
builds=()
if ! [ -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null &&
    ! pip config list | grep -E 'index|find-links' >/dev/null; then
    builds=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
if [ -z "${2:-}" ]; then
    say "1/4 torch, the largest download${builds[*]:+ (no NVIDIA driver here: its CPU build)}"
    install "${builds[@]}" torch setuptools
    say "2/4 FFCV, compiled here, and what it needs"
    [ -n "$no_ffcv" ] ||
        pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation ffcv >>"$log" 2>&1 ||
        no_ffcv="it could not be compiled (whole log: $log)"
    [ -z "$no_ffcv" ] ||
        say "FFCV is left out: $no_ffcv. All but \`vitscale shards verify --stock\` works; later: pip install -e '.[ffcv]'"
    say "3/4 vitscale and the other packages"
    install --no-build-isolation --editable '.[demo,plot]'
    say "4/4 a first import of everything"
    run "$venv/bin/python" -c 'import vitscale.cli.convert, vitscale.cli.demo, vitscale.training.loop.trainer, sklearn.datasets, torch.utils.tensorboard, accelerate.tracking'
else
    packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    last=3
    [ "$2" = --tests ] || last=2
    say "1/$last timm's torchvision"
    install "${builds[@]}" torchvision
    # PyPI's is compiled for CUDA, and beside a CPU build of torch not even imports. timm needs its Python part alone,
    # which asks for two operators to be declared.
    if ! "$venv/bin/python" -c 'import torchvision' 2>>"$log"; then
        cat >>"$packages/torchvision/extension.py" <<'DECLARED'

# Added by vitscale's cluster/setup.sh.
_declared = torch.library.Library("torchvision", "DEF")
_declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
DECLARED
    fi
    if [ "$2" = --peers ]; then
        say "2/2 timm and transformers"
        install timm transformers
    else
        say "2/3 the tests' other packages"
        install --editable '.[demo,dev,docs,ffcv,fp8,plot,s3]'
        say "3/3 a first import of the peers, and bytecode for all: the tests start many processes"
        "$venv/bin/python" -m compileall -q -j 0 "$packages" >>"$log" 2>&1 || true  # some hold files of other Pythons
    fi
    run "$venv/bin/python" -c 'import timm; from transformers import ViTForImageClassification, ViTImageProcessor'
fi
run pip check
say "ready: $venv"
