"""The commands of `python -m prfaas_lab`."""
