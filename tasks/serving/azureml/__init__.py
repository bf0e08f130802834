"""Endpoints on Azure ML: managed online endpoints and their deployments."""
