"""Programs of a job on Ray: driver.py places an agent (agent.py) on each machine, cluster.py starts a cluster for one job."""
