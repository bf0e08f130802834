"""Jobs on Slurm: backend.py is the backend, render.py the batch script as a value, states.py what Slurm says of jobs."""
