"""The other gateways of a deployment: what they report, and what this one tells them."""
