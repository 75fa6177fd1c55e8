"""Results as records. Imports no torch, so that results can be read anywhere."""
