#!/bin/bash
# Runs once, when PostgreSQL makes its data folder: a database and a user each for Prefect and for MLflow.
# Neither user can see the other's database. Passwords are read from the environment, so they are in no list of processes.
set -euo pipefail

psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\getenv prefect PREFECT_DATABASE_PASSWORD
\getenv mlflow MLFLOW_DATABASE_PASSWORD
CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
REVOKE ALL ON DATABASE prefect, mlflow, postgres FROM PUBLIC;
SQL
