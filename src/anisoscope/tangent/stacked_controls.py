"""Energies of random and of normal controls in many second moments at once, and what is left without each control.

``drawn`` says how, by forms: small matrices in place of orthonormal bases. Draws lie here with the width last, zero in
their first K coordinates, so that one product takes all of them through all moments and its result needs no
rearranging. What the first K coordinates of random controls add is what a basis of the first K axes adds with another
c; so these axes stand behind the reflections, and random controls are those of the last basis.

Letters: S sites, P bases (kinds of proxies), C groups of tokens with all tokens as the last, B draws, K the rank, D the
width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device
from anisoscope.measures.small_eigh import small_eigh
from anisoscope.stats.gram_matrices import PARTED_WIDTH
from anisoscope.stats.precision import has_tensor_cores, on_tensor_cores, two_parts
from anisoscope.tangent.controls import mirrored
from anisoscope.tangent.drawn import Gaussians
from anisoscope.tangent.sweeps import has_kernels
from anisoscope.tangent.wide_controls import Products, products_in_halves

IMAGE_CELLS = 5 << 25  # images of draws held at a time: those of 18 halves of width 384 and rank 16 are
MOST_RANK = 32  # larger matrices no longer fit into registers
STEPS = 3  # of Newton's, towards orthonormal columns
LEAST_COSINE = 1e-8  # between a basis and the first axes: below it the plain path chooses a reflection


@dataclass(frozen=True)
class Moments:
    """Second moments of rows: of each group, if there are groups, which are all rows then; and of all rows, with their
    mean and number."""

    groups: Float[Tensor, "s g d d"]
    total: Float[Tensor, "s d d"]
    mean: Float[Tensor, "s d"]
    n: Float[Tensor, "s"]

    def __getitem__(self, few: slice) -> Moments:
        return Moments(self.groups[few], self.total[few], self.mean[few], self.n[few])

    def beside(self, other: Moments) -> Moments:
        """These and those of other rows at the same sites."""
        return Moments(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def scatter(self) -> Float[Tensor, "s d d"]:
        """Around the mean of all rows."""
        mean = self.mean[:, None]
        return torch.addcmul(self.total, mean.mT, mean * -self.n[:, None, None])

    def covariance(self) -> Float[Tensor, "s d d"]:
        """Of all rows, with a trace of one."""
        found = self.scatter()
        return found / found.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]


@dataclass(frozen=True)
class OfControls:
    """Energies of random controls and of controls off each basis; ``tr P C P`` and ``|P C P|^2`` without each basis and
    its controls, and both of the covariance C itself, of trace one."""

    random: Float[Tensor, "s c b"]
    normal: Float[Tensor, "s p c b"]
    traces: Float[Tensor, "s p one_plus_b"]
    squares: Float[Tensor, "s p one_plus_b"]
    whole: Float[Tensor, "s two"]

    def __getitem__(self, few: slice) -> OfControls:
        return OfControls(*(value[few] for value in vars(self).values()))


@dataclass(frozen=True)
class _Drawn:
    """Draws with nothing in their first K coordinates, these coordinates, and inverses: of bases and of random ones."""

    z: Float[Tensor, "b k d"]
    head: Float[Tensor, "b k k"]
    off: Float[Tensor, "p_plus_one b k k"]

    @classmethod
    def of(cls, drawn: Gaussians, bases: int) -> _Drawn:
        """In float64, beside so many bases."""
        off = torch.cat([drawn.of_few.expand(bases, -1, -1, -1), drawn.of_whole[None]])
        return cls(torch.nn.functional.pad(drawn.tail.double(), (drawn.head.shape[2], 0)), drawn.head.double(), off)


def of_controls(moments: Moments, bases: Float[Tensor, "s p d k"], drawn: Gaussians, dtype: torch.dtype) -> OfControls:
    """All of it, a few sites at a time. ``dtype`` is that of products with the moments of groups."""
    sites, groups = moments.groups.shape[:2]
    count, rank, wide = bases.shape[1], bases.shape[3], _Drawn.of(drawn, bases.shape[1])
    near = wide.z.to(dtype)
    by_kernel = has_kernels(near.device, rank) and rank <= MOST_RANK and count > 0
    together = by_kernel and _in_halves(near)  # few images are held there at a time, and projectors serve all sites
    step = max(1, sites if together else IMAGE_CELLS // ((groups + 2) * near.numel()))
    of_few, q = _by_kernel if by_kernel else _of_few, _orthonormal(bases.double())
    mirrors = _mirrors(q)
    parts = [
        of_few(moments[few], q[few], mirrors[few], wide, near)
        for few in (slice(at, at + step) for at in range(0, sites, step))
    ]
    if len(parts) == 1:
        return parts[0]
    return OfControls(*(torch.cat(each) for each in zip(*(vars(one).values() for one in parts), strict=True)))


def _orthonormal(q: Float[Tensor, "s p d k"]) -> Float[Tensor, "s p d k"]:
    """Columns that are orthonormal to float32 made so to float64, by a step of Newton's; no question to the device."""
    return torch.baddbmm(q.flatten(0, 1), q.flatten(0, 1), (q.mT @ q).flatten(0, 1), beta=1.5, alpha=-0.5).view_as(q)


def _mirrors(q: Float[Tensor, "s p d k"]) -> Float[Tensor, "s p_plus_one d k"]:
    """``controls.mirrors`` of each basis, and then the first axes; NaN where reflections of a basis are many, or none:
    such a site is then left to the plain path."""
    sites, _, _, k = q.shape
    top = q[:, :, :k]
    inner = (top.mT @ top).flatten(0, 1)
    # What is not finite would end the decomposition of all of them.
    _, right = small_eigh(torch.where(torch.isfinite(inner.sum(dim=(1, 2), keepdim=True)), inner, 0.0))
    right = right.view_as(top)
    along = top @ right
    # Roots of eigenvalues would have half as many digits where a cosine is small, and of wide rows one basis in sixty
    # has one below 1e-4. What their vectors lack is made up for by steps of Newton's: one, unless several are small.
    cosines = torch.linalg.vector_norm(along, dim=2)
    left = along / torch.where(cosines > LEAST_COSINE, cosines, torch.nan)[:, :, None]
    for _ in range(STEPS):
        left = _orthonormal(left)
    axes = torch.eye(q.shape[2], k, dtype=q.dtype, device=q.device).expand(sites, 1, -1, -1)
    return torch.cat([mirrored(q, left, cosines, right), axes], dim=1)


def _of_few(
    moments: Moments, q: Float[Tensor, "s p d k"], x: Float[Tensor, "s p_plus_one d k"], drawn: _Drawn,
    near: Float[Tensor, "b k d"],
) -> OfControls:  # fmt: skip
    groups, z = moments.groups.to(near.dtype), drawn.z
    images = _images(moments.total[:, None], z)
    whole = _form(images, z)
    form = torch.cat([_form(_images(groups, near), near), whole], dim=1) if groups.shape[1] else whole
    own, across = _through(moments.total[:, None], x, z)
    if groups.shape[1]:
        few = _through(groups, x.to(near.dtype), near)
        own_all, across_all = (torch.cat(two, dim=2) for two in zip(few, (own, across), strict=True))
    else:
        own_all, across_all = own, across
    c = _against(x, z)
    c[:, -1] = -drawn.head.mT
    mixer = c @ drawn.off
    found = torch.einsum("scbij,pbij->spcb", form, drawn.off) - 2 * torch.einsum(
        "spcbij,spbij->spcb", across_all, mixer
    )
    found = found + torch.einsum("spcil,spblj,spbij->spcb", own_all, c, mixer)
    normal = (own[:, :-1], across[:, :-1], c[:, :-1], drawn.off[:-1])
    left = _left_over(moments, q, x[:, :-1], z, images[:, :, :, 0], whole, normal)
    return OfControls(found[:, -1], found[:, :-1], *left)


def _images(moments: Float[Tensor, "s c d d"], z: Float[Tensor, "b k d"]) -> Float[Tensor, "b k s c d"]:
    """``M z`` of every moment and draw, in one product."""
    sites, cells, width, _ = moments.shape
    flat = _product(z.flatten(0, 1), moments.reshape(-1, width))  # a moment is its own transpose
    return flat.view(*z.shape[:2], sites, cells, width)


def _product(left: Float[Tensor, "m d"], right: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """``left right^T``, on tensor cores in parts where that is much faster."""
    if left.dtype == torch.float32 and left.shape[1] >= PARTED_WIDTH and has_tensor_cores(left.device):
        (high, low), (near, rest) = two_parts(left), two_parts(right)
        with on_tensor_cores():
            return torch.cat([high, high, low], dim=1) @ torch.cat([near, rest, near], dim=1).mT
    return left @ right.mT


def _form(images: Float[Tensor, "b k s c d"], z: Float[Tensor, "b k d"]) -> Float[Tensor, "s c b k k"]:
    """``Z^T M Z`` of every moment and draw, float64."""
    b, k, sites, cells, width = images.shape
    found = images.reshape(b, k * sites * cells, width) @ z.mT
    return found.view(b, k, sites, cells, k).permute(2, 3, 0, 1, 4).double()


def _through(
    moments: Float[Tensor, "s c d d"], q: Float[Tensor, "s p d k"], z: Float[Tensor, "b k d"]
) -> tuple[Float[Tensor, "s p c k k"], Float[Tensor, "s p c b k k"]]:
    """``Q^T M Q`` and ``Q^T M Z`` of every moment, basis and draw, float64."""
    held = moments[:, None] @ q[:, :, None]
    return (q.mT[:, :, None] @ held).double(), _against(held, z)


def _against(columns: Float[Tensor, "*lead d k"], z: Float[Tensor, "b k d"]) -> Float[Tensor, "*lead b k k"]:
    """``columns^T Z`` of each draw, float64."""
    b, k, width = z.shape
    flat = columns.mT @ z.view(b * k, width).mT
    return flat.unflatten(-1, (b, k)).transpose(-3, -2).double()


def _left_over(
    moments: Moments, q: Float[Tensor, "s p d k"], x: Float[Tensor, "s p d k"], z: Float[Tensor, "b k d"],
    images: Float[Tensor, "b k s d"], form: Float[Tensor, "s one b k k"], normal: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Float[Tensor, "s p one_plus_b"], Float[Tensor, "s p one_plus_b"], Float[Tensor, "s two"]]:  # fmt: skip
    """From ``S z``, ``Z^T S Z``, ``X^T S X`` and ``X^T S Z`` of all rows' second moment S: taking the mean off them is
    a product of vectors, and ``C^2`` is never formed."""
    (own, across, c, off), mean = normal, moments.mean
    unit = moments.covariance()
    trace = moments.total.diagonal(dim1=1, dim2=2).sum(dim=1) - moments.n * mean.square().sum(dim=1)
    shrink, n = 1 / trace, moments.n[:, None, None, None]
    along = torch.einsum("bkd,sd->sbk", z, mean)
    inside = (mean[:, None, None] @ x)[:, :, 0]
    lead = shrink[:, None, None, None]
    form1 = (form[:, 0] - n * along[:, :, :, None] * along[:, :, None, :]) * lead
    own1 = (own[:, :, 0] - n * inside[:, :, :, None] * inside[:, :, None, :]) * lead
    across1 = across[:, :, 0] - n[:, None] * inside[:, :, None, :, None] * along[:, None, :, None, :]
    across1 = across1 * lead[:, None]
    image = images.permute(2, 0, 1, 3) - n * along[:, :, :, None] * mean[:, None, None, :]
    image = image * lead
    form2 = image @ image.mT
    once = unit[:, None] @ x
    own2, across2 = once.mT @ once, _against(unit[:, None] @ once, z)
    turned = c.mT

    def reflected(form: Tensor, own: Tensor, across: Tensor) -> Tensor:
        mixed = turned @ across
        return off @ (form[:, None] - mixed - mixed.mT + turned @ own[:, :, None] @ c)

    held1, held2 = reflected(form1, own1, across1), reflected(form2, own2, across2)
    one = unit.diagonal(dim1=1, dim2=2).sum(dim=1)
    two = unit.square().sum(dim=(1, 2))
    basis = unit[:, None] @ q
    inner = q.mT @ basis
    first = torch.cat([_traces(inner)[:, :, None], _traces(held1)], dim=2)
    second = torch.cat([basis.square().sum(dim=(2, 3))[:, :, None], _traces(held2)], dim=2)
    both = torch.cat([inner.square().sum(dim=(2, 3))[:, :, None], (held1 * held1.mT).sum(dim=(3, 4))], dim=2)
    return one[:, None, None] - first, two[:, None, None] - 2 * second + both, torch.stack([one, two], dim=1)


def _traces(matrices: Float[Tensor, "*lead k k"]) -> Float[Tensor, "*lead"]:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


@on_its_device
def _by_kernel(
    moments: Moments, q: Float[Tensor, "s p d k"], x: Float[Tensor, "s p_plus_one d k"], drawn: _Drawn,
    near: Float[Tensor, "b k d"],
) -> OfControls:  # fmt: skip
    """The same by as few launches as there are products with moments, and one more: a GPU waits for the host here.

    With the scatter around the mean in place of the second moment of all rows, which is a product of vectors more.
    """
    (sites, bases, width, k), b, z, groups = q.shape, len(near), drawn.z, moments.groups.shape[1]
    mean, lines, scatter = moments.mean[:, None], (bases + 1) * k, moments.scatter()
    rows = torch.cat([x, q], dim=1).mT.reshape(sites, lines + bases * k, width)
    held = rows @ scatter
    columns = torch.cat([rows[:, :lines], held[:, :lines], mean], dim=1)
    wide, given = _in_halves(near), (moments.groups, scatter, rows[:, :lines], held[:, :lines], columns, z)
    found = products_in_halves(*given, drawn.off[:: len(drawn.off) - 1]) if wide else _products(*given, near)
    found.against.view(sites, -1, b, k)[:, lines - k : lines] = -drawn.head.permute(2, 0, 1)
    energies, left = z.new_empty(sites, bases + 1, groups + 1, b), z.new_empty(2, sites, bases, b + 1)
    whole, kernels = z.new_empty(sites, 2), kernels_of("controls")
    places = max(kernels.LEAST_PLACES, 1 << (k - 1).bit_length())
    kernels.controls[(b, bases + 1, sites)](
        drawn.off, found.against, columns @ columns.mT, found.form, found.form_twice, found.across_twice,
        held[:, lines:] @ torch.cat([rows[:, lines:], held[:, lines:]], dim=1).mT,
        found.forms, found.owns, found.acrosses,
        scatter.diagonal(dim1=1, dim2=2).sum(dim=1), torch.linalg.vector_norm(scatter.flatten(1), dim=1),
        energies, left[0], left[1], whole, moments.n.contiguous(), sites, bases, b, groups,
        SUMMED=wide, K=k, P=places, num_warps=max(1, places * places // kernels.PER_WARP),
    )  # fmt: skip
    return OfControls(energies[:, -1], energies[:, :-1], left[0], left[1], whole)


def _in_halves(near: Float[Tensor, "b k d"]) -> bool:
    """Whether the kernel is given products in halves."""
    return near.dtype == torch.float32 and near.shape[2] >= PARTED_WIDTH


def _products(
    groups: Float[Tensor, "s g d d"], scatter: Float[Tensor, "s d d"], x: Float[Tensor, "s l d"],
    held: Float[Tensor, "s l d"], columns: Float[Tensor, "s h d"], z: Float[Tensor, "b k d"],
    near: Float[Tensor, "b k d"],
) -> Products:  # fmt: skip
    """Products with the scatter in float64 and with groups in the type of ``near``, as they come."""
    (sites, count, width, _), (b, k, _) = groups.shape, z.shape
    flat, groups, x = z.view(b * k, width), groups.to(near.dtype), x.to(near.dtype)
    images = flat @ scatter.view(sites * width, width).mT
    each = images.view(b, k, sites, width).permute(2, 0, 1, 3).reshape(sites * b, k, width)
    near_images = near.view(b * k, width) @ groups.reshape(-1, width).mT
    through = (x[:, None] @ groups).flatten(1, 2)
    return Products(
        against=columns.flatten(0, 1) @ flat.mT,
        form=images.view(b, k * sites, width) @ z.mT,
        form_twice=each @ each.mT,
        across_twice=(held @ images.view(b * k, sites, width).permute(1, 2, 0)).flatten(0, 1),
        forms=near_images.view(b, k * sites * count, width) @ near.mT,
        owns=through @ x.mT,
        acrosses=through.flatten(0, 1) @ near.flatten(0, 1).mT,
    )
