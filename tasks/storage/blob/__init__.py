"""Artifacts in Azure Blob storage: store.py keeps the promises of tasks/storage/store.py, `open_blob_store` below opens one.

client.py is the door to the SDK, with our timeouts, errors (faults.py) and identity; transfer.py
moves bytes; versions.py names old ones; lease.py keeps a deletion apart from a publication. See docs/storage.md.
"""
