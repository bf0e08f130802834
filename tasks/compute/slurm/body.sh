say() { echo "headway: $*" >&2; }

export lost="headway: node ${SLURMD_NODENAME:-} does not see the job folder $folder: it must lie on a file system that all nodes share"
test -f "$folder/job.json" || { echo "$lost" >&2; exit "$NO_FOLDER"; }
grep -Eq "\"submission\": $submission([^0-9]|\$)" "$folder/job.json" || { say "another submission has the job folder"; exit "$SECOND"; }

# A submission whose answer was lost may have been sent again: the first job that starts has it.
mine="{\"job\": \"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}\", \"name\": \"$SLURM_JOB_NAME\"}"
draft=$(mktemp "$folder/.slurm.XXXXXX")
echo "$mine" >"$draft"
ln "$draft" "$folder/slurm-$submission.json" 2>/dev/null
rm -f "$draft"
test "$(cat "$folder/slurm-$submission.json")" = "$mine" || { say "another job runs this submission; this one ends"; exit "$SECOND"; }

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    export HEADWAY_ARRAY_INDEX=$SLURM_ARRAY_TASK_ID
    folder=$folder/elements/$SLURM_ARRAY_TASK_ID
fi
export folder
cd "$folder" || exit "$NO_FOLDER"

# Slurm started this job again: how it ended the last time is not how it ends now.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    say "started again by Slurm, $SLURM_RESTART_COUNT time(s)"
    rm -rf attempt.json errors nodes/*/{.lock,beat,exit.json,handle.json,node.json}
fi

@LEADER@
@BEEOND@
@SRUN@
step=$!

# Slurm warns this shell before the time limit: the ranks are told to save and end.
warned=
trap 'warned=yes; say "the time limit comes: the job is told to save and end"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

settled=0
while kill -0 "$step" 2>/dev/null; do
    sleep 2 &
    wait "$!"
    test -e nodes/0/exit.json && settled=$((settled + 2))
    if [ "$settled" -ge "$SETTLE" ]; then
        say "the first machine has ended, others have not: they are ended"
        kill -KILL "$step"
    fi
done
wait "$step"
code=$?
ended=$(sed -n 's/^ *"code": *\(-\{0,1\}[0-9]*\).*/\1/p' nodes/0/exit.json 2>/dev/null)
code=${ended:-$code}

# Told to end, but not by the warning: Slurm takes the machines away, and says itself why.
if [ -z "$warned" ] && [ "$code" -ne 0 ] && grep -q '"reason": "cancelled"' nodes/0/exit.json 2>/dev/null; then
    sleep "$SETTLE" &
    wait "$!"
    code=$STOPPED
fi
test -n "$warned" && [ "$code" -ne 0 ] && code=$WARNED
exit "$((code < 0 ? 128 - code : code))"
