"""One request in the gateway: its attempts, the hand-off between two nodes, the answer."""
