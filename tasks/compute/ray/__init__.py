"""Jobs on Ray: backend.py is the backend, ../ray_driver.py what its driver is given. The programs are tasks/jobs/ray."""
