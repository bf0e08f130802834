"""Measurements that anyone can run: `make bench` (`__main__.py`). Figures are medians of interleaved repeats in one process."""
