"""Jobs on Azure ML: backend.py is the backend, render.py the command job as a value, client.py the SDK's own operations."""
