#!/usr/bin/env bash
# As slurm.command: the program, with the fault $FAULT on the nodes $FAULT_NODES. Needs root, as the lab does.
set -u
export FAULT PATH="$GPUS:$PATH"
run=("$PYTHON" -m dppo_megatron "$@")
[[ " $FAULT_NODES " == *" $SLURMD_NODENAME "* ]] || FAULT=none
with_mount() { exec unshare --mount bash -c 'eval "$0" && exec "$@"' "$1" "${run[@]}"; }
case "$FAULT" in
  none) exec "${run[@]}" ;;
  hidden_run) with_mount "mount -t tmpfs none '$RUN'" ;;
  other_model) with_mount "mount -t tmpfs none '$MODEL'" ;;
  read_only) with_mount "mount --bind '$RUN' '$RUN' && mount -o remount,ro,bind '$RUN'" ;;
  no_network) exec unshare --net bash -c 'ip link set lo up && exec "$@"' _ "${run[@]}" ;;
  killed) exec "$PYTHON" -c 'import os; os.kill(os.getpid(), 9)' ;;
  frozen) "${run[@]}" & program=$!; kill -STOP $program; wait $program ;;
  frozen_in_the_groups) exec "$PYTHON" "$(dirname "$0")/frozen_in_the_groups.py" "$@" ;;
  *) FAULT=$FAULT exec "${run[@]}" ;;  # of nvidia-smi
esac
