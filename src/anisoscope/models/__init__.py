"""Models: where they come from (``load``) and the named places at which they are read (``sites``)."""
