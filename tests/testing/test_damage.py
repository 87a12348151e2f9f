"""The gate that changes one head's state: exactly these numbers, and only when it should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from prfaas.engine.emulated.content import Content
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvspec import GQA, MLA, Geometry, Linear, Segment, WindowedGQA, build_spec
from prfaas.types import Compat
from prfaas_lab.testing.damage import EXPONENT_BIT, DamageGate, HeadOfLayer
from tests.cache.builders import BLOCK
from tests.kvd.hosts import begun, fill, kvd, names, prompt_of

TOKENS = 40
PROMPT = prompt_of(TOKENS)
LATENT = MLA((0,), 8, 4)
KEYS = GQA((1,), 2, 4, 4)
WINDOW = WindowedGQA((2,), 2, 4, 4, window=9)
STATE = Linear((3,), 2, 2, 4, 4, conv_kernel=4)
SPEC = build_spec([LATENT, KEYS, WINDOW, STATE], kv_dtype="bfloat16", state_dtype="float32")
FORMAT = Compat("tiny", "1", "bfloat16", "float32", BLOCK, "canonical")


SEGMENTS = (
    Segment("full0", 0, 0, TOKENS),
    Segment("full1", 1, 0, TOKENS),
    Segment("window0", 2, TOKENS - 8, TOKENS),
    Segment("linear0", 3, 0, TOKENS),
)


@contextmanager
def engine(path: Path | str) -> Iterator[KvdClient]:
    with KvdClient(path, engine_id="e", spec=SPEC, block_tokens=BLOCK, compat=FORMAT) as client:
        yield client


@pytest.mark.parametrize(
    ("geometry", "head", "segment", "size", "changed"),
    [
        (LATENT, 0, SEGMENTS[0], 2, TOKENS * 8),
        (KEYS, 1, SEGMENTS[1], 2, TOKENS * 4),
        (WINDOW, 0, SEGMENTS[2], 2, 8 * 4),
        (STATE, 1, SEGMENTS[3], 4, 16),
    ],
    ids=["latent", "keys", "window", "state"],
)
def test_one_head_arrives_changed_and_everything_else_as_it_was(
    tmp_path: Path, geometry: Geometry, head: int, segment: Segment, size: int, changed: int
) -> None:
    place = HeadOfLayer(geometry, geometry.layers[0], head)
    with (
        kvd(tmp_path, name="p") as here,
        kvd(tmp_path, name="d") as there,
        DamageGate(tmp_path / "gate", here.socket, place) as gate,
        engine(gate.path) as prefill,
        engine(there.socket) as decode,
    ):
        gate.damaging = True
        grant = there.grant(PROMPT, compat=FORMAT)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
        fill(lease, PROMPT, spec=SPEC)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        written, arrived = {}, {}
        with decode.attach(grant.transfer_id) as state:
            for one in SEGMENTS:
                arrived[one.group] = b"".join(state.views(one))
                expected = bytearray(len(arrived[one.group]))
                Content(SPEC, PROMPT).write(one, [memoryview(expected)])
                written[one.group] = bytes(expected)
        assert gate.damaged_numbers >= changed and gate.damaged_segments
        before, after = (np.frombuffer(one[segment.group], np.uint8) for one in (written, arrived))
        differing = np.flatnonzero(before != after)
        assert len(differing) == changed
        assert set((before ^ after)[differing]) == {EXPONENT_BIT}
        assert set(differing % size) == {size - 1}  # the byte with the exponent
        row = len(before) // (1 if size == 4 else segment.stop - segment.start)
        heads = place.columns("bfloat16", "float32")[0]
        assert all(heads.start <= at % row < heads.stop for at in differing)
        del written[segment.group], arrived[segment.group]
        assert written == arrived


def test_a_place_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}'
    )
    assert HeadOfLayer.of_model(tmp_path).layer == 0
    with pytest.raises(InputError, match="no state in layer 7"):
        HeadOfLayer.of_model(tmp_path, 7)
    with pytest.raises(InputError, match="its heads are 0 to 1"):
        HeadOfLayer.of_model(tmp_path, 1, head=2)
