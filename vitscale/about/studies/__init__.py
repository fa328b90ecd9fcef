"""Studies: many runs from one file; what is chosen among them by development splits, and what runs them."""
