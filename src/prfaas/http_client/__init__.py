"""The HTTP client for requests between the processes of a deployment: long-lived connections, and
a timeout for every request."""
