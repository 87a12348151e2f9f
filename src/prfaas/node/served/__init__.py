"""What a node serves, for gateways (`fields`) and for readers (`reference`)."""
