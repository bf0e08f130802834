"""The estate: what Headway needs of an Azure subscription, rendered as ARM templates from typed settings.

settings.py says what can be chosen, names.py what each resource is called and where it lies, roles.yaml who may do what,
templates/ what each resource is, render.py puts them together, connect.py turns a deployment's outputs into a home's settings.
Nothing here asks Azure. docs/estate.md says what is proven and what is not.
"""
