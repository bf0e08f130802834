"""`headway rehearse`: what goes wrong in production, on purpose, in a home of its own, and whether what is promised holds.

`data.py`, `network.py`, `runs.py`, `serving.py` and `training.py` have a class for each fault, `scene.py` the home in which they
happen, `run.py` the order of the faults, of a rehearsal, and its verdicts. See docs/rehearsal.md.
"""
