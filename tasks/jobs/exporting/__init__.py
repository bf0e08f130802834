"""The parts of the export: what is built (graph.py, encoder.py, variants.py), and what is proven
(comparison.py). The program, with the card of the model, is tasks/jobs/export.py. See docs/export.md.
"""
