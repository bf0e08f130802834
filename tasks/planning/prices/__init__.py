"""What machines, storage and leaving data cost: a list as data, a home's own prices, and Azure's, fetched.

`list.yaml` is shipped, book.py reads and finds, update.py makes prices of Azure's meters, update.py asks, update.py writes. What
a training costs by them is tasks/planning/money.py. See docs/planning.md, "Money".
"""
