"""The audit of an Azure estate: exports of Azure and a home's records against Microsoft's recommendations. Asks Azure nothing.

exports.py reads what the queries of queries.yaml answered, records.py what a home shows.
recommendations.yaml has the rows, audit.py judges them, and what_if.py reads what left the templates. The templates
themselves are deployments/azure. See docs/estate.md.
"""
