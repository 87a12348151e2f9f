"""Which hardware to buy for a model and its traffic, and whether PrfaaS is worth it. Pure."""
