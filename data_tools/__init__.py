"""Image collections -> datasets of shards; and datasets without copies of test images, as splits and as subsets."""
