"""What machines, storage and leaving data cost: a list as data, a home's own prices, and Azure's, fetched.

`list.yaml` is shipped, book.py reads and finds, update.py asks Azure, makes prices of its meters and writes them. What a
training costs by them is tasks/planning/money.py. See docs/money.md.
"""
