"""DeepSpeed: the engine, its gradients, averages and fragments."""
