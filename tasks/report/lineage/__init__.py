"""The page of a lineage."""
