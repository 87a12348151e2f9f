"""KV events of a node in the format of vLLM, over ZMQ."""
