"""The gateway's slow decisions: new plans, changes of roles, copies of prefixes between nodes."""
