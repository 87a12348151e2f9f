"""How much work and memory a grammar may take. The kernel sets the limits of its process."""

from __future__ import annotations

# Of a processor, to compile a grammar and take its first steps.
COMPILE_CPU_S = 2.0
CHARACTERS_PER_CPU_S = 32 << 10  # a schema of 110 KB takes one second
# Of a processor, for a later step. Its answer waits for it alone. An ordinary one takes 0.1 ms.
STEP_CPU_S = 0.25
# All steps together may take this much more than so much for each.
SPARE_CPU_S = 0.5
MEAN_STEP_CPU_S = 0.005
# An expensive grammar takes more than this to compile, or more than this and so much for each later
# step; an ordinary one needs 0.02 s, and 0.1 ms. From then on it takes what others leave.
EXPENSIVE_CPU_S = 0.1
CHEAP_STEP_CPU_S = 0.001
NICENESS = 10  # more than before: it weighs a tenth
# More than the process had before. A schema of 110 KB takes 20 MB.
MEMORY_BYTES = 512 << 20


def compile_cpu_s(characters: int) -> float:
    """For a description of this length."""
    return COMPILE_CPU_S + characters / CHARACTERS_PER_CPU_S


def is_expensive(cpu_s: float, steps: int = 0) -> bool:
    """A grammar that has taken so much of a processor to compile, or for its later steps."""
    return cpu_s > EXPENSIVE_CPU_S + CHEAP_STEP_CPU_S * steps
