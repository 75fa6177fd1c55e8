"""A recipe trained and watched: the monitor as an observer of the training loop, and whole studies in one run."""
