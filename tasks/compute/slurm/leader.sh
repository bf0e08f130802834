first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" --oneliner | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
# Debian gives a machine its own name as 127.0.1.1, which leads nobody to it.
case $(getent ahostsv4 "${address:-$first}" | awk '{ print $1; exit }') in
    127.0.1.*) address=$(hostname -I | awk '{ print $1 }') ;;
esac
export HEADWAY_LEADER=${address:-$first}
