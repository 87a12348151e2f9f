"""How much work and memory a grammar may take. The kernel sets the limits of its process."""

from __future__ import annotations

# Of a processor, to compile a grammar and take its first steps, and to take a later step. The
# kernel counts whole seconds: a step may take one second more.
COMPILE_CPU_S = 2
CHARACTERS_PER_CPU_S = 32 << 10  # a schema of 110 KB takes one second
STEP_CPU_S = 1
# All steps together may take this much more than so much for each: an ordinary one takes 0.1 ms.
SPARE_CPU_S = 2.0
MEAN_STEP_CPU_S = 0.02
# More than the process had before. A schema of 110 KB takes 20 MB.
MEMORY_BYTES = 512 << 20


def compile_cpu_s(characters: int) -> int:
    """For a description of this length."""
    return COMPILE_CPU_S + characters // CHARACTERS_PER_CPU_S
