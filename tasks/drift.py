"""New data against reference data: how far two columns lie apart. Pure: histograms in, distances out.

The limits are the configuration's; who judges is tasks/validate.py. See docs/data.md.
"""
