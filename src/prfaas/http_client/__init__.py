"""The HTTP client for calls between the processes of a deployment: long-lived connections, and a
timeout for every call."""
