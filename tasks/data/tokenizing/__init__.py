"""Text to token ids: opening a tokenizer, encoding at full speed, Megatron files out. Pure: files in, files out.

It knows nothing of stages, stores or clusters. Who calls it: `headway preprocess` and tasks/jobs/preprocess.py.
See docs/preprocessing.md.
"""
