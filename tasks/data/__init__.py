"""Data: reading corpora (corpus/), tokens (tokenizing/), drift between datasets (drift/), and what is expected of a corpus."""
