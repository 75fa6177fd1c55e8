"""Pure mathematics on rows and States. Nothing here knows a model."""
