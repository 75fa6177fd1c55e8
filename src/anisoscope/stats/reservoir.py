"""Reservoir: a uniform sample of rows out of a stream, the same for every way of cutting and merging that stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

from anisoscope.errors import OptionError, ShapeError

# Steele, Lea and Flood's splitmix64: a counter times an odd constant, then a bijective scramble of the 64 bits.
GAMMA = 0x9E3779B97F4A7C15
LARGEST_KEY = (1 << 63) - 1
SCRAMBLE = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Reservoir:
    """A uniform sample without replacement of at most ``capacity`` rows (a bottom-k sample).

    Every row has a 64-bit key that is a pure function of ``seed``, the ``shard`` it came in and its index there; the
    ``capacity`` rows with the smallest keys are the sample, so each set of that size is equally likely. What is kept
    depends on the set of rows seen and on nothing else: ``merge`` is associative and commutative to the last bit, and
    so is any cut of a shard into chunks. Two streams need two shards; a stream that is to give one sample however
    many workers read it needs shards that do not depend on the workers (files or sequences, not ranks).

    Keys and numbers live on the CPU, rows on the device they were asked for; updates never wait for that device.
    """

    capacity: int
    seed: int
    shard: int
    """Where the next rows belong: the only field in which ``a.merge(b)`` and ``b.merge(a)`` differ."""
    taken: tuple[tuple[int, int], ...]
    """(shard, number of rows seen of it), sorted, for each shard that gave a row."""
    keys: Int64[Tensor, "k"]
    numbers: Int64[Tensor, "k 2"]
    """(shard, index in the shard) of each sampled row, in the order of ``rows``."""
    places: Int64[Tensor, "k"]
    pool: tuple[Float[Tensor, "_ d"], ...]
    """Blocks of rows as they came in; ``places`` numbers rows through all blocks. Rows that were pushed out of the
    sample stay until half of the pool is such rows, so an update copies only what enters and not all of it."""
    limit: int = LARGEST_KEY
    """No row of this state's shard with a larger key will be in the sample, so none is stored on the way."""

    @classmethod
    def empty(
        cls,
        capacity: int,
        width: int,
        *,
        seed: int = 0,
        shard: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        expected: int = 0,
    ) -> Reservoir:
        """The state of no rows. Rows are stored as ``dtype``.

        ``expected``: this many rows will come in the shard, or more. What is already known to be no part of their
        sample is then not stored on the way: half the memory and none of the copies. Where fewer rows come after all,
        the sample is a uniform one still, but smaller.
        """
        if capacity < 1:
            raise OptionError(f"capacity={capacity}: a reservoir keeps one row or more")
        for name, value in (("seed", seed), ("shard", shard)):
            if not 0 <= value < 1 << 63:
                raise OptionError(f"{name}={value} must lie between 0 and 2**63 - 1")
        none = torch.zeros(0, dtype=torch.int64)
        rows = torch.zeros(0, width, dtype=dtype, device=device)
        limit = LARGEST_KEY
        if expected > capacity:
            limit = int(np.partition(row_keys(seed, shard, 0, expected), capacity - 1)[capacity - 1])
        return cls(capacity, seed, shard, (), none, none.reshape(0, 2), none, (rows,), limit)

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.pool[0].shape[1]

    @property
    def seen(self) -> int:
        """How many rows the sample was drawn from."""
        return sum(count for _, count in self.taken)

    @property
    def rows(self) -> Float[Tensor, "k d"]:
        """The sample, in the order of the keys: a random order, and any leading part of it is a uniform sample too."""
        return self.compact().pool[0]

    def stream_order(self) -> Int64[Tensor, "k"]:
        """Positions that put ``rows`` and ``numbers`` back into the order of the stream: by shard, then by index."""
        shard, index = self.numbers.numpy().T
        return torch.from_numpy(np.lexsort((index, shard)))

    def update(self, rows: Float[Tensor, "n d"]) -> Reservoir:
        """The state after these rows too, taken as the next ones of ``shard``. Copies only rows that enter."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ShapeError(f"a reservoir of width {self.width} takes (n, {self.width}), got {tuple(rows.shape)}")
        if len(rows) == 0:
            return self
        taken = dict(self.taken)
        start = taken.get(self.shard, 0)
        taken[self.shard] = start + len(rows)
        after = replace(self, taken=tuple(sorted(taken.items())))
        keys = row_keys(self.seed, self.shard, start, len(rows))
        enter = self._entering(keys)
        if len(enter) == 0:
            return after
        numbers = np.stack([np.full_like(enter, self.shard), start + enter], axis=1)
        # index_select gathers at twice the speed of rows[...], and always copies: the caller keeps its rows.
        block = rows.detach().index_select(0, torch.from_numpy(enter).to(rows.device)).to(self.pool[0])
        return after._with(torch.from_numpy(keys[enter]), torch.from_numpy(numbers), torch.arange(len(enter)), (block,))

    def merge(self, other: Reservoir) -> Reservoir:
        """The sample of both streams together. Further updates go on in this state's own shard."""
        if self.width != other.width:
            raise ShapeError(f"cannot merge reservoirs of width {self.width} and {other.width}")
        mine = {"capacity": self.capacity, "seed": self.seed, "dtype": self.pool[0].dtype}
        theirs = {"capacity": other.capacity, "seed": other.seed, "dtype": other.pool[0].dtype}
        for name, value in mine.items():
            if theirs[name] != value:
                raise OptionError(f"cannot merge reservoirs with {name}={value} and {name}={theirs[name]}")
        twice = sorted(dict(self.taken).keys() & dict(other.taken).keys())
        if twice:
            raise OptionError(
                f"both reservoirs hold rows of shard {twice[0]}: equal keys would bias the sample, and rows may be "
                "counted twice; give each stream its own shard= in Reservoir.empty, and merge each state once"
            )
        together = replace(self, taken=tuple(sorted(self.taken + other.taken)))
        pool = tuple(block.to(self.pool[0].device) for block in other.pool)
        return together._with(other.keys, other.numbers, other.places, pool).compact()

    def compact(self) -> Reservoir:
        """The same sample with its rows in one block, sorted by key, and nothing besides."""
        order = torch.arange(len(self.keys))
        if len(self.pool) == 1 and len(self.pool[0]) == len(order) and torch.equal(self.places, order):
            return self
        rows = self.pool[0].new_empty(len(order), self.width)
        # Block by block, since gluing the blocks together first would copy the rows that have left as well.
        by_place = self.places.argsort()
        ends = torch.tensor([len(block) for block in self.pool]).cumsum(0)
        bounds = [0, *torch.searchsorted(self.places[by_place], ends).tolist()]
        for block, end, low, high in zip(self.pool, ends.tolist(), bounds, bounds[1:], strict=False):
            here = by_place[low:high]
            inside = self.places[here] - (end - len(block))
            rows.index_copy_(0, here.to(rows.device), block.index_select(0, inside.to(rows.device)))
        return replace(self, places=order, pool=(rows,))

    def _entering(self, keys: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "m"]:
        """Positions, ascending, of at most ``capacity`` keys that are small enough to enter."""
        largest = min(self.limit, self.keys[-1].item()) if len(self.keys) == self.capacity else self.limit
        # <= and not <: keys of different shards may tie, and the sort below decides ties by number.
        enter = np.flatnonzero(keys <= largest)
        if len(enter) > self.capacity:
            enter = np.sort(enter[np.argpartition(keys[enter], self.capacity - 1)[: self.capacity]])
        return enter

    def _with(
        self,
        keys: Int64[Tensor, "m"],
        numbers: Int64[Tensor, "m 2"],
        places: Int64[Tensor, "m"],
        pool: tuple[Float[Tensor, "_ d"], ...],
    ) -> Reservoir:
        """The sample of what is kept here and of these rows."""
        held = sum(len(block) for block in self.pool)
        keys, numbers = torch.cat([self.keys, keys]), torch.cat([self.numbers, numbers])
        places = torch.cat([self.places, places + held])
        order = _by_key(keys.numpy(), numbers.numpy())[: self.capacity]
        after = replace(self, keys=keys[order], numbers=numbers[order], places=places[order], pool=self.pool + pool)
        crowded = held + sum(len(block) for block in pool) > 2 * self.capacity
        return after.compact() if crowded else after


def row_keys(seed: int, shard: int, start: int, count: int) -> Int64[np.ndarray, "n"]:
    """Keys of the rows ``start .. start + count - 1`` of a shard: outputs of the splitmix64 stream of (seed, shard).

    Within a shard the key is a bijection of the index, so keys never tie there. As signed integers they have an
    order, which is all that is asked of them.
    """
    origin = _scramble(_scramble(_words(seed + GAMMA)) + _words(shard * GAMMA))
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    index *= np.uint64(GAMMA)
    index += origin
    return _scramble(index).view(np.int64)


def _words(value: int) -> UInt64[np.ndarray, "1"]:
    """One 64-bit word, as an array: arrays wrap around in silence where numpy scalars warn."""
    return np.array([value % (1 << 64)], dtype=np.uint64)


def _scramble(z: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """The output function of splitmix64, in place."""
    for shift, factor in SCRAMBLE:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _by_key(keys: Int64[np.ndarray, "n"], numbers: Int64[np.ndarray, "n 2"]) -> Int64[Tensor, "n"]:
    """The order by key, then shard, then index."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    if (ordered[1:] == ordered[:-1]).any():  # one chance in 2**64 a pair: not worth a sort by three columns each time
        order = np.lexsort((numbers[:, 1], numbers[:, 0], keys))
    return torch.from_numpy(order)
