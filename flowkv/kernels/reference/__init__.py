"""The oracle in torch: every operation, plain and slow, that the others are held to."""
