"""New data against reference data: histograms.py for a dataset's suite, the rest for revalidation. See docs/drift.md."""
