"""The page of a revalidation; report.py writes it, page.py puts it together, data.py reads `revalidation.json`."""
