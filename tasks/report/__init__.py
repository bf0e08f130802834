"""The pages that people look at: one self-contained HTML file a run."""
