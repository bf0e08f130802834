"""The page of a qualification; report.py writes it, page.py puts it together, data.py reads `qualification.json`."""
