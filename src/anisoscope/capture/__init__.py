"""Capture: the only package that registers hooks, and the way from a batch of text to rows of activations."""
