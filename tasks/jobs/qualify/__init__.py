"""What is measured on the machines of a cluster: one room a group of checks, each with `measure(bench)`.

Who calls them is tasks/jobs/benchmark.py.
"""
