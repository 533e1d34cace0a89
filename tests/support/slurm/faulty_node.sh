#!/usr/bin/env bash
# As slurm.command: the program, with the fault $FAULT on the nodes $FAULT_NODES. Needs root, as the lab does.
set -u
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
  frozen) "${run[@]}" & program=$!; sleep 1; kill -STOP $program; wait $program ;;
  frozen_in_a_group)  # from when it arrives on; the log has its lines
    "${run[@]}" & program=$!
    until grep -q "\"node\": \"$SLURMD_NODENAME\", \"stage\": \"ready\"" "$RUN/logs/preflight.log"; do sleep 0.01; done
    kill -STOP $program; wait $program ;;
  skewed) exec faketime -f -1h "${run[@]}" ;;
  old_driver | shared_gpu | used_memory | no_answer | lost_gpu) PATH="$GPUS/$FAULT:$PATH" exec "${run[@]}" ;;
esac
