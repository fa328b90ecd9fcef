"""What is decided and loaded before the first step: plan, memory, micro-batch, teacher and weights."""
