"""What people look at. Imports no torch."""
