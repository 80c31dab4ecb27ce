"""What makes and measures the engine and is no part of it: never in the wheel, never imported by the package."""
