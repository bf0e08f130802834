"""The only door to MLflow: spool.py writes events down, publish.py tells them to MLflow, server.py shows what was told.

A stage never waits for MLflow: what happened is appended to a file first, and a process of its own (which alone imports
mlflow) applies it in order. So a tracking server that is away loses nothing, and an orchestrator that is killed leaves no run
that says Running for ever. What is true is in the store; MLflow is its published view.
"""
