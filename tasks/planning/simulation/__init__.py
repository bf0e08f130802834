"""A training played through, failure by failure: what is left of its time, in bands. Pure, seeded.

settings.py: what is asked for; training.py: machines that fail and come back; training.py: one run; bands.py: many runs, and a
sweep of intervals. The formulas that it agrees with are in tasks/planning/checkpointing.py. See docs/planning.md, "Failures".
"""
