#!/usr/bin/env bash
# Creates a TPU VM, copies this checkout to every worker and installs it.
#
#   PROJECT=my-project ZONE=us-west4-a NAME=ao TYPE=v5litepod-16 launch/tpu_vm.sh [--dry_run]
#   launch/tpu_vm.sh --project my-project --zone us-west4-a --name ao --type v5litepod-16 [--dry_run]
#
# Optional: VERSION (--version), the software image; default tpu-ubuntu2204-base.
set -euo pipefail

PROJECT="${PROJECT:-}" ZONE="${ZONE:-}" NAME="${NAME:-}" TYPE="${TYPE:-}"
VERSION="${VERSION:-tpu-ubuntu2204-base}"
DRY_RUN=0

fail() { echo "tpu_vm.sh: $*" >&2; exit 1; }

while (($#)); do
  case "$1" in
    --dry_run) DRY_RUN=1; shift ;;
    --project | --zone | --name | --type | --version)
      (($# >= 2)) || fail "$1 needs a value."
      key="${1#--}"; printf -v "${key^^}" '%s' "$2"; shift 2 ;;
    *) fail "unknown argument '$1'; allowed: --project --zone --name --type --version --dry_run." ;;
  esac
done
for key in PROJECT ZONE NAME TYPE; do
  [[ -n "${!key}" ]] || fail "$key is not set; export it or pass --${key,,}."
done

run() {
  printf '+'; printf ' %q' "$@"; echo
  ((DRY_RUN)) || "$@"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
archive="$(mktemp -d)/aodiff.tar.gz"
trap 'rm -rf "$(dirname "$archive")"' EXIT
where=(--project "$PROJECT" --zone "$ZONE")
tpu=(gcloud compute tpus tpu-vm)

run "${tpu[@]}" create "$NAME" "${where[@]}" --accelerator-type "$TYPE" --version "$VERSION"
run git -C "$root" archive --format=tar.gz --output "$archive" HEAD
run "${tpu[@]}" scp "$archive" "$NAME:aodiff.tar.gz" "${where[@]}" --worker=all
# The images of Ubuntu 22.04 come with Python 3.10; aodiff needs 3.11.
install='set -e; python="$(command -v python3.12 || command -v python3.11 || true)"
if [ -z "$python" ]; then sudo apt-get update -q && sudo apt-get install -qy python3.11-venv; python=python3.11; fi
mkdir -p aodiff && tar xzf aodiff.tar.gz -C aodiff && cd aodiff && "$python" -m venv .venv
.venv/bin/pip install -q -e ".[tpu]" && .venv/bin/python -m aodiff.tools.doctor'
run "${tpu[@]}" ssh "$NAME" "${where[@]}" --worker=all --command "$install"

echo
echo "Train on all workers:  PROJECT=$PROJECT ZONE=$ZONE NAME=$NAME launch/pod_run.sh -- python -m aodiff.main --config=configs/ordergpt.py"
echo "Delete it afterwards:  gcloud compute tpus tpu-vm delete $NAME --project $PROJECT --zone $ZONE --quiet"
