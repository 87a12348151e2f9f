"""`python -m prfaas` is the command line."""

from prfaas.cli.main import main

main()
