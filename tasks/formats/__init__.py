"""File formats: read, write, check; pure."""
