"""One request on its way through the gateway: attempts, the hand-off between nodes, retries."""
