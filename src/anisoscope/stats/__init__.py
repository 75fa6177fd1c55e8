"""Mergeable statistics: immutable values with ``update`` and ``merge``, accumulated in float64."""
