"""Tools of development. Not in the wheel, never imported by the package."""
