"""A cluster's verdict: what was measured (measured.py) against what its hardware must show (tasks/hardware).

Pure; see docs/qualification.md.
"""
