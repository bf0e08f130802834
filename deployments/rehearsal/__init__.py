"""`headway rehearse`: what goes wrong in production, on purpose, in a home of its own, and whether what is promised holds.

`faults.py` has a class for each fault, `scene.py` the home in which they happen, `run.py` the order of a rehearsal and its
verdicts. See docs/rehearsal.md.
"""
