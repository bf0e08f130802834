"""What happened, and what came of it: event.py is the value, ledger.py keeps them. Who takes them in is deployments/bridge."""
