"""Samples of the suites that are shipped. Files only."""
