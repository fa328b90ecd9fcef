"""What a run did, found out again from its files: the order, the crops and the pixels are functions of its recipe."""
