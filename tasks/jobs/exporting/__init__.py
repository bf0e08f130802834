"""The parts of the export: what is built (graph.py, encoder.py), what is proven (comparison.py, loss.py, variants.py), the
smaller
variants (variants.py, variants.py), and what goes with a model (reference.py, card.py). The program is tasks/jobs/export.py.
See docs/export.md.
"""
