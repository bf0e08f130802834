"""A model against its champion on the same documents: slices, intervals, and the checks of the gate. Pure.

What was measured is tasks/jobs/evaluate.py; who asks is tasks/evaluate.py; how it looks is tasks/report/evaluation.py. A champion
against itself on later data is tasks/performance. See docs/evaluation.md.
"""
