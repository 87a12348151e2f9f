"""What users see of the product, recorded: reports, files, messages, routes, documents and help.

`recorded/` has one file for each of them. `python -m tests.goldens --write` writes the files, and
`test_goldens.py` compares them with what the present code makes. A change of the code that moves
or merges parts must change none of them.
"""
