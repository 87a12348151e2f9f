"""What the gateway, the node and the kvd have in common as services: probes for orchestrators, the
order in which they stop, descriptor limits, bounded request bodies, and their OpenAPI documents."""
