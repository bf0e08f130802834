"""A champion on updated data against itself at promotion: the loss and how sure we may be of it, slices, checks. Pure.

Which documents were measured, and how, is tasks/jobs/evaluate.py; what the verdict makes of it is tasks/revalidation.py.
See docs/revalidation.md.
"""
