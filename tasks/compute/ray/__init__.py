"""Jobs on Ray: backend.py is the backend, spec.py what its driver is given. The programs are tasks/jobs/ray."""
