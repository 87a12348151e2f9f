"""A separate process: loads a checkpoint, imports states that came as bytes, decodes.

python -m tests.engine.hf.decode_elsewhere CHECKPOINT CASES ANSWERS
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from prfaas.engine.api import EngineJob, Resume, Sampling
from prfaas.engine.hf import HFEngine, load_model
from prfaas.engine.memory import MemorySegments
from prfaas_lab.testing.engine_runs import run


def main(directory: str, cases: str, answers: str) -> None:
    engine = HFEngine(load_model(directory))
    tokens = []
    for prompt, length, dumped in pickle.loads(Path(cases).read_bytes()):
        state = MemorySegments.load(engine.spec, dumped)
        sampling = Sampling(max_tokens=64, ignore_eos=True)
        job = EngineJob("decode", prompt, sampling, resume=Resume(length, state))
        tokens.append(run(engine, job).tokens)
    engine.close()
    Path(answers).write_bytes(pickle.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
