"""Types and arithmetic without any dependency on torch: geometry, layout, keys, sizes, errors."""
