"""DeepSpeed: the engine, its gradients, averages and fragments. No other room touches DeepSpeed's objects."""
