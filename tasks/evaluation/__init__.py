"""Judging what was measured of models: scores with their intervals, comparisons with a champion, and rules of gates. Pure.

comparison_*.py hold a candidate against its champion on the same documents; performance_*.py hold a champion on later data
against itself at promotion. What was measured is tasks/jobs/evaluate.py. See docs/evaluation.md and docs/revalidation.md.
"""
