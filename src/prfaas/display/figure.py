"""Shared by all figures: the optional import of matplotlib, colours, and saving to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.errors import InputError

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as pyplot
except ImportError:
    raise InputError(
        "plots require matplotlib", where="--plot", fix="pip install 'prfaas[plot]'"
    ) from None

# Okabe and Ito's palette: colour-blind readers can tell its colours apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
PURPLE, SKY = "#CC79A7", "#56B4E9"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the folder: {error.strerror}",
            where="--plot",
            fix="name a writable folder",
        ) from None


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
