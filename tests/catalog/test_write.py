from __future__ import annotations

from prfaas.catalog import Accelerator, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.load import parse_catalog
from prfaas.catalog.write import profile_toml


def test_what_is_written_is_read_back() -> None:
    record = ProfileRecord(
        model='a "quoted" \\ name',
        accelerator="x1",
        gpus=4,
        engine="prfaas, Ünïcode",
        status="measured",
        source="today; here",
        prefill=[PrefillPoint(64, 0, 1e-5), PrefillPoint(128, 0, 3.0), PrefillPoint(64, 512, 0.2)],
        decode=[DecodePoint(1, 0.0123)],
    )
    accelerator = Accelerator("x1", title="X 1")
    read = parse_catalog(profile_toml(record, accelerator), "written.toml")
    assert read.profiles == [record] and read.accelerators == [accelerator]
    alone = parse_catalog(profile_toml(record), "written.toml")
    assert alone.profiles == [record] and alone.accelerators == []


def test_digits_beyond_the_fifth_are_noise() -> None:
    record = ProfileRecord(
        model="m",
        accelerator="x1",
        gpus=1,
        status="measured",
        source="s",
        prefill=[PrefillPoint(1, 0, 0.123456789), PrefillPoint(2, 0, 123.0)],
    )
    (read,) = parse_catalog(profile_toml(record), "written.toml").profiles
    assert [point.seconds for point in read.prefill] == [0.12346, 123.0]
    assert read.decode == []
