#!/bin/sh
# Makes the credentials of compose.yaml, once: docker/.env, readable by its owner only, or the file that is named.
#   docker/make-env.sh [FILE]
set -eu
umask 077
file=${1:-$(dirname "$0")/.env}

hex() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

if [ -e "$file" ]; then
    echo "$file is there already, and stays as it is: databases that were made with its passwords need them." >&2
    exit 1
fi
cat >"$file" <<END
POSTGRES_PASSWORD=$(hex)
PREFECT_DATABASE_PASSWORD=$(hex)
MLFLOW_DATABASE_PASSWORD=$(hex)
PREFECT_LOGIN=headway:$(hex)
MLFLOW_PASSWORD=$(hex)
MLFLOW_SESSION_KEY=$(hex)
AZURITE_KEY=$(head -c 64 /dev/urandom | base64 | tr -d '\n')
END
echo "$file: sign in to Prefect with its PREFECT_LOGIN, to MLflow as headway with its MLFLOW_PASSWORD"
