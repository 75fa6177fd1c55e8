"""Training from scratch: recipes (``recipe``), data (``data``), the loop (``loop``) and its checkpoints."""
