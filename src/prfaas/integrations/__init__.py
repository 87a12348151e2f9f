"""prfaas inside other people's engines."""
