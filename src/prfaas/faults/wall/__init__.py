"""Not imported: `sitecustomize.py` is copied from here to where processes find it."""
