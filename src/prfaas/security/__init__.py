"""Keys, secrets and certificates: how they are made, read and checked."""
