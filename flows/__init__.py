"""The order of things: Prefect flows, one file each."""
