"""`python -m prfaas_lab`: the laboratory's commands."""

from prfaas.cli.main import main
from prfaas_lab.cli.main import lab

if __name__ == "__main__":
    main(lab)
