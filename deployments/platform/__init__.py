"""The platform on this machine: Prefect server, MLflow server, worker and watch, each a supervised process on loopback."""
