"""The connector's settings: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from prfaas.config.host import NodeSection
from prfaas.errors import InputError

WHERE = "kv_connector_extra_config"
# Not fp8: its bytes mean nothing without the scales of the engine that wrote them.
WIRE_DTYPES = ("float32", "bfloat16", "float16")
FormSetting: TypeAlias = Literal["auto", "native", "canonical"]


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kvd: Annotated[str, msgspec.Meta(min_length=1)]  # the path given to `prfaas kvd --socket`
    url: str | None = None  # where gateways reach this server
    # native: whole blocks, between equal vLLM servers. canonical: any engine with the same model.
    # auto: each hand-off in the native form where both servers are equal, else in the canonical.
    form: FormSetting = "auto"
    # The blocks that name prefixes in the canonical form: equal in all engines of a deployment.
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = NodeSection().block_tokens
    # The dtypes of the canonical form, where they shall not be the cache's own: vLLM casts.
    wire_kv_dtype: str | None = None
    wire_state_dtype: str | None = None
    # Whether the kvd keeps the state of an answer that has ended, for the next prompt.
    keep_answers: bool = NodeSection().keep_answers
    # How long a request without a hand-off waits for the kvd's answer whether it has a prefix.
    lookup_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    if not extra.get("kvd"):
        raise InputError(
            "no kvd is configured",
            where=WHERE,
            fix='add "kvd" with the path given to `prfaas kvd --socket`',
        )
    try:
        settings = msgspec.convert(dict(extra), ConnectorSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(ConnectorSettings.__struct_fields__)
        raise InputError(str(error), where=WHERE, fix=f"settings are: {known}") from None
    for name in ("wire_kv_dtype", "wire_state_dtype"):
        dtype = getattr(settings, name)
        if dtype is not None and dtype not in WIRE_DTYPES:
            raise InputError(
                f"{dtype!r} cannot be the dtype of the canonical form",
                where=f"{WHERE}: {name}",
                fix=f"use one of: {', '.join(WIRE_DTYPES)}",
            )
    return settings
