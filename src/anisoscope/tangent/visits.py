"""Half steps of semi-NMF for many fits by kernels that visit each row once; see ``kernels.visits``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device
from anisoscope.tangent.sweeps import has_kernels, inverses

LEAST_PLACES = 16  # what a product on tensor cores takes


def can_visit(a: Float[Tensor, "f n d"], rank: int) -> bool:
    """Whether the kernels serve these rows."""
    return has_kernels(a.device, rank) and a.dtype == torch.float32


@on_its_device
def warm_codes(
    a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"], sweeps: int, settled: float
) -> Float[Tensor, "f k n"]:
    """``descent.solved`` of all fits; rows settle 128 at a time, each part to the tolerance of all together."""
    kernels, (fits, n, width), rank = kernels_of("visits"), a.shape, concepts.shape[1]
    gram = concepts @ concepts.mT
    active = torch.ones(fits, dtype=torch.bool, device=a.device)
    # Where concepts nearly cancel there is no inverse, and rows start from zero.
    free, _ = inverses(gram, active, 1 / (rank * torch.finfo(a.dtype).eps))
    codes = torch.empty(fits, rank, n, dtype=a.dtype, device=a.device)
    kernels.warm_codes[(-(-n // kernels.ROWS), fits)](
        a.contiguous(), concepts.to(a.dtype).contiguous(), gram, free, codes, n, width, sweeps, settled,
        **_options(rank),
    )  # fmt: skip
    return codes


@dataclass(frozen=True)
class HalfSteps:
    """Rows of several fits, and room for what each tile of rows adds up to, and for all of them together."""

    a: Float[Tensor, "f n d"]
    pull: Float[Tensor, "f t k d"]
    second: Float[Tensor, "f t k k"]
    pull_sum: Float[Tensor, "f k d"]
    second_sum: Float[Tensor, "f k k"]

    @classmethod
    def of(cls, a: Float[Tensor, "f n d"], rank: int) -> HalfSteps:
        """Room for so many concepts."""
        fits, n, width = a.shape
        tiles = -(-n // kernels_of("visits").ROWS)
        # Zeros: what is not active is never written, and meets an inverse of zero.
        sums = (torch.zeros(fits, rank, size, dtype=torch.float64, device=a.device) for size in (width, rank))
        parts = (a.new_empty(fits, tiles, rank, size) for size in (width, rank))
        return cls(a.contiguous(), *parts, *sums)

    @on_its_device
    def take(
        self, codes: Float[Tensor, "f k n"], concepts: Float[Tensor, "f k d"], gram: Float[Tensor, "f k k"],
        active: Tensor, sweeps: int,
    ) -> tuple[Float[Tensor, "f k k"], Float[Tensor, "f k d"]]:  # fmt: skip
        """Rounds over the codes of the active fits, in place; gives ``Z^T Z`` and ``Z^T A`` in float64, which the next
        call writes over."""
        kernels, (fits, n, width), (_, tiles, rank, _) = kernels_of("visits"), self.a.shape, self.pull.shape
        kernels.half_step[(tiles, fits)](
            self.a, concepts.to(self.a.dtype).contiguous(), gram.contiguous(), codes, self.pull, self.second, active,
            n, width, tiles, S=sweeps, **_options(rank),
        )  # fmt: skip
        # ``sum`` would copy all of it to float64 first, and that of fits that are not active too.
        kernels.add_up[(-(-rank * width // kernels.ADDED) + 1, fits)](
            self.pull, self.second, active, self.pull_sum, self.second_sum, tiles, rank * width,
            K=rank, P=_places(rank), B=kernels.ADDED,
        )  # fmt: skip
        return self.second_sum, self.pull_sum


def _options(rank: int) -> dict[str, int]:
    kernels = kernels_of("visits")
    places = _places(rank)
    return {"K": rank, "P": places, "B": kernels.ROWS, "W": kernels.DEPTH, "num_warps": 4 if places < 64 else 8}


def _places(rank: int) -> int:
    return max(LEAST_PLACES, 1 << (rank - 1).bit_length())
