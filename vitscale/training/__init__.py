"""Training: the trainer, its DeepSpeed set-up, optimizer, schedule and metrics."""
