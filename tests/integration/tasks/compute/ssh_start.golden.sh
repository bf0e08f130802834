#!/usr/bin/env bash
# Headway, headway-try-ffffffffffff-1: node rank 0 of 2, on machine gpu-2.
# Run through SSH, by `bash /share/home/jobs/train-ffff/nodes/0/start.sh`.
# What it starts keeps running when the connection, or who opened it, is gone.
set -euo pipefail

# One job a machine: the lock is held for as long as the parent below lives.
mkdir -p -m 700 "/var/tmp/headway-$(id -u)"
if [ -L "/var/tmp/headway-$(id -u)" ] || [ ! -O "/var/tmp/headway-$(id -u)" ]; then
  echo "machine gpu-2: ""/var/tmp/headway-$(id -u)"" is somebody else's: delete it" >&2
  exit 77
fi
lease="/var/tmp/headway-$(id -u)"/gpu-2
exec 9>> "$lease"
if ! flock -w 2 9; then
  echo "machine gpu-2 runs $(cat "$lease")" >&2
  exit 75
fi
echo headway-try-ffffffffffff-1 > "$lease"

cd /share/home/jobs/train-ffff
export HEADWAY_NODE_NAME=gpu-2
export HEADWAY_TOKEN=headway-try-ffffffffffff-1
export HEADWAY_LIMITS=1
export PYTHONPATH=/opt/headway/code
export PYTHONSAFEPATH=1
# Where the others reach this machine: the address at which SSH reached it.
export HEADWAY_LEADER="$(cut -d" " -f3 <<< "$SSH_CONNECTION")"

nohup setsid /opt/headway/bin/python -m tasks.common.process /share/home/jobs/train-ffff/nodes/0 < /dev/null >> nodes/0/parent.log 2>&1 &

# The parent writes its pid, its start time and the machine's boot id into handle.json.
parent=$!
for _ in $(seq 150); do
  if grep -qs "\"pid\": $parent," nodes/0/handle.json; then exit 0; fi
  kill -0 "$parent" 2> /dev/null || break
  sleep 0.1
done
grep -qs "\"pid\": $parent," nodes/0/handle.json || { tail -n 5 nodes/0/parent.log >&2; exit 70; }
