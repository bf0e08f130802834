"""A corpus: finding its files, reading them in pieces, profiling what is read. Pure: files in, values out.

It knows nothing of stages, stores or tokens. Who judges a profile: tasks/data/judging.py. See docs/data.md.
"""
