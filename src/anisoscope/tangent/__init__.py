"""Tangent proxies fitted from activations, their controls, and how much of a gradient they hold."""
