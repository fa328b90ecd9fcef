"""vitscale: pre-train Vision Transformers at scale, on your own hardware."""

__version__ = "0.1.0"
