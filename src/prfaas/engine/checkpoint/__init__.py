"""Small checkpoints of the architectures the paper is about, made on the spot for tests, benchmarks
and the demo. `architectures` is data, `make` needs torch."""
