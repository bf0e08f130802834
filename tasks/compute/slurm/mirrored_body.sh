say() { echo "headway: $*" >&2; }

test -n "${HEADWAY_FOLDER_KEY:-}" || { say "sbatch did not hand on HEADWAY_FOLDER_KEY: leave --export out of slurm.options"; exit "$NO_STORE"; }
test "${SLURM_RESTART_COUNT:-0}" -gt 0 && say "started again by Slurm, $SLURM_RESTART_COUNT time(s)"

# A submission whose answer was lost may have been sent again: the first job whose mirror writes this into the store has it.
export claim="{\"job\": \"$SLURM_JOB_ID\", \"name\": \"$SLURM_JOB_NAME\"}"

@LEADER@
@SRUN@
step=$!

# Slurm warns this shell before the time limit: the ranks are told to save and end.
warned=
trap 'warned=yes; say "the time limit comes: the job is told to save and end"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
done
wait "$step"
code=$?

# Told to end, but not by the warning: Slurm takes the machines away, and says itself why.
if [ -z "$warned" ] && [ "$code" -eq 143 ]; then
    sleep "$SETTLE" &
    wait "$!"
    code=$STOPPED
fi
test -n "$warned" && [ "$code" -ne 0 ] && code=$WARNED
test "$code" -eq 0 && rm -f "$log"
exit "$code"
