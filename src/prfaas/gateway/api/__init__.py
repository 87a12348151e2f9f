"""The gateway's API: OpenAI over HTTP. It reads, checks and tokenises requests, hands them to a
`Backend`, and streams the decode engine's response. It does not know clusters or routes."""
