"""The surfaces that the experiments walk through, each with the words it is shown under."""

from __future__ import annotations

from anisoscope.theory.surfaces import Surface, make_surface

WIDTH = 12


def gallery(seed: int) -> dict[str, Surface]:
    """Every kind of surface in a common width, by its words; rotations and random forms follow the seed."""
    return {
        "circle": make_surface("circle", radius=0.5, width=WIDTH, seed=seed),
        "3-sphere": make_surface("sphere", dimension=3, radius=2.0, width=WIDTH, seed=seed),
        "ellipsoid": make_surface("ellipsoid", axes=(1.0, 1.5, 2.0), width=WIDTH, seed=seed),
        "saddle": make_surface("saddle", up=1.0, down=0.5, width=WIDTH, seed=seed),
        "Swiss roll": make_surface("swiss_roll", width=WIDTH, seed=seed),
        "Veronese surface": make_surface("veronese", width=WIDTH, seed=seed),
        "random quadratic graph": make_surface("quadratic", dimension=4, normals=6, kappa=3.0, width=WIDTH, seed=seed),
    }
