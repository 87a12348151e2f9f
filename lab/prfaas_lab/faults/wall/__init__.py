"""Never imported: `WallClock` copies `sitecustomize.py` to a folder on the path of processes."""
