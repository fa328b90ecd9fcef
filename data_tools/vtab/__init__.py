"""VTAB-1k from local copies: which images its 19 tasks take, what their labels are, and datasets of them."""
