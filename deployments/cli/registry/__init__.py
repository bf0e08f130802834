"""History, lineage and trust of what is stored: commands."""
