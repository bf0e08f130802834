#!/bin/sh
# Says in serve.json which model to serve, as tasks/jobs/serve.py reads it, and becomes the server that is named behind it.
set -eu

refuse() {
    echo "headway endpoint: $1" >&2
    exit 2
}

case "$MODEL_REF" in '' | *[!A-Za-z0-9._/@-]*) refuse "MODEL_REF is '$MODEL_REF'; give KIND/NAME or KIND/NAME@VERSION" ;; esac
for number in "$PORT" "$THREADS"; do
    case "$number" in '' | *[!0-9]*) refuse "PORT is '$PORT' and THREADS is '$THREADS'; both are whole numbers" ;; esac
done
[ -f "$MODEL_FOLDER/golden.json" ] || refuse "$MODEL_FOLDER holds no exported model (no golden.json): mount its files there"

umask 077
# Nobody hands the image digests of the mounted files: whoever mounts them verifies them before (headway verify).
printf '{"model_folder": "%s", "model_ref": "%s", "files": null, "port": %s, "threads": %s, "outputs": "%s"}\n' \
    "$MODEL_FOLDER" "$MODEL_REF" "$PORT" "$THREADS" "$HEADWAY_SERVE/outputs" >"$HEADWAY_SERVE/serve.json"
exec "$@"
