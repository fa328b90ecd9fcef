#!/usr/bin/env bash
# What the tests of clusters need besides the project (Debian, Ubuntu; root): hosts in network namespaces, and a Slurm.
#   bash tests/cluster/setup.sh
set -euo pipefail
packages=(iproute2 munge openssh-server pdsh slurm-wlm)
[ "$(id -u)" = 0 ] || { echo "needs root: sudo bash tests/cluster/setup.sh" >&2; exit 1; }
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
