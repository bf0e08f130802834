"""The platform's processes, each started, found and stopped by itself: Prefect's server, MLflow's, worker, watch, bridge."""
