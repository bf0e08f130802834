"""Measurements that anyone can run: `make bench`. Figures are medians of interleaved repeats in one process."""
