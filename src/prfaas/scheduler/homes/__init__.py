"""Several PD clusters: a home is the PD cluster at which a request arrives."""
