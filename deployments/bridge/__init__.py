"""The bridge: events come in here and start flows. Each source is a file; dispatch.py turns what came into batches and flow runs.

One process of the platform, `python -m deployments.bridge HOME`. What an event is, and how it is kept, is tasks/events. See
docs/events.md.
"""
