"""What happened, and what came of it: event.py is the value, ledger.py keeps them, batches.py says what waits and what covers it,
batches.py tells it all, and the tables are ledger.py. Who takes events in is deployments/bridge."""
