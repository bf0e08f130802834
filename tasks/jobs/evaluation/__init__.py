"""The parts of tasks/jobs/evaluate.py: held-out text, scores in one pass over it, and suites, the probes among them.

A suite is a file here with a function in SUITES of suites.py. See docs/evaluation-tasks.md.
"""
