"""Jobs on plain machines reached through SSH: backend.py is the backend, connection.py runs commands there."""
