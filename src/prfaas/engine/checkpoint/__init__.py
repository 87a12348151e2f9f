"""Makes small checkpoints of the paper's architectures for tests, benchmarks and the demo.
`architectures` is data; `make` needs torch."""
