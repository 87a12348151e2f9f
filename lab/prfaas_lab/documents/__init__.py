"""Pages of docs/ that are made from the schema; `make docs` writes them."""
