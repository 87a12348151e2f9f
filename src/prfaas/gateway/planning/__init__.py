"""The gateway's slow decisions: new plans, role changes, prefix copies between nodes."""
