say() { echo "headway: $*" >&2; }

export lost="headway: node ${SLURMD_NODENAME:-} does not see the job folder $folder: it must lie on a file system that all nodes share"
test -f "$folder/job.json" || { echo "$lost" >&2; exit "$NO_FOLDER"; }
export folder
cd "$folder" || exit "$NO_FOLDER"
test -e rendezvous/exit.json && { say "the job has ended without this machine"; exit 0; }

# A part whose answer was lost may have been sent again: the first job that starts has it.
draft=$(mktemp "$folder/.slurm.XXXXXX")
echo "$SLURM_JOB_ID" >"$draft"
ln "$draft" "rendezvous/parts/$part.job" 2>/dev/null
rm -f "$draft"
test "$(cat "rendezvous/parts/$part.job")" = "$SLURM_JOB_ID" || { say "another job is this machine; this one ends"; exit "$SECOND"; }

# How the machine before this one ended is not how this one does.
rm -rf nodes/"$part"/{.lock,beat,exit.json,handle.json,node.json}

@SRUN@
step=$!

# Slurm warns this shell before the time limit: the ranks are told to save and end.
warned=
trap 'warned=yes; say "the time limit comes: this machine leaves"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
done
wait "$step"
code=$?
code=$(sed -n 's/^ *"code": *\(-\{0,1\}[0-9]*\).*/\1/p' "nodes/$part/exit.json" 2>/dev/null | grep . || echo "$code")

# Told to end, but not by the warning: Slurm takes the machine away, and says itself why.
if [ -z "$warned" ] && [ "$code" -ne 0 ] && grep -q '"reason": "cancelled"' "nodes/$part/exit.json" 2>/dev/null; then
    sleep "$SETTLE" &
    wait "$!"
fi
test -n "$warned" && [ "$code" -ne 0 ] && code=$WARNED
exit "$((code < 0 ? 128 - code : code))"
