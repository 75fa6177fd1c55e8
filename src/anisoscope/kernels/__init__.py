"""Fused GPU kernels (Triton), each behind a plain path that gives the same results."""
