"""Keys, secrets and certificates, and how they are read and checked."""
