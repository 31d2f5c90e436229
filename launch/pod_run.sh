#!/usr/bin/env bash
# Runs one command on every worker of a TPU VM, with a log per worker; exits with the first failure.
#
#   PROJECT=my-project ZONE=us-west4-a NAME=ao launch/pod_run.sh [--dry_run] -- \
#     python -m aodiff.main --config=configs/aogpt.py:owt_small --workdir=/mnt/bucket/owt_small
#
# TYPE is accepted and ignored. The workdir of a run on more than one host must be shared storage: a
# path at which every worker has mounted the same disk or bucket (gcsfuse).
# Optional: LOGS (--logs), the folder of the logs; default runs/pod-NAME.
set -euo pipefail

PROJECT="${PROJECT:-}" ZONE="${ZONE:-}" NAME="${NAME:-}" LOGS="${LOGS:-}"
DRY_RUN=0

fail() { echo "pod_run.sh: $*" >&2; exit 1; }

while (($#)); do
  case "$1" in
    --dry_run) DRY_RUN=1; shift ;;
    --project | --zone | --name | --type | --logs)
      (($# >= 2)) || fail "$1 needs a value."
      key="${1#--}"; printf -v "${key^^}" '%s' "$2"; shift 2 ;;
    --) shift; break ;;
    *) fail "unknown argument '$1'; allowed: --project --zone --name --type --logs --dry_run, then -- command." ;;
  esac
done
for key in PROJECT ZONE NAME; do
  [[ -n "${!key}" ]] || fail "$key is not set; export it or pass --${key,,}."
done
(($#)) || fail "no command; put it after --, e.g. -- python -m aodiff.main --config=configs/ordergpt.py."

LOGS="${LOGS:-runs/pod-$NAME}"
where=(--project "$PROJECT" --zone "$ZONE")
tpu=(gcloud compute tpus tpu-vm)
printf -v quoted ' %q' "$@"
# The marker lets stragglers of this launch, and only those, be found when a worker fails.
marker="aodiff-$NAME-$$"
remote="cd aodiff && . .venv/bin/activate && exec env AODIFF_LAUNCH=$marker$quoted"
stop="for p in /proc/[0-9]*; do if tr '\\0' '\\n' < \$p/environ 2>/dev/null | grep -qx AODIFF_LAUNCH=$marker; then kill \${p#/proc/} || true; fi; done"

show() { printf '+'; printf ' %q' "$@"; echo; }
describe=("${tpu[@]}" describe "$NAME" "${where[@]}" --format "value(networkEndpoints.len())")

show "${describe[@]}"
show "${tpu[@]}" ssh "$NAME" "${where[@]}" --worker=all --command "$remote"
if ((DRY_RUN)); then
  echo "on failure of a worker:"
  show "${tpu[@]}" ssh "$NAME" "${where[@]}" --worker=all --command "$stop"
  code=0
else
  workers="$("${describe[@]}")"
  mkdir -p "$LOGS"
  for ((w = 0; w < workers; w++)); do
    "${tpu[@]}" ssh "$NAME" "${where[@]}" "--worker=$w" --command "$remote" \
      >"$LOGS/worker-$w.log" 2>&1 &
  done
  echo "$workers workers; logs in $LOGS/worker-*.log"
  code=0
  for ((left = workers; left > 0; left--)); do
    status=0
    wait -n || status=$?
    if ((status && !code)); then
      code=$status
      echo "a worker ended with code $status; stopping the others" >&2
      "${tpu[@]}" ssh "$NAME" "${where[@]}" --worker=all --command "$stop" || true
    fi
  done
  tail -n 3 "$LOGS"/worker-*.log
fi

echo
echo "Delete the TPU VM:  gcloud compute tpus tpu-vm delete $NAME --project $PROJECT --zone $ZONE --quiet"
exit "$code"
