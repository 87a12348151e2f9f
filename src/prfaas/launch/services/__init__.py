"""What runs where: the services of a deployment, for every way to start them."""
