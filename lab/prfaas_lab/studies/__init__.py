"""Studies, and runs of deployments, that only benchmarks make.

The machines of a cluster (`--cluster`) have the product alone. What a study refers to in here
travels to them by value, like the benchmark's script itself.
"""

import sys

import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])
