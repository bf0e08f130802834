"""Judging what was measured of models: scores with their intervals, comparisons with a champion, and rules of gates. Pure.

comparison.py holds a candidate against its champion on the same documents; performance.py holds a champion on later data against
itself at promotion. What was measured is tasks/jobs/evaluate.py. See docs/evaluation.md and docs/revalidation.md.
"""
