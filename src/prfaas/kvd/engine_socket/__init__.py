"""The kvd's Unix socket: its server and messages, the engine's client, the engines' leases."""
