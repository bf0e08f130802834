"""The node agent, `python -m tasks.jobs.node FOLDER`: it starts and watches one machine's ranks, whatever the backend."""
