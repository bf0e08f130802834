#!/bin/sh
# Says in serve.json which model to serve, as tasks/jobs/serve.py reads it, and becomes the server that is named behind it.
set -eu

refuse() {
    echo "headway endpoint: $1" >&2
    exit 2
}

# Azure Machine Learning says itself where it has put a model.
mounted=${MODEL_FOLDER:-${AZUREML_MODEL_DIR:-/model}}
case "$MODEL_REF" in '' | *[!A-Za-z0-9._/@-]*) refuse "MODEL_REF is '$MODEL_REF'; give KIND/NAME or KIND/NAME@VERSION" ;; esac
case "$HOST" in '' | *[!A-Za-z0-9.:]*) refuse "HOST is '$HOST'; give an address to listen on" ;; esac
for said in "$OPEN" "$DEGRADE"; do
    case "$said" in true | false) ;; *) refuse "OPEN is '$OPEN' and DEGRADE is '$DEGRADE'; both are true or false" ;; esac
done
for number in "$PORT" "$THREADS"; do
    case "$number" in '' | *[!0-9]*) refuse "PORT is '$PORT' and THREADS is '$THREADS'; both are whole numbers" ;; esac
done
case "$mounted$KEYS" in *[\"\\]*) refuse "a path has a quote or a backslash in it: $mounted $KEYS" ;; esac

# A whole version has its files in files/; Azure Machine Learning mounts a folder with the registered one in it.
folder=
for place in "$mounted" "$mounted/files" "$mounted"/*/files "$mounted"/*; do
    if [ -f "$place/golden.json" ]; then
        folder=$place
        break
    fi
done
[ -n "$folder" ] || refuse "$mounted holds no exported model (no golden.json): mount its files there"
unreadable=$(find "$folder" -type f ! -readable 2>/dev/null | head -n 1)
[ -z "$unreadable" ] || refuse "$unreadable cannot be read by user $(id -u): let everybody read the files (chmod -R a+rX), \
or start the container as their owner (docker run --user UID:GID)"
limits=${LIMITS:-}
[ -n "$limits" ] || limits='{}'

umask 077
# A version that is named must be the one that is mounted: by the manifest beside its files, or by CONTENT, what a manifest holds.
cat >"$HEADWAY_SERVE/serve.json" <<END
{"alone": true, "model_folder": "$folder", "model_ref": "$MODEL_REF", "files": null,
 "manifest": "$folder/../manifest.json", "content": ${CONTENT:-null},
 "variants": $DEGRADE, "port": $PORT, "threads": $THREADS, "outputs": "$HEADWAY_SERVE/outputs/model", "keys": "$KEYS",
 "access": {"host": "$HOST", "open": $OPEN, "entra": ${ENTRA:-null}}, "limits": $limits, "vllm": ${VLLM:-null}}
END
exec "$@"
