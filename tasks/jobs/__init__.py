"""Programs that run on the cluster. They import no Prefect and no MLflow, and nobody imports them by name."""
