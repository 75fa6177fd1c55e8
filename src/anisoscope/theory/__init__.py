"""Data whose geometry is known in closed form."""
