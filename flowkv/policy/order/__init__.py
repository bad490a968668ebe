"""The compiled order over slots that all leaf-first policies share."""
