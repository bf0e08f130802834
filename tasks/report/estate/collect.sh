# Read-only: asks Azure by `az`, as Reader of the subscription, and writes JSON files into the folder estate-export.
set -u
[ ! -e estate-export ] || { echo "estate-export exists: move it away, its files may be of another day" >&2; exit 2; }
subscription=$(az account show --query id --output tsv) || exit
mkdir estate-export && cd estate-export || exit

next_page() {
  python3 -c 'import json, sys; print((json.load(sys.stdin) or {}).get("skip_token") or "")'
}

graph() { # NAME KQL: all pages
  token=; page=0
  while :; do
    page=$((page + 1))
    answer=$(az graph query -q "$2" --subscriptions "$subscription" --first 1000 ${token:+--skip-token "$token"} -o json) \
      || answer=null
    printf '{"query": "%s", "answer": %s}' "$1" "$answer" > "$1-$page.json"
    token=$(printf %s "$answer" | next_page)
    [ -n "$token" ] || break
  done
}

rest() { # NAME PATH: of each id on stdin
  while IFS= read -r id; do
    count=$((${count:-0} + 1))
    answer=$(az rest --method get --url "https://management.azure.com$id$2" -o json < /dev/null) || answer=null
    printf '{"query": "%s", "of": "%s", "answer": %s}' "$1" "$id" "$answer" > "$1-$count.json"
  done
}

of() { # TYPE: ids of the resources of a type
  az resource list --subscription "$subscription" --resource-type "$1" --query '[].id' -o tsv
}

