"""Training in five rooms, from optimizers up to the loop. Started by `pretrain.py`, a rank of a launch at a time."""
